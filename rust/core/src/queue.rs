//! Who waits: the queue in order of admission, and those deferred until another sequence has computed their prefix.

use std::collections::BTreeMap;

use hashbrown::HashTable;

use crate::block::SequenceId;

/// A place in the queue; smaller is sooner.
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
    /// The order among running sequences, where a preemption does not count.
    pub(crate) fn running(self) -> (i64, u64, u32) {
        (self.key, self.arrival, self.sample_index)
    }
}

/// Waiting and deferred sequences. No operation looks at more than it returns.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    waiting: BTreeMap<QueueKey, SequenceId>,
    /// By what is awaited: the computing sequence, how many of its blocks, then the order of admission.
    deferred: BTreeMap<(SequenceId, usize, QueueKey), SequenceId>,
}

impl Queue {
    pub(crate) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn num_deferred(&self) -> usize {
        self.deferred.len()
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

/// Which running sequence will index which node next: by the hash of (parent node, tokens).
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlightPrefixes {
    table: HashTable<(u64, SequenceId)>,
}

impl InFlightPrefixes {
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Add a promise, unless another sequence made it already.
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

    /// The sequence that promised the node; `same` compares parent and tokens.
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
