//! Groups of decode rows that share their first blocks, so that a shared prefix can be read once for all of them.

use crate::block::{BlockId, SequenceId};
use crate::commit::OpenStep;
use crate::core::Core;
use crate::plan::PlanWriter;

/// The groups of the last step, kept while its rows stay the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Groups {
    /// The decode rows that the groups were made for. A sequence that loses its blocks is absent from them before it
    /// is back with others.
    rows: Vec<SequenceId>,
    /// (shared block, row), sorted.
    keys: Vec<(BlockId, usize)>,
    /// (first of `keys`, rows, shared blocks).
    found: Vec<(usize, usize, usize)>,
    stale: bool,
}

impl Groups {
    /// A table changed under rows that stay.
    pub(crate) fn invalidate(&mut self) {
        self.stale = true;
    }
}

impl Core {
    /// Write the groups of the decode rows chosen so far. Rows of one group hold the same physical blocks from the
    /// first on, all of them full and computed.
    pub(crate) fn write_groups(&mut self, writer: &mut PlanWriter<'_>, open: &OpenStep) {
        if self.config.group_min_blocks == 0 {
            return;
        }
        let rows = open.rows.iter().map(|row| row.id);
        if self.groups.stale || !rows.clone().eq(self.groups.rows.iter().copied()) {
            self.groups.rows.clear();
            self.groups.rows.extend(rows);
            self.groups.stale = false;
            self.find_groups();
        }
        for &(start, len, blocks) in &self.groups.found {
            writer.group(self.groups.keys[start..start + len].iter().map(|key| key.1), blocks);
        }
    }

    fn find_groups(&mut self) {
        let min = self.config.group_min_blocks;
        let Groups { rows, keys, found, .. } = &mut self.groups;
        keys.clear();
        found.clear();
        for (row, &id) in rows.iter().enumerate() {
            let sequence = &self.sequences[id];
            // The block being written is no part of it.
            let full = (sequence.computed - 1) / self.config.block_size;
            if full >= min {
                keys.push((sequence.table.blocks()[min - 1], row));
            }
        }
        keys.sort_unstable();
        let mut start = 0;
        while start < keys.len() {
            let len = keys[start..].iter().take_while(|key| key.0 == keys[start].0).count();
            if len > 1 {
                let full = |key: &(BlockId, usize)| {
                    let sequence = &self.sequences[rows[key.1]];
                    &sequence.table.blocks()[..(sequence.computed - 1) / self.config.block_size]
                };
                let members = &keys[start..start + len];
                let first = full(&members[0]);
                let shared = members[1..].iter().fold(first.len(), |shared, key| {
                    let pairs = first[..shared].iter().zip(full(key));
                    pairs.take_while(|(a, b)| a == b).count()
                });
                found.push((start, len, shared));
            }
            start += len;
        }
        found.sort_unstable_by_key(|&(start, ..)| keys[start].1);
    }
}
