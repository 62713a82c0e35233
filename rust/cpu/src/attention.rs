//! Paged attention that reads the cache's blocks where they lie: decode and prompt rows, grouped queries.
//!
//! Every query, whatever row it comes in, walks its keys in the same chunks of absolute positions: scores, their
//! maximum, weights and weighted sum of a chunk, then the chunks merged in order. Nothing else enters its result,
//! so it is bit for bit independent of the batch, of how the prompt was cut and of the number of threads. Positions
//! past a query's own but inside its sequence may take part with weight 0; memory of other sequences never does.
#![allow(unsafe_code, reason = "its arguments are raw pointers into tensors")]

mod addresses;
mod kernel;
mod tiles;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use crate::cache::CacheShape;
use crate::math::{Bf16, Dtype, F32, dispatch};
use crate::pool::{num_threads, parallel_for};
use crate::shared::Shared;
use kernel::{Merge, Run, Scratch};

/// Positions of a chunk.
pub const CHUNK: usize = 256;
/// Query rows (queries times heads of a group) that one item takes.
const ITEM_ROWS: usize = 96;

/// What one call of [`attention`] works on.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Element type of `qkv`, `out` and `kv_cache`.
    pub dtype: Dtype,
    /// [tokens, `qkv_stride`]; the queries are the first `num_heads * head_dim` columns.
    pub qkv: *const u8,
    /// Elements from one token to the next.
    pub qkv_stride: usize,
    /// [tokens, `num_heads`, `head_dim`].
    pub out: *mut u8,
    /// One layer's cache, as [`crate::cache::rope_and_cache`] writes it.
    pub kv_cache: *const u8,
    /// The cache's shape.
    pub shape: CacheShape,
    /// int32[slots, `table_stride`].
    pub block_tables: *const i32,
    /// Blocks of one slot's table.
    pub table_stride: usize,
    /// Slot of each row.
    pub rows: &'a [i32],
    /// First query of each row, and the end of the last.
    pub query_start: &'a [i32],
    /// Keys of each row; its queries are the last of them.
    pub seq_lens: &'a [i32],
    /// Query heads, a multiple of the key heads.
    pub num_heads: usize,
    /// Factor of the scores, above 0.
    pub scale: f32,
    /// Last positions a query sees, itself among them; 0 for all.
    pub window: usize,
    /// Bound of the scores, through tanh; 0 for none.
    pub softcap: f32,
}

impl Attention<'_> {
    /// Query heads of a key head.
    fn group(&self) -> usize {
        self.num_heads / self.shape.num_kv_heads
    }
}

/// Queries of one row and some key heads, against a range of chunks.
#[derive(Clone, Debug)]
struct Item {
    /// The row's slot.
    slot: usize,
    /// Key heads.
    heads: Range<usize>,
    /// First query's token and its position in the sequence.
    first_query: usize,
    first_position: usize,
    queries: usize,
    chunks: Range<usize>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Causal attention over cached keys and values.
///
/// # Safety
/// The pointers are valid for what the fields say, `out` for writing; the tables hold valid blocks for every position
/// below each row's length; `rows`, `query_start` (one longer) and `seq_lens` agree, rows have distinct tokens.
pub unsafe fn attention(attention: &Attention<'_>) {
    let items = items(attention);
    let few = items.len() < 4 * num_threads();
    let (split, whole): (Vec<_>, Vec<_>) =
        items.into_iter().partition(|item| few && num_threads() > 1 && can_split(attention, item));
    let shared = Shared::new(*attention);
    parallel_for(whole.len(), &|index| {
        let attention = shared.get();
        SCRATCH.with_borrow_mut(|scratch| run(attention, &whole[index], scratch, None));
    });
    if !split.is_empty() {
        run_split(attention, &split);
    }
}

/// Whether an item's chunks may go to different threads: one tile of queries with long keys.
fn can_split(attention: &Attention<'_>, item: &Item) -> bool {
    item.chunks.len() > 1 && item.queries * attention.group() <= ITEM_ROWS / 4
}

/// Run the items a few chunks at a time, then merge each one's partial results.
fn run_split(attention: &Attention<'_>, items: &[Item]) {
    let chunks: usize = items.iter().map(|item| item.chunks.len()).sum();
    let at_once = (chunks / (4 * num_threads())).max(1);
    let mut pieces = Vec::new();
    let mut starts = Vec::with_capacity(items.len());
    let mut floats = 0;
    for item in items {
        starts.push(floats);
        for first in item.chunks.clone().step_by(at_once) {
            let chunks = first..item.chunks.end.min(first + at_once);
            let len = item.queries * attention.group() * (attention.shape.head_dim + 2);
            pieces.push((Item { chunks: chunks.clone(), ..item.clone() }, floats));
            floats += chunks.len() * len;
        }
    }
    let mut partials = vec![0.0f32; floats];
    let shared = Shared::new((*attention, partials.as_mut_ptr()));
    parallel_for(pieces.len(), &|index| {
        let (attention, partials) = *shared.get();
        let (piece, start) = &pieces[index];
        // SAFETY: each piece has its own part.
        let partials = unsafe { partials.add(*start) };
        SCRATCH.with_borrow_mut(|scratch| run(&attention, piece, scratch, Some(partials)));
    });
    parallel_for(items.len(), &|index| {
        let (attention, partials) = *shared.get();
        // SAFETY: the item's part, written above.
        let partials = unsafe { partials.add(starts[index]).cast_const() };
        let (attention, item) = (&attention, &items[index]);
        SCRATCH.with_borrow_mut(|scratch| match attention.dtype {
            Dtype::Bf16 => {
                dispatch(Merge::<Bf16> {
                    attention,
                    item,
                    scratch,
                    partials,
                    element: PhantomData,
                });
            }
            Dtype::F32 => {
                dispatch(Merge::<F32> { attention, item, scratch, partials, element: PhantomData });
            }
        });
    });
}

/// Run one item with the instruction set in use.
fn run(attention: &Attention<'_>, item: &Item, scratch: &mut Scratch, partials: Option<*mut f32>) {
    match attention.dtype {
        Dtype::Bf16 => {
            dispatch(Run::<Bf16> { attention, item, scratch, partials, element: PhantomData });
        }
        Dtype::F32 => {
            dispatch(Run::<F32> { attention, item, scratch, partials, element: PhantomData });
        }
    }
}

/// Every row cut into query tiles and by key heads.
fn items(attention: &Attention<'_>) -> Vec<Item> {
    let tile = (ITEM_ROWS / attention.group()).max(1);
    let kv_heads = attention.shape.num_kv_heads;
    // Where rows are many, one item takes all heads of a decode row: its blocks lie side by side.
    let many = attention.rows.len() >= 4 * num_threads();
    let mut items = Vec::new();
    for (row, &slot) in attention.rows.iter().enumerate() {
        let start = attention.query_start[row] as usize;
        let queries = attention.query_start[row + 1] as usize - start;
        let context = attention.seq_lens[row] as usize - queries;
        let heads_at_once = if many && queries == 1 { kv_heads } else { 1 };
        for head in (0..kv_heads).step_by(heads_at_once) {
            for first in (0..queries).step_by(tile) {
                let count = tile.min(queries - first);
                let first_position = context + first;
                let lowest = match attention.window {
                    0 => 0,
                    window => (first_position + 1).saturating_sub(window),
                };
                items.push(Item {
                    slot: slot as usize,
                    heads: head..head + heads_at_once,
                    first_query: start + first,
                    first_position,
                    queries: count,
                    chunks: lowest / CHUNK..(first_position + count).div_ceil(CHUNK),
                });
            }
        }
    }
    items
}
