//! Which tokens may come next when an answer has to follow a grammar.
//!
//! A [`Vocabulary`] compiles JSON schemas, regular expressions, lists of choices and context-free grammars for the
//! tokens of one model. A [`Matcher`] follows one answer: it writes the tokens that keep the text a prefix of some
//! accepted text as a mask, bit `t % 32` of word `t / 32` for token `t`, and is advanced by the token that was drawn.
//! [`Constraints`] holds the matchers of all requests that run, together with their lists of allowed tokens and bad
//! words.
//!
//! Tokens are bytes here, requests are numbers; neither scheduling nor sampling is known. Whatever a specification
//! says, compiling it and each mask end in bounded time: with a grammar or an [`Error`] that says what is wrong.
#![forbid(unsafe_code)]

mod cache;
mod closed;
mod constraints;
mod error;
mod gbnf;
mod lark;
mod lookahead;
mod matcher;
mod numbers;
mod schema;
mod source;
mod tokens;
mod vocabulary;

pub use constraints::{BadWords, Constraints, Rules};
pub use error::Error;
pub use gbnf::gbnf_to_lark;
pub use matcher::{Grammar, Matcher};
pub use source::Kind;
pub use vocabulary::Vocabulary;
