//! GBNF, the notation of llama.cpp's grammars.

use crate::error::Error;

/// True of a grammar in GBNF: it has rules written with `::=`.
pub(crate) fn is_gbnf(text: &str) -> bool {
    text.contains("::=")
}

/// The same grammar in Lark.
///
/// # Errors
///
/// What is wrong with it, and where.
pub fn gbnf_to_lark(_text: &str) -> Result<String, Error> {
    Err(Error::specification("grammars in GBNF are not supported yet; write it in Lark"))
}
