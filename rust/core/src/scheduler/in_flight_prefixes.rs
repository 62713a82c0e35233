//! Prefixes that running prompts are computing, so that equal prompts wait for them.

use hashbrown::HashTable;

use crate::ids::SequenceId;
use crate::scheduler::Scheduler;
use crate::scheduler::sequence::State;

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

impl Scheduler {
    /// Announce the next block that a sequence will index, and wake the sequences that waited for the one before.
    pub(super) fn renew_in_flight_prefix(&mut self, id: SequenceId) {
        let sequence = &self.sequences[id];
        let (indexed, block_size) = (sequence.indexed, self.config.block_size);
        if let Some(hash) = sequence.in_flight_prefix {
            self.in_flight_prefixes.remove(hash, id);
            self.sequences[id].in_flight_prefix = None;
            self.wake(id, indexed);
        }
        let sequence = &self.sequences[id];
        let range = indexed * block_size..(indexed + 1) * block_size;
        if range.end > sequence.prefill_len {
            self.wake(id, usize::MAX);
            return;
        }
        let (node, tokens) = (sequence.node, &sequence.tokens[range]);
        let hash = self.kv.prefix().hash(node, tokens);
        let sequences = &self.sequences;
        let same = |other: SequenceId| sequences[other].next_node(block_size) == (node, tokens);
        if self.in_flight_prefixes.insert(hash, id, same) {
            self.sequences[id].in_flight_prefix = Some(hash);
        } else {
            self.wake(id, usize::MAX);
        }
    }

    pub(super) fn withdraw_in_flight_prefix(&mut self, id: SequenceId) {
        if let Some(hash) = self.sequences[id].in_flight_prefix.take() {
            self.in_flight_prefixes.remove(hash, id);
        }
        self.wake(id, usize::MAX);
    }

    fn wake(&mut self, id: SequenceId, blocks: usize) {
        while let Some(woken) = self.queue.wake(id, blocks) {
            let sequence = &mut self.sequences[woken];
            sequence.state = State::Waiting;
            sequence.awaits = None;
        }
    }
}
