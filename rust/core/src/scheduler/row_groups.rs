//! Groups of decode rows that share their first blocks, so that a shared prefix can be read once for all of them.

use crate::ids::{BlockId, SequenceId};
use crate::kv_cache::cache_groups::CacheGroups;
use crate::scheduler::sequence::Sequences;
use crate::step::open_step::OpenStep;
use crate::step::writer::PlanWriter;

/// The groups of the last step, kept while its rows stay the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowGroups {
    /// The decode rows that the groups were made for. A preempted sequence is absent for a step before it is back with
    /// other blocks.
    rows: Vec<SequenceId>,
    /// (shared block, row), sorted.
    keys: Vec<(BlockId, usize)>,
    /// (first of `keys`, rows, shared blocks).
    found: Vec<(usize, usize, usize)>,
    stale: bool,
}

impl RowGroups {
    /// A table changed under rows that stay.
    pub(crate) fn invalidate(&mut self) {
        self.stale = true;
    }

    /// Write the groups of the decode rows chosen so far that share `min_blocks` blocks at least; 0 for none. Rows of one group hold the same first blocks, all of them full
    /// and computed, in the tables of full attention; tables of sliding windows may differ.
    pub(crate) fn write(
        &mut self,
        min_blocks: usize,
        block_size: usize,
        groups: &CacheGroups,
        sequences: &Sequences,
        writer: &mut PlanWriter<'_>,
        open: &OpenStep,
    ) {
        // A sliding window alone has no first blocks for rows to share.
        let anchor = groups.anchor();
        if min_blocks == 0 || groups.is_sliding(anchor) {
            return;
        }
        let rows = open.rows.iter().map(|row| row.id);
        if self.stale || !rows.clone().eq(self.rows.iter().copied()) {
            self.rows.clear();
            self.rows.extend(rows);
            self.stale = false;
            self.find(min_blocks, block_size, anchor, sequences);
        }
        for &(start, len, blocks) in &self.found {
            writer.group(self.keys[start..start + len].iter().map(|key| key.1), blocks);
        }
    }

    fn find(&mut self, min_blocks: usize, block_size: usize, anchor: usize, sequences: &Sequences) {
        let Self { rows, keys, found, .. } = self;
        keys.clear();
        found.clear();
        for (row, &id) in rows.iter().enumerate() {
            let sequence = &sequences[id];
            // The block that the row writes is not shared.
            let full = (sequence.computed - 1) / block_size;
            if full >= min_blocks {
                keys.push((sequence.tables.group(anchor).blocks()[min_blocks - 1], row));
            }
        }
        keys.sort_unstable();
        let mut start = 0;
        while start < keys.len() {
            let len = keys[start..].iter().take_while(|key| key.0 == keys[start].0).count();
            if len > 1 {
                let full = |key: &(BlockId, usize)| {
                    let sequence = &sequences[rows[key.1]];
                    &sequence.tables.group(anchor).blocks()[..(sequence.computed - 1) / block_size]
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
