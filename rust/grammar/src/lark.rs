//! Lark grammars: what is checked before they are compiled.

use crate::error::Error;

/// Refuse what would let a text be more than characters.
pub(crate) fn check_lark(grammar: &str) -> Result<(), Error> {
    if grammar.contains("allow_invalid_utf8") {
        return Err(Error::specification(
            "the grammar uses allow_invalid_utf8, which is not supported: answers are text",
        ));
    }
    Ok(())
}
