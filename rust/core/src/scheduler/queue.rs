//! Who waits: the queue in order of admission, and those deferred until another sequence has computed their prefix.

use std::collections::BTreeMap;

use crate::ids::SequenceId;

/// A sequence's place in the queue; smaller is sooner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    /// The policy's key: 0 under `fcfs`; arrival shifted by priority otherwise.
    pub(crate) key: i64,
    /// Preempted sequences come first among equal keys.
    pub(crate) not_preempted: bool,
    /// Order of submission.
    pub(crate) arrival: u64,
    pub(crate) sample_index: u32,
}

impl QueueKey {
    /// The order among running sequences, which ignores earlier preemptions.
    pub(crate) fn running(self) -> (i64, u64, u32) {
        (self.key, self.arrival, self.sample_index)
    }
}

/// Waiting and deferred sequences. Every operation takes logarithmic time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    waiting: BTreeMap<QueueKey, SequenceId>,
    /// By the sequence that computes the prefix, how many of its blocks must be there, and the place in the queue.
    deferred: BTreeMap<(SequenceId, usize, QueueKey), SequenceId>,
}

impl Queue {
    pub(crate) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn num_deferred(&self) -> usize {
        self.deferred.len()
    }

    /// The first waiting sequence after a place, or of all.
    pub(crate) fn next(&self, after: Option<QueueKey>) -> Option<SequenceId> {
        match after {
            None => self.first(),
            Some(key) => {
                let range = (std::ops::Bound::Excluded(key), std::ops::Bound::Unbounded);
                self.waiting.range(range).next().map(|(_, &id)| id)
            }
        }
    }

    pub(crate) fn first(&self) -> Option<SequenceId> {
        self.waiting.first_key_value().map(|(_, &id)| id)
    }

    pub(crate) fn push(&mut self, key: QueueKey, id: SequenceId) {
        self.waiting.insert(key, id);
    }

    pub(crate) fn remove(&mut self, key: QueueKey) {
        self.waiting.remove(&key);
    }

    /// Move a waiting sequence aside until `awaited` has indexed `blocks` blocks.
    pub(crate) fn defer(&mut self, key: QueueKey, awaited: SequenceId, blocks: usize) {
        if let Some(id) = self.waiting.remove(&key) {
            self.deferred.insert((awaited, blocks, key), id);
        }
    }

    pub(crate) fn remove_deferred(&mut self, key: QueueKey, awaited: SequenceId, blocks: usize) {
        self.deferred.remove(&(awaited, blocks, key));
    }

    /// Put the next sequence that awaits `blocks` or fewer blocks of `awaited` back in the queue.
    pub(crate) fn wake(&mut self, awaited: SequenceId, blocks: usize) -> Option<SequenceId> {
        let from = (awaited, 0, QueueKey { key: i64::MIN, ..QueueKey::default() });
        let (&entry, &id) = self.deferred.range(from..).next()?;
        if entry.0 != awaited || entry.1 > blocks {
            return None;
        }
        self.deferred.remove(&entry);
        self.waiting.insert(entry.2, id);
        Some(id)
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = (QueueKey, SequenceId)> + '_ {
        self.waiting.iter().map(|(&key, &id)| (key, id))
    }

    pub(crate) fn deferred(&self) -> impl Iterator<Item = (SequenceId, usize, SequenceId)> + '_ {
        self.deferred.iter().map(|(&(awaited, blocks, _), &id)| (awaited, blocks, id))
    }
}
