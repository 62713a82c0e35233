//! The step plan: where each array lies in an arena, and the writer that fills one.

use crate::block::{BlockId, Slot};
use crate::config::Config;
use crate::error::{Error, Result};

/// Integers of a slot's sampling parameters.
pub const PARAM_LEN: usize = 16;
/// Arenas in the ring.
pub const NUM_ARENAS: usize = 3;
/// Elements between the starts of arrays: a multiple of it, so that each begins a cache line of a device.
pub const ALIGNMENT: usize = 32;
/// Integers of the first array, which says how much of the others is filled.
pub const NUM_COUNTS: usize = 16;

/// Names of the counts, in their order in the array `counts`; zeros fill the rest.
pub const COUNTS: [&str; 13] = [
    "num_tokens",
    "num_rows",
    "num_decode_rows",
    "num_logits",
    "num_table_updates",
    "num_block_copies",
    "num_param_updates",
    "num_biases",
    "num_groups",
    "max_seq_len",
    "max_query_len",
    "step",
    "num_masks",
];

/// One step: how much of each plan array is filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Number of the step; steps are committed in this order.
    pub step: u64,
    /// The arena that holds the arrays.
    pub arena: usize,
    /// Tokens computed.
    pub num_tokens: usize,
    /// Rows, decode rows first.
    pub num_rows: usize,
    /// Rows of one token that go on with an answer.
    pub num_decode_rows: usize,
    /// Samples drawn.
    pub num_logits: usize,
    /// Entries of the device's block tables that change.
    pub num_table_updates: usize,
    /// Whole blocks copied before anything is written, in any order: none is both source and destination.
    pub num_block_copies: usize,
    /// Slots whose sampling parameters are new.
    pub num_param_updates: usize,
    /// Single logits that something is added to.
    pub num_biases: usize,
    /// Groups of decode rows that share their first blocks.
    pub num_groups: usize,
    /// Tokens in the longest row's cache after the step.
    pub max_seq_len: usize,
    /// Tokens of the longest row.
    pub max_query_len: usize,
    /// Samples that are held to a set of tokens.
    pub num_masks: usize,
}

impl StepPlan {
    /// The array `counts`, as [`COUNTS`] orders it; `step` is the low 31 bits of the step's number.
    #[must_use]
    pub fn counts(&self) -> [i32; NUM_COUNTS] {
        let counts = [
            self.num_tokens,
            self.num_rows,
            self.num_decode_rows,
            self.num_logits,
            self.num_table_updates,
            self.num_block_copies,
            self.num_param_updates,
            self.num_biases,
            self.num_groups,
            self.max_seq_len,
            self.max_query_len,
            (self.step & i32::MAX as u64) as usize,
            self.num_masks,
            0,
            0,
            0,
        ];
        counts.map(|count| count as i32)
    }
}

/// One array's place in an arena, in int32 elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayLayout {
    /// Name of the array.
    pub name: &'static str,
    /// First element.
    pub offset: usize,
    /// Elements.
    pub capacity: usize,
}

macro_rules! arrays {
    ($($name:ident),* $(,)?) => {
        /// The plan arrays of one arena, each a slice of it.
        #[derive(Debug)]
        pub(crate) struct Arrays<'a> { $(pub(crate) $name: &'a mut [i32],)* }

        impl<'a> Arrays<'a> {
            /// Cut an arena, which is at least as long as the layout says.
            fn split(layout: &[ArrayLayout], arena: &'a mut [i32]) -> Self {
                let mut rest = arena;
                let mut sizes = layout.iter();
                $(
                    let size = sizes.next().map_or(0, |array| array.capacity);
                    let (padded, after) = rest.split_at_mut(size.next_multiple_of(ALIGNMENT));
                    let $name = &mut padded[..size];
                    rest = after;
                )*
                let _ = rest;
                Self { $($name,)* }
            }
        }

        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

arrays!(
    counts,
    rows,
    query_start,
    seq_lens,
    num_sampled,
    logits_rows,
    logits_slots,
    param_slots,
    param_values,
    bias_logits,
    bias_tokens,
    bias_values,
    mask_logits,
    copy_sources,
    copy_destinations,
    group_rows,
    group_starts,
    group_blocks,
    table_slots,
    table_indices,
    table_blocks,
    token_ids,
    positions,
    slot_mapping,
);

/// Where each plan array lies in an arena.
#[derive(Clone, Debug)]
pub struct Layout {
    arrays: Vec<ArrayLayout>,
    len: usize,
}

impl Layout {
    /// The layout that fits a configuration.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let (rows, tokens) = (config.max_num_seqs, config.max_num_batched_tokens);
        let (updates, biases) = (config.table_update_capacity(), config.bias_capacity());
        let mut offset = 0;
        let arrays = NAMES
            .iter()
            .map(|&name| {
                let capacity = match name {
                    "counts" => NUM_COUNTS,
                    "query_start" | "group_starts" => rows + 1,
                    "param_values" => rows * PARAM_LEN,
                    "bias_logits" | "bias_tokens" | "bias_values" => biases,
                    "table_slots" | "table_indices" | "table_blocks" => updates,
                    "token_ids" | "positions" | "slot_mapping" => tokens,
                    _ => rows,
                };
                let array = ArrayLayout { name, offset, capacity };
                offset += capacity.next_multiple_of(ALIGNMENT);
                array
            })
            .collect();
        Self { arrays, len: offset }
    }

    /// Every array, in the order of the arena.
    #[must_use]
    pub fn arrays(&self) -> &[ArrayLayout] {
        &self.arrays
    }

    /// Elements of an arena.
    #[must_use]
    pub fn arena_len(&self) -> usize {
        self.len
    }

    /// The named array of a filled arena; empty when there is none of that name.
    #[must_use]
    pub fn slice<'a>(&self, arena: &'a [i32], name: &str) -> &'a [i32] {
        self.arrays
            .iter()
            .find(|array| array.name == name)
            .and_then(|array| arena.get(array.offset..array.offset + array.capacity))
            .unwrap_or_default()
    }
}

/// Fills one arena. Every write is within the capacity that the scheduler keeps to; a mistake there panics instead of
/// writing past an array.
pub(crate) struct PlanWriter<'a> {
    pub(crate) arrays: Arrays<'a>,
    pub(crate) plan: StepPlan,
}

impl<'a> PlanWriter<'a> {
    pub(crate) fn new(
        layout: &Layout,
        arena: &'a mut [i32],
        step: u64,
        index: usize,
    ) -> Result<Self> {
        if arena.len() < layout.len {
            return Err(Error::ShortBuffer { name: "arena", len: arena.len(), needed: layout.len });
        }
        let arrays = Arrays::split(&layout.arrays, arena);
        arrays.query_start[0] = 0;
        arrays.group_starts[0] = 0;
        Ok(Self { arrays, plan: StepPlan { step, arena: index, ..StepPlan::default() } })
    }

    /// Nothing follows: leave the counts in the arena.
    pub(crate) fn finish(self) -> StepPlan {
        self.arrays.counts.copy_from_slice(&self.plan.counts());
        self.plan
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

    pub(crate) fn token(&mut self, token: i32, position: usize, cache_slot: usize) {
        let (arrays, at) = (&mut self.arrays, self.plan.num_tokens);
        arrays.token_ids[at] = token;
        arrays.positions[at] = position as i32;
        arrays.slot_mapping[at] = cache_slot as i32;
        self.plan.num_tokens += 1;
    }

    /// Draw a sample for `slot` from the last token written; its place among the logits.
    pub(crate) fn logit(&mut self, slot: Slot) -> usize {
        let (arrays, at) = (&mut self.arrays, self.plan.num_logits);
        arrays.logits_rows[at] = self.plan.num_tokens as i32 - 1;
        arrays.logits_slots[at] = slot.0 as i32;
        self.plan.num_logits += 1;
        at
    }

    /// What is added to logits of single tokens; none is named twice.
    pub(crate) fn bias(&mut self, logit: usize, biases: &[(u32, f32)]) {
        for &(token, value) in biases {
            let at = self.plan.num_biases;
            self.arrays.bias_logits[at] = logit as i32;
            self.arrays.bias_tokens[at] = token as i32;
            self.arrays.bias_values[at] = value.to_bits() as i32;
            self.plan.num_biases += 1;
        }
    }

    /// Hold a sample to a set of tokens, which the caller knows.
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

    pub(crate) fn table(&mut self, slot: Slot, start: usize, blocks: &[BlockId]) {
        for (i, block) in blocks.iter().enumerate() {
            let (arrays, at) = (&mut self.arrays, self.plan.num_table_updates);
            arrays.table_slots[at] = slot.0 as i32;
            arrays.table_indices[at] = (start + i) as i32;
            arrays.table_blocks[at] = block.0 as i32;
            self.plan.num_table_updates += 1;
        }
    }

    /// A group of rows and the first blocks they share.
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
