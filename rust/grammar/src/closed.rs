//! Objects of a schema that say nothing of other properties.

use serde_json::{Map, Value};

use crate::numbers::NAMED;

/// Keywords that say which other properties an object may have.
const SETTLED: [&str; 2] = ["additionalProperties", "patternProperties"];

/// Let objects that name their properties, and say nothing of others, have no others.
///
/// By JSON Schema's letter such an object may have any. A model that may invent properties does so without end, and
/// that is not meant by a list of an answer's fields; other engines close such objects too. A schema that puts
/// objects together out of several parts is left as it is written, for no part knows the properties of the others.
pub(crate) fn close_objects(schema: &mut Value) {
    if !joins(schema) {
        close(schema);
    }
}

fn joins(schema: &Value) -> bool {
    let map = match schema {
        Value::Array(items) => return items.iter().any(joins),
        Value::Object(map) => map,
        _ => return false,
    };
    let lists = |name: &str| map.get(name).and_then(Value::as_array).map_or(0, Vec::len);
    let parts = usize::from(map.contains_key("properties"))
        + usize::from(map.contains_key("$ref"))
        + usize::from(lists("anyOf") > 0)
        + usize::from(lists("oneOf") > 0)
        + lists("allOf");
    parts > 1 || schemas(map).any(joins)
}

fn close(schema: &mut Value) {
    let map = match schema {
        Value::Array(items) => return items.iter_mut().for_each(close),
        Value::Object(map) => map,
        _ => return,
    };
    for (key, value) in map.iter_mut() {
        match value {
            _ if is_data(key) => {}
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                named.values_mut().for_each(close);
            }
            _ => close(value),
        }
    }
    if names_all(map) {
        map.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
}

/// Whether an object names properties, among them all that it must have, and says nothing of others.
fn names_all(map: &Map<String, Value>) -> bool {
    let Some(Value::Object(properties)) = map.get("properties") else { return false };
    let known = |name: &Value| name.as_str().is_none_or(|name| properties.contains_key(name));
    let required = map.get("required").and_then(Value::as_array);
    let least = map.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    required.is_none_or(|names| names.iter().all(known))
        && least <= properties.len() as u64
        && !SETTLED.iter().any(|name| map.contains_key(*name))
}

/// The values of a schema that are schemas, or hold some.
fn schemas(map: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    map.iter().filter(|(key, _)| !is_data(key)).flat_map(|(key, value)| match value {
        Value::Object(named) if NAMED.contains(&key.as_str()) => named.values().collect(),
        _ => vec![value],
    })
}

/// Whether a keyword's value is no schema, whatever it looks like.
fn is_data(key: &str) -> bool {
    ["const", "enum", "default", "examples"].contains(&key)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::close_objects;

    fn closed(mut schema: Value) -> Value {
        close_objects(&mut schema);
        schema
    }

    #[test]
    fn objects_that_name_their_properties_have_no_others() {
        let person = json!({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]});
        let mut expected = person.clone();
        expected["additionalProperties"] = json!(false);
        assert_eq!(closed(person.clone()), expected);
        let list = json!({"type": "array", "items": {"$ref": "#/$defs/P"}, "$defs": {"P": person}});
        assert_eq!(closed(list)["$defs"]["P"], expected);
        let either = json!({"anyOf": [person, {"type": "null"}], "default": person});
        assert_eq!(
            closed(either),
            json!({"anyOf": [expected, {"type": "null"}], "default": person})
        );
        // A property of that name is no keyword.
        let odd = closed(json!({"properties": {"properties": person, "allOf": {"type": "null"}}}));
        assert_eq!(odd["properties"]["properties"], expected);
        assert_eq!(odd["additionalProperties"], json!(false));
    }

    #[test]
    fn what_says_more_is_left_as_it_is() {
        let object = |more: Value| {
            let mut schema = json!({"type": "object", "properties": {"a": {}}});
            for (key, value) in more.as_object().into_iter().flatten() {
                schema[key] = value.clone();
            }
            schema
        };
        for schema in [
            json!({"type": "object"}),
            json!({"type": "object", "required": ["a"]}),
            object(json!({"additionalProperties": true})),
            object(json!({"additionalProperties": {"type": "string"}})),
            object(json!({"patternProperties": {"^x": {}}})),
            object(json!({"required": ["a", "b"]})),
            object(json!({"minProperties": 2})),
            object(json!({"anyOf": [{"required": ["b"]}]})),
            object(json!({"$ref": "#/$defs/more", "$defs": {"more": object(json!({}))}})),
            json!({"allOf": [object(json!({})), object(json!({}))]}),
            json!({"const": object(json!({}))}),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }
}
