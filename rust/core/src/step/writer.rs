//! The writer that fills the plan arrays of one step.

use crate::error::{Error, Result};
use crate::ids::{BlockId, Slot};
use crate::step::layout::{Arrays, Layout, PARAM_LEN};
use crate::step::plan::StepPlan;

/// Fills one arena. The scheduler keeps every array within its capacity; a mistake there panics and writes nothing past
/// an array.
pub(crate) struct PlanWriter<'a> {
    arrays: Arrays<'a>,
    plan: StepPlan,
}

impl<'a> PlanWriter<'a> {
    pub(crate) fn new(
        layout: &Layout,
        arena: &'a mut [i32],
        step: u64,
        index: usize,
    ) -> Result<Self> {
        if arena.len() < layout.arena_len() {
            return Err(Error::ShortBuffer {
                name: "arena",
                len: arena.len(),
                needed: layout.arena_len(),
            });
        }
        let arrays = Arrays::split(layout, arena);
        arrays.query_start[0] = 0;
        arrays.group_starts[0] = 0;
        Ok(Self { arrays, plan: StepPlan { step, arena: index, ..StepPlan::default() } })
    }

    /// Write the counts; the plan is complete.
    pub(crate) fn finish(self) -> StepPlan {
        self.arrays.counts.copy_from_slice(&self.plan.counts());
        self.plan
    }

    /// The plan so far.
    pub(crate) fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// All rows so far are decode rows.
    pub(crate) fn end_decode_rows(&mut self) {
        self.plan.num_decode_rows = self.plan.num_rows;
    }

    /// Begin a row; its tokens follow.
    pub(crate) fn row(
        &mut self,
        slot: Slot,
        seq_len: usize,
        num_tokens: usize,
        num_sampled: usize,
    ) {
        let (plan, arrays) = (&mut self.plan, &mut self.arrays);
        let row = plan.num_rows;
        arrays.rows[row] = slot.0 as i32;
        arrays.seq_lens[row] = seq_len as i32;
        arrays.num_sampled[row] = num_sampled as i32;
        arrays.query_start[row + 1] = (plan.num_tokens + num_tokens) as i32;
        plan.num_rows += 1;
        plan.max_seq_len = plan.max_seq_len.max(seq_len);
        plan.max_query_len = plan.max_query_len.max(num_tokens);
    }

    /// Add a token and its place in the first cache group.
    pub(crate) fn token(&mut self, token: i32, position: usize, cache_slot: usize) {
        let (arrays, at) = (&mut self.arrays, self.plan.num_tokens);
        arrays.token_ids[at] = token;
        arrays.positions[at] = position as i32;
        arrays.slot_mapping[at] = cache_slot as i32;
        self.plan.num_tokens += 1;
    }

    /// The place in another cache group of token `at`.
    pub(crate) fn group_slot(&mut self, group: usize, at: usize, cache_slot: usize) {
        let max_tokens = self.arrays.token_ids.len();
        self.arrays.slot_mapping[group * max_tokens + at] = cache_slot as i32;
    }

    /// Draw a sample for `slot` from the last token written; its place among the logits.
    pub(crate) fn logit(&mut self, slot: Slot) -> usize {
        let (arrays, at) = (&mut self.arrays, self.plan.num_logits);
        arrays.logits_rows[at] = self.plan.num_tokens as i32 - 1;
        arrays.logits_slots[at] = slot.0 as i32;
        self.plan.num_logits += 1;
        at
    }

    /// Add values to a sample's logits of single tokens, each named once.
    pub(crate) fn bias(&mut self, logit: usize, biases: &[(u32, f32)]) {
        for &(token, value) in biases {
            let at = self.plan.num_biases;
            self.arrays.bias_logits[at] = logit as i32;
            self.arrays.bias_tokens[at] = token as i32;
            self.arrays.bias_values[at] = value.to_bits() as i32;
            self.plan.num_biases += 1;
        }
    }

    /// Constrain a sample to a set of tokens, which the caller knows.
    pub(crate) fn mask(&mut self, logit: usize) {
        self.arrays.mask_logits[self.plan.num_masks] = logit as i32;
        self.plan.num_masks += 1;
    }

    pub(crate) fn params(&mut self, slot: Slot, values: [i32; PARAM_LEN]) {
        let (arrays, at) = (&mut self.arrays, self.plan.num_param_updates);
        arrays.param_slots[at] = slot.0 as i32;
        arrays.param_values[at * PARAM_LEN..(at + 1) * PARAM_LEN].copy_from_slice(&values);
        self.plan.num_param_updates += 1;
    }

    pub(crate) fn copy(&mut self, source: BlockId, destination: BlockId) {
        let (arrays, at) = (&mut self.arrays, self.plan.num_block_copies);
        arrays.copy_sources[at] = source.0 as i32;
        arrays.copy_destinations[at] = destination.0 as i32;
        self.plan.num_block_copies += 1;
    }

    pub(crate) fn is_copy_source(&self, block: BlockId) -> bool {
        let copies = self.plan.num_block_copies;
        self.arrays.copy_sources[..copies].contains(&(block.0 as i32))
    }

    /// Update entries of a block table from `start` on; `row` is group * `max_num_seqs` + slot.
    pub(crate) fn table(&mut self, row: usize, start: usize, blocks: &[BlockId]) {
        for (i, block) in blocks.iter().enumerate() {
            let (arrays, at) = (&mut self.arrays, self.plan.num_table_updates);
            arrays.table_slots[at] = row as i32;
            arrays.table_indices[at] = (start + i) as i32;
            arrays.table_blocks[at] = block.0 as i32;
            self.plan.num_table_updates += 1;
        }
    }

    /// Add a group of rows that share their first blocks.
    pub(crate) fn group(&mut self, rows: impl Iterator<Item = usize>, blocks: usize) {
        let (arrays, group) = (&mut self.arrays, self.plan.num_groups);
        let mut end = arrays.group_starts[group] as usize;
        for row in rows {
            arrays.group_rows[end] = row as i32;
            end += 1;
        }
        arrays.group_starts[group + 1] = end as i32;
        arrays.group_blocks[group] = blocks as i32;
        self.plan.num_groups += 1;
    }

    pub(crate) fn tables_left(&self) -> usize {
        self.arrays.table_slots.len() - self.plan.num_table_updates
    }

    pub(crate) fn biases_left(&self) -> usize {
        self.arrays.bias_logits.len() - self.plan.num_biases
    }
}
