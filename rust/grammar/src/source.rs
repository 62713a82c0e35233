//! From what a user writes to what is compiled.

use std::fmt::Write;

use llguidance::api::TopLevelGrammar;
use llguidance::regex_to_lark;
use serde_json::{Value, json};

use crate::error::Error;
use crate::gbnf::{gbnf_to_lark, is_gbnf};
use crate::lark::check_lark;
use crate::lookahead;
use crate::schema::check_schema;

/// Bytes of a specification.
const MAX_BYTES: usize = 256 << 10;

/// What a specification is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A JSON schema, as text.
    Json,
    /// A regular expression in Rust's syntax, with look-aheads at its start, that the whole text matches; `\d`, `\w` and `\s` stand for ASCII's.
    Regex,
    /// A JSON list of texts, one of which is the answer.
    Choice,
    /// A Lark grammar, or GBNF if it has a rule `root ::=`.
    Grammar,
    /// Any JSON object; the specification is not read.
    JsonObject,
}

impl Kind {
    /// The kind of that name: `json`, `regex`, `choice`, `grammar` or `json_object`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "json" => Self::Json,
            "regex" => Self::Regex,
            "choice" => Self::Choice,
            "grammar" => Self::Grammar,
            "json_object" => Self::JsonObject,
            _ => return None,
        })
    }
}

pub(crate) fn source(kind: Kind, spec: &str) -> Result<TopLevelGrammar, Error> {
    if spec.len() > MAX_BYTES {
        return Err(Error::specification(format!(
            "it has {} bytes; the limit is {MAX_BYTES}",
            spec.len()
        )));
    }
    match kind {
        Kind::Json => {
            let schema = parse(spec, "the JSON schema")?;
            Ok(TopLevelGrammar::from_json_schema(check_schema(schema)?))
        }
        Kind::JsonObject => {
            Ok(TopLevelGrammar::from_json_schema(check_schema(json!({"type": "object"}))?))
        }
        // The library would leave out a last backslash that escapes nothing.
        Kind::Regex if !(spec.len() - spec.trim_end_matches('\\').len()).is_multiple_of(2) => {
            Err(Error::specification(
                "the regular expression ends with a backslash that escapes nothing",
            ))
        }
        Kind::Regex => {
            // Digits, words and blanks are ASCII's: \d does not mean Tamil digits.
            let literal = |expression: &str| format!("/{}/", regex_to_lark(expression, "dws"));
            let lark = match lookahead::to_lark(spec, literal)? {
                Some(lark) => lark,
                None if spec.is_empty() => "start: \"\"".to_owned(),
                None => format!("start: {}", literal(spec)),
            };
            Ok(TopLevelGrammar::from_lark(lark))
        }
        Kind::Choice => choice(spec),
        Kind::Grammar if is_gbnf(spec) => Ok(TopLevelGrammar::from_lark(gbnf_to_lark(spec)?)),
        Kind::Grammar => {
            check_lark(spec)?;
            Ok(TopLevelGrammar::from_lark(spec.to_owned()))
        }
    }
}

fn parse(text: &str, what: &str) -> Result<Value, Error> {
    serde_json::from_str(text)
        .map_err(|error| Error::specification(format!("{what} cannot be read: {error}")))
}

fn choice(spec: &str) -> Result<TopLevelGrammar, Error> {
    let wrong = || Error::specification("choice must be a list of texts with at least one in it");
    let Value::Array(choices) = parse(spec, "the list of choices")? else { return Err(wrong()) };
    if choices.is_empty() {
        return Err(wrong());
    }
    let mut lark = String::new();
    for (index, choice) in choices.iter().enumerate() {
        let Value::String(text) = choice else { return Err(wrong()) };
        let separator = if index == 0 { "start: CHOICE\nCHOICE: " } else { " | " };
        let _ = write!(lark, "{separator}{}", quoted(text));
    }
    Ok(TopLevelGrammar::from_lark(lark))
}

/// A Lark literal of exactly that text.
pub(crate) fn quoted(text: &str) -> String {
    // Lark's literals are JSON's, without a raw DEL.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
