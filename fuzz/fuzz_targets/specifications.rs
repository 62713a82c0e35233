//! Any text as a schema, pattern, list of choices or grammar: masks that can be followed, or an error.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use octavo_grammar::{Kind, Vocabulary};

static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(|| {
    let words = (0..=255).map(|byte| vec![byte]).chain([b"<end>".to_vec()]).collect();
    Vocabulary::new(words, |id| id == 256, &[256], false).expect("good tokens")
});

fuzz_target!(|text: &str| {
    for kind in [Kind::Json, Kind::Regex, Kind::Choice, Kind::Grammar] {
        let Ok(grammar) = VOCABULARY.compile(kind, text) else { continue };
        let mut matcher = grammar.matcher();
        let mut row = [0_u32; 9];
        for step in 0..32 {
            if matcher.mask(&mut row).is_err() {
                break;
            }
            let allowed: Vec<u32> =
                (0..257).filter(|token| row[*token as usize / 32] >> (token % 32) & 1 == 1).collect();
            matcher.advance(allowed[step * 7 % allowed.len()]).expect("it was allowed");
        }
    }
});
