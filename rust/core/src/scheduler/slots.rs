//! Dense slots of the device's per-sequence state.

use crate::ids::{SequenceId, Slot};

/// The sequence in each slot. A sequence keeps its slot while it runs.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    holders: Vec<Option<SequenceId>>,
    free: Vec<Slot>,
}

impl Slots {
    pub(crate) fn new(count: usize) -> Self {
        Self { holders: vec![None; count], free: (0..count as u32).rev().map(Slot).collect() }
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Take a free slot; no sequence is in it yet.
    pub(crate) fn take(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    pub(crate) fn assign(&mut self, slot: Slot, sequence: SequenceId) {
        self.holders[slot.index()] = Some(sequence);
    }

    pub(crate) fn release(&mut self, slot: Slot) {
        self.holders[slot.index()] = None;
        self.free.push(slot);
    }

    pub(crate) fn holder(&self, slot: Slot) -> Option<SequenceId> {
        self.holders.get(slot.index()).copied().flatten()
    }

    pub(crate) fn holders(&self) -> impl Iterator<Item = (Slot, SequenceId)> + '_ {
        (0..).map(Slot).zip(&self.holders).filter_map(|(slot, holder)| holder.map(|id| (slot, id)))
    }
}
