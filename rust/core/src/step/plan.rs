//! The step plan: how much of each plan array one step fills.

/// int32 values of the first plan array, which tells how much of the others is filled.
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
    /// Rows of one token that continue an answer.
    pub num_decode_rows: usize,
    /// Samples drawn.
    pub num_logits: usize,
    /// Entries of the device's block tables that change.
    pub num_table_updates: usize,
    /// Whole blocks copied before anything is written, in any order: none is both source and destination.
    pub num_block_copies: usize,
    /// Slots whose sampling parameters are new.
    pub num_param_updates: usize,
    /// Single logits that are changed.
    pub num_biases: usize,
    /// Groups of decode rows that share their first blocks.
    pub num_groups: usize,
    /// Tokens of the longest sequence after the step.
    pub max_seq_len: usize,
    /// Tokens of the longest row.
    pub max_query_len: usize,
    /// Samples that are constrained to a set of tokens.
    pub num_masks: usize,
}

impl StepPlan {
    /// The array `counts` in the order of [`COUNTS`]; `step` holds the low 31 bits of the step's number.
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
