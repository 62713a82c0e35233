//! How a running prompt announces the prefix that it computes next, and wakes the sequences that wait for it.

use crate::ids::SequenceId;
use crate::scheduler::Scheduler;
use crate::scheduler::sequence::State;

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
