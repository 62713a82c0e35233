//! Nonsense is compiled or refused in words: nothing panics.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use octavo_grammar::{Kind, Vocabulary};
use proptest::prelude::*;
use support::vocabulary;

/// Pieces of all notations, of which nonsense is made.
const PIECES: [&str; 48] = [
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "\"",
    "\\",
    "/",
    "|",
    "*",
    "+",
    "?",
    ":",
    "::=",
    ",",
    "^",
    "$",
    ".",
    "-",
    "~",
    "#",
    "\n",
    " ",
    "a",
    "b",
    "é",
    "0",
    "7",
    "{2,3}",
    "start: ",
    "root ::= ",
    "rule",
    "TERM",
    "%json",
    "%ignore /x/\n",
    "%llguidance {",
    "<[3]>",
    "<|end|>",
    "\"type\":",
    "\"object\"",
    "\"$ref\":\"#\"",
    "\"enum\":[",
    "\"anyOf\":[",
    "\"pattern\":\"",
    "null",
    "\\x41",
    "[a-z]",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn nonsense_is_compiled_or_refused_in_words(
        pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..24),
        kind in prop::sample::select(vec![Kind::Json, Kind::Regex, Kind::Choice, Kind::Grammar]),
        begin in prop::sample::select(vec!["", "start: ", "root ::= ", "{\"type\":", "{\"anyOf\":[{"]),
    ) {
        thread_local!(static VOCABULARY: Vocabulary = vocabulary());
        let spec = format!("{begin}{}", pieces.concat());
        VOCABULARY.with(|vocabulary| match vocabulary.compile(kind, &spec) {
            Ok(grammar) => {
                let mut matcher = grammar.matcher();
                for _ in 0..20 {
                    let mut row = [0; 9];
                    matcher.mask(&mut row).map_err(|message| TestCaseError::fail(format!("{spec}: {message}")))?;
                    let token = (0..257).rev().find(|token| row[*token / 32] >> (token % 32) & 1 == 1);
                    matcher.advance(token.unwrap() as u32).unwrap();
                }
                Ok(())
            }
            Err(error) => {
                let message = error.to_string();
                prop_assert!(!message.is_empty() && !message.contains("report"), "{spec}: {message}");
                prop_assert!(!message.contains("panic") && !message.contains("cannot handle"), "{spec}: {message}");
                Ok(())
            }
        })?;
    }
}
