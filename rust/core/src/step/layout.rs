//! The layout of an arena: where each plan array lies.

use crate::config::Config;
use crate::step::plan::NUM_COUNTS;

/// int32 values of a slot's sampling parameters.
pub const PARAM_LEN: usize = 16;
/// Arenas in the ring.
pub const NUM_ARENAS: usize = 3;
/// Elements between the starts of arrays are a multiple of this, so that each array begins a cache line of a device.
pub const ALIGNMENT: usize = 32;

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
            pub(crate) fn split(layout: &Layout, arena: &'a mut [i32]) -> Self {
                let mut rest = arena;
                let mut sizes = layout.arrays.iter();
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
        let groups = config.windows.len();
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
                    "token_ids" | "positions" => tokens,
                    "slot_mapping" => groups * tokens,
                    "copy_sources" | "copy_destinations" => groups * rows,
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

    /// The named array of a filled arena; empty when no array has that name.
    #[must_use]
    pub fn slice<'a>(&self, arena: &'a [i32], name: &str) -> &'a [i32] {
        self.arrays
            .iter()
            .find(|array| array.name == name)
            .and_then(|array| arena.get(array.offset..array.offset + array.capacity))
            .unwrap_or_default()
    }
}
