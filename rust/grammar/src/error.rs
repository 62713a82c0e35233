//! What can be wrong with a specification or a vocabulary.

/// Why something was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The specification is malformed, uses what is not supported, or is too large.
    #[error("{0}")]
    Specification(String),
    /// Too much is being compiled; the same may be asked again in a moment.
    #[error("{0}")]
    Busy(String),
    /// No grammar can be followed with these tokens.
    #[error("{0}")]
    Vocabulary(String),
}

impl Error {
    pub(crate) fn specification(message: impl Into<String>) -> Self {
        Self::Specification(message.into())
    }
}

/// Lines of a message, and characters of each.
const MAX_LINES: usize = 12;
const MAX_COLUMNS: usize = 120;

/// The library's message, without what only its own developers can use, and no longer than a user would read.
pub(crate) fn cleaned(message: &str) -> String {
    let message = reworded(message);
    let lines =
        message.lines().take(MAX_LINES).map(|line| match line.char_indices().nth(MAX_COLUMNS) {
            Some((end, _)) => format!("{}...", &line[..end]),
            None => line.to_owned(),
        });
    lines.collect::<Vec<_>>().join("\n")
}

fn reworded(message: &str) -> String {
    let mut text = message;
    for mark in ["<state>", "<grammar>", "<backtrace>", "<non-verbose/>"] {
        text = text.split(mark).next().unwrap_or_default();
    }
    let text = text.trim().replace(" without 'referencing' feature", "");
    if text.contains("missing special token prefix") {
        return "the grammar names a special token, and the model has none".to_owned();
    }
    if let Some((_, wrong)) = text.split_once("regex parse error:")
        && let Some((place, reason)) = wrong.split_once("error: ")
    {
        // What follows is the library's own grammar around the expression.
        let reason = reason.lines().next().unwrap_or_default();
        let place = place.trim_end().trim_start_matches('\n');
        if reason.contains("including look-ahead") {
            return format!(
                "the regular expression is not valid: look-ahead is supported only at the start, look-behind is not\n\
                 {place}\nwrite which texts are allowed instead"
            );
        }
        return format!("the regular expression is not valid: {reason}\n{place}");
    }
    if let Some(panic) = text.strip_prefix("panic: ") {
        return format!("the grammar library cannot handle it ({})", panic.trim());
    }
    if let Some(keys) = text.strip_prefix("Unimplemented keys: ") {
        let keys = keys.trim_matches(['[', ']']);
        return format!("the JSON schema uses {keys}, which is not supported");
    }
    if let Some(format) = text.strip_prefix("Unknown format: ") {
        return format!("the JSON schema uses \"format\" with {format:?}, which is not supported");
    }
    if text.starts_with("oneOf constraints are not supported") {
        return "the JSON schema uses \"oneOf\" with alternatives that may overlap, which is not supported; use \
                \"anyOf\", or give each alternative a property with a different \"const\""
            .to_owned();
    }
    text
}
