//! Look-aheads at the start of a regular expression, which the library does not have.
//!
//! `^(?=A)(?!B)C` is the texts of `^C` that also match `^A` and do not match `^B`. The library can intersect regular
//! expressions everywhere, and subtract them in Lark but not in JSON schemas. There a negative look-ahead is turned into
//! a regular expression of the texts that it allows, where it has one of a few simple forms.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::numbers::NAMED;

/// Any text, line breaks included.
const ANY: &str = "(?s:.*)";

/// A look-ahead at the start.
struct Condition<'a> {
    is_negative: bool,
    body: &'a str,
}

/// The leading look-aheads of an expression, and the rest of it; `None` without any.
fn split(expression: &str) -> Result<Option<(Vec<Condition<'_>>, &str)>, Error> {
    let Some(tokens) = tokens(expression) else { return Ok(None) };
    let mut conditions = Vec::new();
    let mut rest = expression;
    for token in &tokens {
        let is_negative = token.starts_with("(?!");
        if !is_negative && !token.starts_with("(?=") {
            break;
        }
        conditions.push(Condition { is_negative, body: &token[3..token.len() - 1] });
        rest = &rest[token.len()..];
    }
    if conditions.is_empty() {
        return Ok(None);
    }
    if tokens.contains(&"|") {
        return Err(Error::specification(format!(
            "the regular expression {expression:?} has a look-ahead that belongs to one alternative of |, which is not \
             supported; put the alternatives into a group: (?:...|...)"
        )));
    }
    Ok(Some((conditions, rest)))
}

/// A Lark grammar of an expression that begins with look-aheads; `None` without any. `literal` writes a Lark literal.
pub(crate) fn to_lark(
    expression: &str,
    literal: impl Fn(&str) -> String,
) -> Result<Option<String>, Error> {
    let anchored = expression.strip_prefix('^').unwrap_or(expression);
    let Some((conditions, rest)) = split(anchored)? else { return Ok(None) };
    let mut terminal = literal(&format!("(?:{rest})"));
    for condition in &conditions {
        let not = if condition.is_negative { "~" } else { "" };
        let _ = write!(terminal, " & {not}{}", literal(&whole_texts(condition.body)));
    }
    Ok(Some(format!("start: TEXT\nTEXT: {terminal}")))
}

/// An expression of the whole texts that begin with a match of `body`.
fn whole_texts(body: &str) -> String {
    let tokens = tokens(body).unwrap_or_else(|| vec![body]);
    let branches = tokens.split(|token| *token == "|").map(|branch| {
        let branch = branch.strip_prefix(&["^"]).unwrap_or(branch);
        match branch.strip_suffix(&["$"]) {
            Some(branch) => branch.concat(),
            None => branch.concat() + ANY,
        }
    });
    format!("(?:{})", branches.collect::<Vec<_>>().join("|"))
}

/// Rewrite the look-aheads of every `pattern` in a schema; whether there were any.
pub(crate) fn rewrite_patterns(schema: &mut Value) -> Result<bool, Error> {
    let map = match schema {
        Value::Array(items) => {
            return items.iter_mut().try_fold(false, |any, item| Ok(rewrite_patterns(item)? | any));
        }
        Value::Object(map) => map,
        _ => return Ok(false),
    };
    let mut any = false;
    for (key, value) in map.iter_mut() {
        match value {
            _ if ["const", "enum", "default", "examples"].contains(&key.as_str()) => {}
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                for value in named.values_mut() {
                    any |= rewrite_patterns(value)?;
                }
            }
            _ => any |= rewrite_patterns(value)?,
        }
    }
    Ok(rewrite_pattern(map)? | any)
}

fn rewrite_pattern(map: &mut Map<String, Value>) -> Result<bool, Error> {
    let Some(Value::String(pattern)) = map.get("pattern") else { return Ok(false) };
    let Some(anchored) = pattern.strip_prefix('^') else { return Ok(false) };
    let Some((conditions, rest)) = split(anchored)? else { return Ok(false) };
    let mut parts = Vec::new();
    for condition in &conditions {
        if condition.is_negative {
            let allowed = complements(condition.body).ok_or_else(|| {
                Error::specification(format!(
                    "\"pattern\" has the look-ahead (?!{}), which is not supported; write which texts are allowed \
                     instead. Supported are (?!abc), (?!abc$), (?![a-c]*$), (?![a-c]+$), (?!.*[a-c]) and alternatives \
                     of these",
                    condition.body
                ))
            })?;
            parts.extend(allowed.into_iter().map(|allowed| json!({"pattern": allowed})));
        } else {
            parts.push(json!({"pattern": format!("^(?:{})", condition.body)}));
        }
    }
    let rest = Value::String(format!("^{rest}"));
    if let Value::Array(all) = map.entry("allOf").or_insert_with(|| json!([])) {
        all.extend(parts);
    }
    map.insert("pattern".to_owned(), rest);
    Ok(true)
}

/// Expressions that the texts without a match of `^body` have in common; `None` where the body is not simple.
fn complements(body: &str) -> Option<Vec<String>> {
    let tokens = tokens(body)?;
    tokens.split(|token| *token == "|").map(complement).collect()
}

fn complement(tokens: &[&str]) -> Option<String> {
    let tokens = tokens.strip_prefix(&["^"]).unwrap_or(tokens);
    let (tokens, ends) = match tokens {
        [tokens @ .., "$"] => (tokens, true),
        _ => (tokens, false),
    };
    let another = |character: &str| Some(format!("{ANY}{}{ANY}", negated(character)?));
    let allowed = match (tokens, ends) {
        ([character, "*"], true) => another(character)?,
        ([character, "+"], true) => format!("(?:|{})", another(character)?),
        ([".", "*", character], false) => {
            let others = negated(character)?;
            format!("[^\\n{}*(?:\\n{ANY})?", others.strip_prefix("[^")?)
        }
        ([], false) => return None,
        _ => {
            let mut allowed = ends.then(|| "(?s:.+)".to_owned());
            for character in tokens.iter().rev() {
                let longer = allowed.map_or_else(String::new, |rest| format!("|{character}{rest}"));
                allowed = Some(format!("(?:|{}{ANY}{longer})", negated(character)?));
            }
            allowed?
        }
    };
    Some(format!("^{allowed}$"))
}

/// An expression of every character but those of one that stands for a single character.
fn negated(character: &str) -> Option<String> {
    if let Some(class) = character.strip_prefix("[^") {
        return Some(format!("[{class}"));
    }
    if let Some(class) = character.strip_prefix('[') {
        return Some(format!("[^{class}"));
    }
    let mut letters = character.chars();
    match (letters.next()?, letters.next()) {
        ('.', None) => Some("\\n".to_owned()),
        ('\\', Some(letter @ ('d' | 'w' | 's'))) => {
            Some(format!("\\{}", letter.to_ascii_uppercase()))
        }
        ('\\', Some(letter @ ('D' | 'W' | 'S'))) => {
            Some(format!("\\{}", letter.to_ascii_lowercase()))
        }
        ('\\', Some(letter)) if letter.is_ascii_punctuation() || "tnr".contains(letter) => {
            Some(format!("[^{character}]"))
        }
        (letter, None) if letter.is_ascii_punctuation() => {
            (!"^$*+?{}|()[]\\".contains(letter)).then(|| format!("[^\\{letter}]"))
        }
        (letter, None) => Some(format!("[^{letter}]")),
        _ => None,
    }
}

/// Characters, escapes, classes and groups in order; `None` where an expression is malformed or its classes are nested.
fn tokens(expression: &str) -> Option<Vec<&str>> {
    let mut tokens = Vec::new();
    let mut rest = expression;
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '\\' => 1 + rest[1..].chars().next()?.len_utf8(),
            '[' => class_len(rest)?,
            '(' => group_len(rest)?,
            ')' => return None,
            _ => first.len_utf8(),
        };
        tokens.push(&rest[..len]);
        rest = &rest[len..];
    }
    Some(tokens)
}

fn class_len(text: &str) -> Option<usize> {
    let start = if text.starts_with("[^") { 2 } else { 1 };
    let mut characters = text.char_indices().skip(start);
    let mut is_first = true;
    while let Some((place, character)) = characters.next() {
        match character {
            '\\' => {
                characters.next()?;
            }
            '[' => return None,
            ']' if !is_first => return Some(place + 1),
            _ => {}
        }
        is_first = false;
    }
    None
}

fn group_len(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    let mut place = 0;
    while let Some(character) = text[place..].chars().next() {
        place += match character {
            '\\' => 1 + text[place + 1..].chars().next()?.len_utf8(),
            '[' => class_len(&text[place..])?,
            _ => character.len_utf8(),
        };
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(place);
        }
    }
    None
}
