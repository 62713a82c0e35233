//! JSON schemas: what is settled before they are compiled.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::closed::close_objects;
use crate::error::Error;
use crate::lookahead::rewrite_patterns;
use crate::numbers::{NAMED, check_divisors, make_exact};

/// Whitespace between two parts of a JSON text: one space, or one line break and an indentation. A weak model repeats
/// blanks as long as it may, until its token limit cuts the answer.
const WHITESPACE: &str = r" |\r?\n[ \t]{0,32}";

/// Levels that references may lead through in all: each is a call deeper while a schema is compiled.
const MAX_REFERENCED_DEPTH: usize = 10_000;

/// The largest divisor, without its decimal point: a number's remainders are states of the lexer.
const MAX_DIVISOR: f64 = 100_000.0;

/// Properties of one object, and patterns of their names: they are compared with one another.
const MAX_PROPERTIES: usize = 2000;
const MAX_PATTERNS: usize = 100;

/// Properties of one object that may be left out: each adds four to the ways to go on, of which the library follows 2,000.
const MAX_OPTIONAL: usize = 450;

/// Patterns that one text may have to match at once. The lexer's states are sets of places in all of them, and are met
/// before any limit of the library's counts.
pub(crate) const MAX_AT_ONCE: usize = 10;

/// The schema as it is compiled.
pub(crate) fn check_schema(schema: Value) -> Result<Value, Error> {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => {
            return Err(Error::specification("the JSON schema is false, which no text satisfies"));
        }
        _ => {
            return Err(Error::specification("the JSON schema must be an object, true or false"));
        }
    };
    if schema.contains_key("x-guidance") {
        return Err(Error::specification(
            "the JSON schema uses \"x-guidance\", which is not supported",
        ));
    }
    schema.insert("x-guidance".to_owned(), json!({"whitespace_pattern": WHITESPACE}));
    let mut schema = Value::Object(schema);
    check_size(&schema)?;
    make_exact(&mut schema)?;
    close_objects(&mut schema);
    if rewrite_patterns(&mut schema)? {
        check_size(&schema)?;
    }
    if !mentions(&schema, "patternProperties") {
        keep_names_apart(&mut schema);
    }
    Ok(schema)
}

/// Refuse what would take too long, or too deep a stack.
pub(crate) fn check_size(schema: &Value) -> Result<(), Error> {
    let mut references = BTreeSet::new();
    let mut left = vec![schema];
    while let Some(value) = left.pop() {
        match value {
            Value::Object(map) => {
                if let Some(Value::String(reference)) = map.get("$ref") {
                    references.insert(reference.as_str());
                }
                for (name, most) in [
                    ("properties", MAX_PROPERTIES),
                    ("required", MAX_PROPERTIES),
                    ("patternProperties", MAX_PATTERNS),
                ] {
                    check_count(name, map.get(name), most)?;
                }
                let optional = optional(map);
                if optional > MAX_OPTIONAL {
                    return Err(Error::specification(format!(
                        "the JSON schema has an object with {optional} properties that are not \"required\"; \
                         the limit is {MAX_OPTIONAL}"
                    )));
                }
                if let Some(divisor) = map.get("multipleOf").and_then(Value::as_f64) {
                    check_divisor(divisor)?;
                }
                left.extend(map.values());
            }
            Value::Array(items) => left.extend(items),
            _ => {}
        }
    }
    check_divisors(schema)?;
    let at_once = at_once(schema, schema, &mut BTreeMap::new());
    if at_once > MAX_AT_ONCE {
        return Err(Error::specification(format!(
            "the JSON schema has texts match up to {at_once} of \"pattern\" and \"format\" at once, by \"allOf\" and \
             \"$ref\"; the limit is {MAX_AT_ONCE}"
        )));
    }
    let levels = references
        .iter()
        .filter_map(|reference| schema.pointer(reference.strip_prefix('#')?))
        .map(depth)
        .sum::<usize>();
    if levels > MAX_REFERENCED_DEPTH {
        return Err(Error::specification(format!(
            "the JSON schema's references lead through {levels} levels of definitions; the limit is \
             {MAX_REFERENCED_DEPTH}"
        )));
    }
    Ok(())
}

/// How many patterns one text somewhere below may have to match, at most.
fn at_once<'a>(root: &'a Value, schema: &'a Value, known: &mut BTreeMap<&'a str, usize>) -> usize {
    let map = match schema {
        Value::Object(map) => map,
        Value::Array(items) => {
            return items.iter().map(|item| at_once(root, item, known)).max().unwrap_or(0);
        }
        _ => return 0,
    };
    let own =
        ["pattern", "format"].iter().filter(|&&key| map.get(key).is_some_and(Value::is_string));
    let (mut sum, mut most) = (0, own.count());
    for (key, value) in map {
        match (key.as_str(), value) {
            ("allOf", Value::Array(items)) => {
                for item in items {
                    sum = at_once(root, item, known).saturating_add(sum);
                }
            }
            ("anyOf" | "oneOf", _) => sum = at_once(root, value, known).saturating_add(sum),
            ("$ref", Value::String(reference)) => {
                if !known.contains_key(reference.as_str()) {
                    // A reference within its own definition adds nothing, or is refused.
                    known.insert(reference, 0);
                    let target = reference.strip_prefix('#').and_then(|path| root.pointer(path));
                    let below = target.map_or(0, |target| at_once(root, target, known));
                    known.insert(reference, below);
                }
                sum = known[reference.as_str()].saturating_add(sum);
            }
            _ => most = most.max(at_once(root, value, known)),
        }
    }
    sum.saturating_add(most)
}

/// Have names that are not the schema's own written without escapes that they do not need.
///
/// The library compares names as they are written, so `"\u0061"` would be one more name beside `"a"`, of any value. It
/// allows few escapes where a name matches a pattern.
fn keep_names_apart(schema: &mut Value) {
    let map = match schema {
        Value::Array(items) => return items.iter_mut().for_each(keep_names_apart),
        Value::Object(map) => map,
        _ => return,
    };
    for (key, value) in map.iter_mut() {
        match value {
            _ if ["const", "enum", "default", "examples"].contains(&key.as_str()) => {}
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                named.values_mut().for_each(keep_names_apart);
            }
            _ => keep_names_apart(value),
        }
    }
    let has_names = map.contains_key("properties") || map.contains_key("required");
    let is_open =
        map.get("additionalProperties").is_none_or(|more| *more == true || *more == json!({}));
    if has_names && is_open {
        map.insert("patternProperties".to_owned(), json!({"": {}}));
        map.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
}

/// Whether a key of that name is anywhere in a schema.
fn mentions(schema: &Value, name: &str) -> bool {
    match schema {
        Value::Object(map) => {
            map.contains_key(name) || map.values().any(|value| mentions(value, name))
        }
        Value::Array(items) => items.iter().any(|item| mentions(item, name)),
        _ => false,
    }
}

/// How many properties of an object may be left out.
fn optional(map: &Map<String, Value>) -> usize {
    let Some(Value::Object(properties)) = map.get("properties") else { return 0 };
    let required: BTreeSet<&str> = match map.get("required") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => BTreeSet::new(),
    };
    properties.keys().filter(|name| !required.contains(name.as_str())).count()
}

fn check_count(name: &str, value: Option<&Value>, most: usize) -> Result<(), Error> {
    let count = match value {
        Some(Value::Object(map)) => map.len(),
        Some(Value::Array(items)) => items.len(),
        _ => 0,
    };
    if count <= most {
        return Ok(());
    }
    Err(Error::specification(format!(
        "the JSON schema has an object with {count} {name}; the limit is {most}"
    )))
}

fn check_divisor(divisor: f64) -> Result<(), Error> {
    let mut whole = divisor.abs();
    while whole.fract() != 0.0 && whole <= MAX_DIVISOR {
        whole *= 10.0;
    }
    if whole <= MAX_DIVISOR {
        return Ok(());
    }
    Err(Error::specification(format!(
        "the JSON schema uses \"multipleOf\" with {divisor}; without its decimal point a divisor may be {MAX_DIVISOR} at \
         most"
    )))
}

/// Levels of a value, which the parser of JSON has bounded.
fn depth(value: &Value) -> usize {
    match value {
        Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        _ => 1,
    }
}
