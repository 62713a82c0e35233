//! Where an item's keys and values lie in the cache, and what of them to ask memory for ahead of use.
#![allow(unsafe_code, reason = "reads block tables through raw pointers")]
#![allow(clippy::cast_ptr_alignment, reason = "alignment is checked where the pointers come in")]

use std::ops::Range;

use super::tiles::{CHUNK_VECTORS, Span};
use super::{Attention, CHUNK, Item};
use crate::cache::tile_offset;
use crate::math::{Element, LANES};

/// Vectors of positions between what is worked on and what is asked of memory: a register tile, so that the
/// first-level cache holds both.
const LOOKAHEAD: usize = 4;
/// Where the vectors of a chunk lie in the cache.
pub(super) struct ChunkPointers {
    pub(super) keys: [*const u32; CHUNK_VECTORS],
    pub(super) values: [*const u32; CHUNK_VECTORS],
}

/// Positions of the chunk from `start` that the item's query sees.
pub(super) fn span_of(attention: &Attention<'_>, item: &Item, query: usize, start: usize) -> Span {
    let end = item.first_position + query + 1;
    let first = if attention.window > 0 { end.saturating_sub(attention.window) } else { 0 };
    Span {
        first: first.saturating_sub(start).min(CHUNK),
        end: end.saturating_sub(start).min(CHUNK),
    }
}

/// Vectors of the chunk from `start` with a position that some query of the item sees.
pub(super) fn seen_in(attention: &Attention<'_>, item: &Item, start: usize) -> Range<usize> {
    let first = span_of(attention, item, 0, start).first;
    let end = span_of(attention, item, item.queries - 1, start).end;
    first / LANES..end.div_ceil(LANES).max(first / LANES)
}

/// The vector of positions from `position` on: its keys, its values, and its part of the keys' tile when that is
/// read in the order of memory.
unsafe fn vector_pointers<E: Element>(
    attention: &Attention<'_>,
    item: &Item,
    head: usize,
    position: usize,
) -> [*const u32; 3] {
    let shape = &attention.shape;
    // SAFETY: the table holds a block for every position below the sequence's length, the cache every block.
    unsafe {
        let table = attention.block_tables.add(item.slot * attention.table_stride);
        let block = *table.add(position / shape.block_size) as usize;
        let within = position % shape.block_size;
        let cache = attention.kv_cache.cast::<u32>();
        let keys = cache.add(tile_offset(shape, block, 0, head) / E::PER_WORD);
        let values = cache.add(tile_offset(shape, block, 1, head) / E::PER_WORD);
        let part = within / E::PER_WORD * shape.head_dim;
        [keys.add(within), values.add(part), keys.add(part)]
    }
}

/// Where the vectors with the chunk's visible positions lie.
pub(super) unsafe fn chunk_pointers<E: Element>(
    attention: &Attention<'_>,
    item: &Item,
    head: usize,
    start: usize,
    seen: &Range<usize>,
) -> ChunkPointers {
    let none = [std::ptr::null(); CHUNK_VECTORS];
    let mut pointers = ChunkPointers { keys: none, values: none };
    for vector in seen.clone() {
        // SAFETY: the caller's promise.
        let [keys, values, _] =
            unsafe { vector_pointers::<E>(attention, item, head, start + vector * LANES) };
        pointers.keys[vector] = keys;
        pointers.values[vector] = values;
    }
    pointers
}

/// All that an item will read, in order.
pub(super) unsafe fn list_stream<E: Element>(
    attention: &Attention<'_>,
    item: &Item,
    stream: &mut Vec<*const u32>,
) {
    for head in item.heads.clone() {
        for chunk in item.chunks.clone() {
            let start = chunk * CHUNK;
            let seen = seen_in(attention, item, start);
            // SAFETY: the caller's promise.
            let pointers = seen.map(|vector| unsafe {
                vector_pointers::<E>(attention, item, head, start + vector * LANES)
            });
            stream.extend(pointers.clone().map(|[_, _, keys]| keys));
            stream.extend(pointers.map(|[_, values, _]| values));
        }
    }
}

/// What lies [`LOOKAHEAD`] behind each vector of a chunk in the stream; its end stands for all that would follow.
pub(super) fn pointers_ahead(
    stream: &[*const u32],
    done: usize,
    seen: &Range<usize>,
) -> ChunkPointers {
    let none = [std::ptr::null(); CHUNK_VECTORS];
    let mut pointers = ChunkPointers { keys: none, values: none };
    let last = stream.len() - 1;
    for (i, vector) in seen.clone().enumerate() {
        pointers.keys[vector] = stream[last.min(done + i + LOOKAHEAD)];
        pointers.values[vector] = stream[last.min(done + seen.len() + i + LOOKAHEAD)];
    }
    pointers
}
