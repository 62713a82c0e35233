//! Lark grammars: what is checked before they are compiled.

use serde_json::{Deserializer, Value};

use crate::error::Error;
use crate::schema::{MAX_AT_ONCE, check_size};

/// Refuse what would let a text be more than characters, or what no limit of the library's bounds.
pub(crate) fn check_lark(grammar: &str) -> Result<(), Error> {
    if grammar.contains("allow_invalid_utf8") {
        return Err(Error::specification(
            "the grammar uses allow_invalid_utf8, which is not supported: answers are text",
        ));
    }
    for (place, mark) in grammar.match_indices("%json") {
        let rest = &grammar[place + mark.len()..];
        // What is no JSON is no schema, or is refused later.
        if let Some(Ok(schema)) = Deserializer::from_str(rest).into_iter::<Value>().next() {
            check_size(&schema)?;
        }
    }
    let conjunctions = conjunctions(grammar);
    if conjunctions > MAX_AT_ONCE {
        return Err(Error::specification(format!(
            "the grammar has {conjunctions} of the operator &; {MAX_AT_ONCE} are the most"
        )));
    }
    Ok(())
}

/// How often `&` stands outside of literals, regular expressions and comments.
fn conjunctions(grammar: &str) -> usize {
    let mut count = 0;
    for line in grammar.lines() {
        let mut rest = line.chars();
        while let Some(character) = rest.next() {
            match character {
                '&' => count += 1,
                '#' => break,
                '/' if rest.as_str().starts_with('/') => break,
                '"' | '/' => {
                    while let Some(inner) = rest.next() {
                        if inner == '\\' {
                            rest.next();
                        } else if inner == character {
                            break;
                        }
                    }
                }
                _ => {}
            }
        }
    }
    count
}
