//! Look-aheads at the start of a regular expression mean what they mean to Python's `re`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::unreadable_literal, reason = "sets of texts, a bit a text")]

mod support;

use octavo_grammar::{Kind, Vocabulary};
use serde_json::json;
use support::{accepts, vocabulary};

/// Expressions, and which texts of up to three of these letters `re.search` finds them in: bit i for the i-th text, the
/// shorter first.
const LETTERS: [char; 4] = ['-', '.', '1', 'a'];
const EXPRESSIONS: [(&str, u128); 19] = [
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", 0xc8008000c800c888),
    (r"^(?!a)[\s\S]*$", 0x1fffffffffffe1ffef),
    (r"^(?!1a)[-.1a]*$", 0x1fffe1fffffffffffeffff),
    (r"^(?!1a$)[-.1a]*$", 0x1ffffffffffffffffeffff),
    (r"^(?!$)[-.1a]*$", 0x1ffffffffffffffffffffe),
    (r"^(?!.*a)[-.1a]{1,3}$", 0xeee0eee0eee0eeee),
    (r"^(?!.*[-.])[-.1a]+$", 0x1980198000000000198018),
    (r"^(?![a1]+$)[-.1a]*$", 0x67fe67fffffffffe67fe7),
    (r"^(?!-|\.|1-)[-.1a]*$", 0x1ffffffe000000001fc019),
    (r"^(?=.*1)(?=.*a).{2,}$", 0x9e89f1109000900090000),
    (r"^(?=.*1)(?!a)[1a]*$", 0x198000000000018008),
    (r"^(?!\d)(?=..)[-.1a]*$", 0x1fffe0001ffffffffe1fe0),
    (r"^(?!^\D*$)[-.1a]*$", 0x9e89fffe9e889e889e888),
    (r"^(?=1|a$)[1a]*$", 0x198000000000018018),
    (r"^(?![^1])[-.1a]*$", 0x1fffe000000001e009),
    (r"^(?!\.)(?!.*a).*$", 0xeee00000eee0e0eb),
    (r"^(?!..-).*$", 0x1ddddddddddddddddfffff),
    (r"^(?=(?:1|a)-)(?:1|a|-)*$", 0x1a001a0000000022000),
    (r"^(?![.])-?[1a]", 0x1fffffffe0001fe01fe198),
];

fn texts() -> Vec<String> {
    let mut texts = vec![String::new()];
    let mut first = 0;
    for _ in 0..3 {
        let end = texts.len();
        for place in first..end {
            for letter in LETTERS {
                texts.push(format!("{}{letter}", texts[place]));
            }
        }
        first = end;
    }
    texts
}

fn check(
    vocabulary: &Vocabulary,
    kind: Kind,
    spec: &str,
    written: impl Fn(&str) -> String,
    right: u128,
) {
    for (place, text) in texts().iter().enumerate() {
        let expected = right >> place & 1 == 1;
        assert_eq!(accepts(vocabulary, kind, spec, &written(text)), expected, "{spec} {text:?}");
    }
}

#[test]
fn patterns_of_a_schema_agree_with_python() {
    let vocabulary = vocabulary();
    for (expression, right) in EXPRESSIONS {
        let spec = json!({"type": "string", "pattern": expression}).to_string();
        check(&vocabulary, Kind::Json, &spec, |text| format!("\"{text}\""), right);
    }
}

#[test]
fn regular_expressions_agree_with_python() {
    let vocabulary = vocabulary();
    for (expression, right) in
        EXPRESSIONS.iter().filter(|(expression, _)| expression.ends_with('$'))
    {
        let expression = expression.strip_suffix('$').unwrap();
        check(&vocabulary, Kind::Regex, expression, str::to_owned, *right);
    }
}

/// Pydantic writes this for a `Decimal`.
#[test]
fn a_decimal_in_an_object_is_followed() {
    let vocabulary = vocabulary();
    let decimal = json!({"anyOf": [
        {"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    ]});
    let spec = json!({"type": "object", "properties": {"price": decimal}, "required": ["price"]});
    let yes = |text: &str| accepts(&vocabulary, Kind::Json, &spec.to_string(), text);
    for price in ["1.5", "\"-1.50\"", "\"+.5\"", "\"7\""] {
        assert!(yes(&format!("{{\"price\": {price}}}")), "{price}");
    }
    for price in ["\"\"", "\"-\"", "\".\"", "\"1.2.3\"", "\"a\""] {
        assert!(!yes(&format!("{{\"price\": {price}}}")), "{price}");
    }
    assert!(!yes("{\"price\": 1, \"other\": 2}"));
}

#[test]
fn what_is_not_supported_is_named() {
    let vocabulary = vocabulary();
    let refusal = |kind, spec: &str| vocabulary.compile(kind, spec).err().unwrap().to_string();
    for (pattern, message) in [
        (r"^(?!(?:ab)+)[ab]*$", "(?!(?:ab)+)"),
        (r"^(?!a*b)[ab]*$", "(?!a*b)"),
        (r"^(?!a)b|c", "alternative of |"),
        (r"a(?!b)c", "look-ahead is supported only at the start"),
        (r"^(?<!a)b", "look-behind is not"),
    ] {
        let spec = json!({"type": "array", "items": {"pattern": pattern}}).to_string();
        let error = refusal(Kind::Json, &spec);
        assert!(error.contains(message), "{pattern}: {error}");
    }
    assert!(refusal(Kind::Regex, "a(?=b)b").contains("only at the start"));
    assert!(refusal(Kind::Regex, "(?!a)b|c").contains("alternative of |"));
}
