//! Stop texts, sought in text that arrives in pieces, each byte looked at once.

use std::sync::Arc;

/// A match: where it ends in the piece just taken, its length in bytes, and which stop text it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Match {
    pub(super) end: usize,
    pub(super) len: usize,
    pub(super) index: u32,
}

/// A Knuth-Morris-Pratt matcher for each stop text.
#[derive(Clone, Debug)]
pub(super) struct StopTexts {
    patterns: Arc<[Pattern]>,
    /// For each pattern: the length of its longest proper prefix that the text so far ends with.
    matched: Vec<usize>,
}

#[derive(Debug)]
struct Pattern {
    text: Vec<u8>,
    /// `borders[n]`: the longest proper prefix of the first `n` bytes that is also their end.
    borders: Vec<usize>,
    index: u32,
}

impl Pattern {
    fn new(text: &[u8], index: u32) -> Self {
        let text = String::from_utf8_lossy(text).into_owned().into_bytes();
        let mut pattern = Self { borders: vec![0; text.len() + 1], text, index };
        for end in 1..pattern.text.len() {
            pattern.borders[end + 1] = pattern.step(pattern.borders[end], pattern.text[end]);
        }
        pattern
    }

    /// The matched length after one more byte.
    fn step(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && self.text[matched] != byte {
            matched = self.borders[matched];
        }
        matched + usize::from(self.text[matched] == byte)
    }
}

impl StopTexts {
    pub(super) fn new(stops: Vec<Vec<u8>>) -> Self {
        let patterns: Arc<[Pattern]> = (0..)
            .zip(stops)
            .filter(|(_, stop)| !stop.is_empty())
            .map(|(i, stop)| Pattern::new(&stop, i))
            .collect();
        Self { matched: vec![0; patterns.len()], patterns }
    }

    /// True when nothing can match.
    pub(super) fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Take more text, up to the first match if `check`; without it matches are passed over.
    pub(super) fn advance(&mut self, text: &[u8], check: bool) -> Option<Match> {
        for (at, &byte) in text.iter().enumerate() {
            let mut found: Option<Match> = None;
            for (pattern, matched) in self.patterns.iter().zip(&mut self.matched) {
                *matched = pattern.step(*matched, byte);
                let len = pattern.text.len();
                if *matched == len {
                    *matched = pattern.borders[len];
                    if check && found.is_none_or(|found| found.len < len) {
                        found = Some(Match { end: at + 1, len, index: pattern.index });
                    }
                }
            }
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// The length of the longest end of the text so far that is a proper prefix of a stop text.
    pub(super) fn pending(&self) -> usize {
        self.matched.iter().copied().max().unwrap_or(0)
    }
}
