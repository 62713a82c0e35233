//! Lark grammars: what is checked before they are compiled.

use std::str::Chars;

use serde_json::{Deserializer, Value};

use crate::error::Error;
use crate::numbers::make_exact;
use crate::schema::{MAX_AT_ONCE, check_size};

/// Refuse what would let a text be more than characters, or what no limit of the library's bounds.
pub(crate) fn check_lark(grammar: &str) -> Result<(), Error> {
    let any_bytes = json_after(grammar, "%llguidance")
        .any(|options| options.get("allow_invalid_utf8").is_some());
    if any_bytes || grammar.contains("allow_invalid_utf8") {
        return Err(Error::specification(
            "the grammar uses allow_invalid_utf8, which is not supported: answers are text",
        ));
    }
    for mut schema in json_after(grammar, "%json") {
        check_size(&schema)?;
        let written = schema.clone();
        make_exact(&mut schema)?;
        if schema != written {
            return Err(Error::specification(
                "the grammar has a JSON schema with a bound that is not exact as a 64-bit floating point number",
            ));
        }
    }
    let code = without_literals(grammar);
    if code.contains("::") {
        // The ways to go on are as many as values of a parameter, up to 2^64, and are listed before any limit is met.
        return Err(Error::specification(
            "the grammar has rules with parameters (::), which are not supported",
        ));
    }
    let conjunctions = code.matches('&').count();
    if conjunctions > MAX_AT_ONCE {
        return Err(Error::specification(format!(
            "the grammar has {conjunctions} of the operator &; the limit is {MAX_AT_ONCE}"
        )));
    }
    Ok(())
}

/// The JSON values that follow a mark. What is no JSON is refused later.
fn json_after(grammar: &str, mark: &'static str) -> impl Iterator<Item = Value> {
    grammar.match_indices(mark).filter_map(|(place, _)| {
        let rest = &grammar[place + mark.len()..];
        Deserializer::from_str(rest).into_iter::<Value>().next()?.ok()
    })
}

/// A grammar with a blank in place of each literal, regular expression, special token and comment, as the library reads
/// them: a regular expression may go on over lines.
fn without_literals(grammar: &str) -> String {
    let mut code = String::with_capacity(grammar.len());
    let mut rest = grammar.chars();
    while let Some(character) = rest.next() {
        match character {
            '#' => skip_line(&mut rest),
            '/' if rest.as_str().starts_with('/') => skip_line(&mut rest),
            '"' | '/' => {
                while let Some(inner) = rest.next() {
                    if inner == '\\' {
                        rest.next();
                    } else if inner == character {
                        break;
                    }
                }
            }
            '<' => {
                let name = |inner: char| !matches!(inner, '<' | '>') && !inner.is_whitespace();
                while rest.clone().next().is_some_and(name) {
                    rest.next();
                }
            }
            _ => {
                code.push(character);
                continue;
            }
        }
        code.push(' ');
    }
    code
}

fn skip_line(rest: &mut Chars<'_>) {
    // The line's end is no part of a comment; nothing is lost by skipping it.
    rest.find(|&character| character == '\n');
}
