//! The grammars that were used last.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::matcher::Grammar;
use crate::source::Kind;

/// Grammars kept.
const MAX_ENTRIES: usize = 64;
/// Bytes of their specifications, of which a compiled grammar's size is a multiple.
const MAX_BYTES: usize = 1 << 20;

/// Least recently used grammars are dropped first.
#[derive(Default)]
pub(crate) struct Cache {
    /// The one used last comes first.
    entries: VecDeque<(Kind, Box<str>, Arc<Grammar>)>,
    bytes: usize,
}

impl Cache {
    pub(crate) fn get(&mut self, kind: Kind, spec: &str) -> Option<Arc<Grammar>> {
        let place = self.entries.iter().position(|(k, text, _)| *k == kind && **text == *spec)?;
        let entry = self.entries.remove(place)?;
        let grammar = entry.2.clone();
        self.entries.push_front(entry);
        Some(grammar)
    }

    pub(crate) fn insert(&mut self, kind: Kind, spec: &str, grammar: Arc<Grammar>) {
        if spec.len() > MAX_BYTES || self.get(kind, spec).is_some() {
            return;
        }
        self.bytes += spec.len();
        self.entries.push_front((kind, spec.into(), grammar));
        while self.entries.len() > MAX_ENTRIES || self.bytes > MAX_BYTES {
            let Some((_, text, _)) = self.entries.pop_back() else { break };
            self.bytes -= text.len();
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}
