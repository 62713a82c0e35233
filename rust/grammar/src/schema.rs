//! JSON schemas: what is settled before they are compiled.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::error::Error;

/// What may stand between two parts of a JSON text: blanks, or one line break and the next line's indentation.
const WHITESPACE: &str = r"[ \t]{1,64}|\r?\n[ \t]{0,64}";

/// Levels that references may lead through in all: each is a call deeper while a schema is compiled.
const MAX_REFERENCED_DEPTH: usize = 10_000;

/// The largest divisor, without its decimal point: a number's remainders are states of the lexer.
const MAX_DIVISOR: f64 = 100_000.0;

/// The schema as it is compiled.
pub(crate) fn check_schema(schema: Value) -> Result<Value, Error> {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(true) => serde_json::Map::new(),
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
    let schema = Value::Object(schema);
    check_size(&schema)?;
    Ok(schema)
}

/// Refuse what would take too long, or too deep a stack.
fn check_size(schema: &Value) -> Result<(), Error> {
    let mut references = BTreeSet::new();
    let mut left = vec![schema];
    while let Some(value) = left.pop() {
        match value {
            Value::Object(map) => {
                if let Some(Value::String(reference)) = map.get("$ref") {
                    references.insert(reference.as_str());
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
    let levels = references
        .iter()
        .filter_map(|reference| schema.pointer(reference.strip_prefix('#')?))
        .map(depth)
        .sum::<usize>();
    if levels > MAX_REFERENCED_DEPTH {
        return Err(Error::specification(format!(
            "the JSON schema's references lead through {levels} levels of definitions; {MAX_REFERENCED_DEPTH} are the \
             most"
        )));
    }
    Ok(())
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
