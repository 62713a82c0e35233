//! Numbers of a schema that the library, which reads them as `f64` and writes whole ones as `i64`, would get wrong.

use std::collections::BTreeMap;

use serde_json::{Map, Number, Value};

use crate::error::Error;

/// The largest `f64` below 2^63.
const LARGEST: f64 = 9_223_372_036_854_774_784.0;

/// Keywords whose value is a number's bound, and whether it is a lower one.
const BOUNDS: [(&str, bool); 4] = [
    ("minimum", true),
    ("exclusiveMinimum", true),
    ("maximum", false),
    ("exclusiveMaximum", false),
];

/// Keywords whose value has names of the user's own, a schema each.
pub(crate) const NAMED: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Move bounds inwards to what is exact; refuse constants that are not.
pub(crate) fn make_exact(schema: &mut Value) -> Result<(), Error> {
    match schema {
        Value::Object(map) => make_map_exact(map),
        Value::Array(items) => items.iter_mut().try_for_each(make_exact),
        _ => Ok(()),
    }
}

fn make_map_exact(map: &mut Map<String, Value>) -> Result<(), Error> {
    for (key, value) in map {
        if let Some(&(_, lower)) = BOUNDS.iter().find(|(name, _)| name == key) {
            if let Value::Number(number) = value {
                *number = exact_bound(key, number, lower)?;
                continue;
            }
        } else if key == "const" || key == "enum" {
            check_constant(value)?;
            continue;
        } else if NAMED.contains(&key.as_str())
            && let Value::Object(named) = value
        {
            // A reference may take it for a schema, so what is no schema is held to what constants are.
            for schema in named.values_mut() {
                match schema {
                    Value::Object(map) => make_map_exact(map)?,
                    other => check_constant(other)?,
                }
            }
            continue;
        }
        make_exact(value)?;
    }
    Ok(())
}

/// That bound, or the next one inwards that is an `f64`.
fn exact_bound(key: &str, number: &Number, lower: bool) -> Result<Number, Error> {
    let Some(rounded) = number.as_f64() else { return Ok(number.clone()) };
    let sign = if lower { 1.0 } else { -1.0 };
    if rounded * sign > LARGEST {
        return Err(Error::specification(format!(
            "the JSON schema uses {key:?} with {number}; numbers of 2^63 and more are not supported"
        )));
    }
    let mut bound = rounded * sign;
    if let Some(whole) = whole(number) {
        // As a lower bound, which moves upwards.
        let wanted = if lower { whole } else { -whole };
        if bound as i128 == wanted && bound.abs() <= LARGEST {
            return Ok(number.clone());
        }
        if (bound as i128) < wanted {
            bound = bound.next_up();
        }
    } else if bound >= -LARGEST {
        return Ok(number.clone());
    }
    let bound = bound.max(-LARGEST) * sign;
    Ok(Number::from_f64(bound).unwrap_or_else(|| number.clone()))
}

fn check_constant(value: &Value) -> Result<(), Error> {
    match value {
        Value::Number(number) => {
            let rounded = number.as_f64().unwrap_or(f64::INFINITY);
            let exact = whole(number).is_none_or(|whole| rounded as i128 == whole);
            if exact && rounded.abs() <= LARGEST {
                return Ok(());
            }
            Err(Error::specification(format!(
                "the JSON schema has the constant {number}, which is too large to be followed exactly; make it a text"
            )))
        }
        Value::Array(items) => items.iter().try_for_each(check_constant),
        Value::Object(map) => map.values().try_for_each(check_constant),
        _ => Ok(()),
    }
}

/// The number, if it was written as a whole one.
fn whole(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

/// Divisors of one number somewhere in a schema: at most how many, and their product.
#[derive(Clone, Copy)]
struct Divisors {
    count: usize,
    product: f64,
}

impl Divisors {
    const NONE: Self = Self { count: 0, product: 1.0 };

    fn and(self, other: Self) -> Self {
        Self { count: self.count + other.count, product: self.product * other.product }
    }

    fn or(self, other: Self) -> Self {
        Self { count: self.count.max(other.count), product: self.product.max(other.product) }
    }
}

/// Refuse divisors of which several hold for one number and whose product the library cannot reckon with.
pub(crate) fn check_divisors(schema: &Value) -> Result<(), Error> {
    let most = most_divisors(schema, schema, decimals(schema), &mut BTreeMap::new());
    if most.count < 2 || most.product <= f64::from(u32::MAX) {
        return Ok(());
    }
    Err(Error::specification(
        "the JSON schema has numbers divide by several of \"multipleOf\" at once, by \"allOf\" and \"$ref\", whose product \
         is too large; give their common multiple",
    ))
}

fn most_divisors<'a>(
    root: &'a Value,
    schema: &'a Value,
    decimals: i32,
    known: &mut BTreeMap<&'a str, Divisors>,
) -> Divisors {
    let map = match schema {
        Value::Object(map) => map,
        Value::Array(items) => {
            let each = items.iter().map(|item| most_divisors(root, item, decimals, known));
            return each.fold(Divisors::NONE, Divisors::or);
        }
        _ => return Divisors::NONE,
    };
    let mut most = Divisors::NONE;
    let mut all = match map.get("multipleOf").and_then(Value::as_f64) {
        Some(divisor) => Divisors { count: 1, product: divisor.abs() * 10_f64.powi(decimals) },
        None => Divisors::NONE,
    };
    for (key, value) in map {
        match (key.as_str(), value) {
            ("allOf", Value::Array(items)) => {
                for item in items {
                    all = all.and(most_divisors(root, item, decimals, known));
                }
            }
            ("anyOf" | "oneOf", _) => all = all.and(most_divisors(root, value, decimals, known)),
            ("$ref", Value::String(reference)) => {
                if !known.contains_key(reference.as_str()) {
                    // A reference within its own definition adds nothing, or is refused.
                    known.insert(reference, Divisors::NONE);
                    let target = reference.strip_prefix('#').and_then(|path| root.pointer(path));
                    let below = target.map_or(Divisors::NONE, |target| {
                        most_divisors(root, target, decimals, known)
                    });
                    known.insert(reference, below);
                }
                all = all.and(known[reference.as_str()]);
            }
            _ => most = most.or(most_divisors(root, value, decimals, known)),
        }
    }
    all.or(most)
}

/// The most decimals of any divisor.
fn decimals(schema: &Value) -> i32 {
    match schema {
        Value::Object(map) => {
            let mut most = 0;
            if let Some(mut divisor) = map.get("multipleOf").and_then(Value::as_f64) {
                while divisor.fract() != 0.0 {
                    divisor *= 10.0;
                    most += 1;
                }
            }
            map.values().map(decimals).fold(most, i32::max)
        }
        Value::Array(items) => items.iter().map(decimals).max().unwrap_or(0),
        _ => 0,
    }
}
