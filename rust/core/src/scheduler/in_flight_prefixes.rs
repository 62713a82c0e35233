//! Prefixes that running prompts are computing, so that equal prompts wait for them.

use hashbrown::HashTable;

use crate::ids::SequenceId;

/// The next prefix node of each running prompt, by the hash of (parent node, tokens).
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlightPrefixes {
    table: HashTable<(u64, SequenceId)>,
}

impl InFlightPrefixes {
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Add a sequence's next node, unless another sequence computes it already.
    pub(crate) fn insert(
        &mut self,
        hash: u64,
        id: SequenceId,
        mut same: impl FnMut(SequenceId) -> bool,
    ) -> bool {
        if self.find(hash, &mut same).is_some() {
            return false;
        }
        self.table.insert_unique(hash, (hash, id), |entry| entry.0);
        true
    }

    /// The sequence that computes the node; `same` compares parent and tokens.
    pub(crate) fn find(
        &self,
        hash: u64,
        mut same: impl FnMut(SequenceId) -> bool,
    ) -> Option<SequenceId> {
        self.table.find(hash, |entry| entry.0 == hash && same(entry.1)).map(|entry| entry.1)
    }

    pub(crate) fn remove(&mut self, hash: u64, id: SequenceId) {
        if let Ok(entry) = self.table.find_entry(hash, |entry| entry.1 == id) {
            entry.remove();
        }
    }
}
