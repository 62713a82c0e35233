//! A vocabulary of bytes, and a check of whole texts.
#![allow(dead_code, clippy::unwrap_used, reason = "a test fails by panicking")]

use octavo_grammar::{Kind, Vocabulary};

/// Every byte a token, and an end token of id 256.
pub(crate) fn vocabulary() -> Vocabulary {
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    words.push(b"<end>".to_vec());
    Vocabulary::new(words, |id| id == 256, &[256], false).unwrap()
}

/// Whether the whole text, and nothing less, is what the grammar accepts at its end.
pub(crate) fn accepts(vocabulary: &Vocabulary, kind: Kind, spec: &str, text: &str) -> bool {
    let mut matcher = vocabulary.compile(kind, spec).unwrap().matcher();
    let mut row = [0_u32; 9];
    for byte in text.bytes() {
        matcher.mask(&mut row).unwrap();
        if row[byte as usize / 32] >> (byte % 32) & 1 == 0 {
            return false;
        }
        matcher.advance(byte.into()).unwrap();
    }
    matcher.mask(&mut row).unwrap();
    row[8] & 1 == 1
}
