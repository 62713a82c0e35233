//! The walk of one item: its query rows against its chunks of keys and values, and what of it crosses threads.
#![allow(unsafe_code, reason = "reads cache blocks through raw pointers")]
#![allow(clippy::cast_ptr_alignment, reason = "alignment is checked where the pointers come in")]
#![allow(clippy::inline_always, reason = "generic code must inline into its target_feature caller")]

use std::marker::PhantomData;

use super::addresses::{
    ChunkPointers, chunk_pointers, list_stream, pointers_ahead, seen_in, span_of,
};
use super::tiles::{MAX_ROWS, Scores, Span, Values, Weights, rescale, tile_vectors, with_tile};
use super::{Attention, CHUNK, Item};
use crate::math::{Element, LANES, Lanes, Op};

/// Vectors of values asked for while weights are computed, which would leave memory idle.
const WEIGHTS_AHEAD: usize = 4;

/// Running maximum (in powers of 2), sum and weighted values of some query rows.
#[derive(Default)]
struct Totals {
    maxima: Vec<f32>,
    sums: Vec<f32>,
    /// [rows, `head_dim`].
    values: Vec<f32>,
}

/// A thread's working memory, kept between calls.
#[derive(Default)]
pub(super) struct Scratch {
    query: Vec<u32>,
    scores: Vec<f32>,
    weights: Vec<u32>,
    totals: Totals,
    /// What the item will read, a vector's keys or values each, in order.
    stream: Vec<*const u32>,
}

impl Totals {
    /// Copies all to `destination`; returns its end. SAFETY: there is room.
    unsafe fn save(&self, mut destination: *mut f32) -> *mut f32 {
        for part in [&self.maxima, &self.sums, &self.values] {
            // SAFETY: the caller's promise.
            unsafe {
                destination.copy_from_nonoverlapping(part.as_ptr(), part.len());
                destination = destination.add(part.len());
            }
        }
        destination
    }

    fn reset(&mut self, rows: usize, head_dim: usize) {
        self.maxima.clear();
        self.maxima.resize(rows, f32::NEG_INFINITY);
        self.sums.clear();
        self.sums.resize(rows, 0.0);
        self.values.clear();
        self.values.resize(rows * head_dim, 0.0);
    }
}

/// Attention of one item: its queries against its chunks, one head after the other.
pub(super) struct Run<'a, E> {
    pub(super) attention: &'a Attention<'a>,
    pub(super) item: &'a Item,
    pub(super) scratch: &'a mut Scratch,
    /// Where a split item leaves each chunk's partial result: maxima, sums, values.
    pub(super) partials: Option<*mut f32>,
    pub(super) element: PhantomData<E>,
}

impl<E: Element> Op for Run<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (attention, item) = (self.attention, self.item);
        let scratch = self.scratch;
        let head_dim = attention.shape.head_dim;
        let rows = item.queries * attention.group();
        scratch.scores.resize(MAX_ROWS * CHUNK, 0.0);
        scratch.weights.resize(MAX_ROWS * CHUNK, 0);
        // Many query rows keep a chunk in the cache; few wait for memory.
        let prefetch = item.queries == 1;
        scratch.stream.clear();
        let mut done = 0;
        // SAFETY: `Attention`'s fields are valid by the promise of whoever made it; the item lies within them.
        unsafe {
            if prefetch {
                list_stream::<E>(attention, item, &mut scratch.stream);
            }
            let mut partial = self.partials;
            for head in item.heads.clone() {
                scratch.totals.reset(rows, head_dim);
                gather_queries::<E>(attention, item, head, &mut scratch.query);
                for chunk in item.chunks.clone() {
                    let start = chunk * CHUNK;
                    let seen = seen_in(attention, item, start);
                    let pointers = chunk_pointers::<E>(attention, item, head, start, &seen);
                    run_chunk::<L, E>(l, attention, item, scratch, &pointers, start, done);
                    done += 2 * seen.len();
                    if let Some(destination) = &mut partial {
                        *destination = scratch.totals.save(*destination);
                        scratch.totals.reset(rows, head_dim);
                    }
                }
                if partial.is_none() {
                    write_out::<L, E>(l, attention, item, head, &scratch.totals);
                }
            }
        }
    }
}

/// Every register tile of an item's rows against one chunk; `done` entries of the stream are behind it.
#[inline(always)]
unsafe fn run_chunk<L: Lanes, E: Element>(
    l: L,
    attention: &Attention<'_>,
    item: &Item,
    scratch: &mut Scratch,
    pointers: &ChunkPointers,
    start: usize,
    done: usize,
) {
    let group = attention.group();
    let rows = item.queries * group;
    let tiles = rows.div_ceil(L::ROWS);
    let ahead = (!scratch.stream.is_empty())
        .then(|| pointers_ahead(&scratch.stream, done, &seen_in(attention, item, start)));
    let mut first = 0;
    for tile in 0..tiles {
        let end = (tile + 1) * rows / tiles;
        let mut spans = [Span { first: 0, end: 0 }; MAX_ROWS];
        for (row, span) in (first..end).zip(&mut spans) {
            *span = span_of(attention, item, row / group, start);
        }
        let spans = &spans[..end - first];
        // The first tile brings in what the others find.
        let ahead = if tile == 0 { ahead.as_ref() } else { None };
        // SAFETY: the caller's promise.
        unsafe { run_tile::<L, E>(l, attention, scratch, pointers, ahead, first, spans) };
        first = end;
    }
}

/// Merge the partial results of a split row's chunks, in order.
pub(super) struct Merge<'a, E> {
    pub(super) attention: &'a Attention<'a>,
    /// Covers all chunks.
    pub(super) item: &'a Item,
    pub(super) scratch: &'a mut Scratch,
    /// One partial result a chunk.
    pub(super) partials: *const f32,
    pub(super) element: PhantomData<E>,
}

impl<E: Element> Op for Merge<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let head_dim = self.attention.shape.head_dim;
        let rows = self.item.queries * self.attention.group();
        let totals = &mut self.scratch.totals;
        totals.reset(rows, head_dim);
        for index in 0..self.item.chunks.len() {
            // SAFETY: the caller gives `partial_len` floats for each chunk.
            unsafe {
                let maxima = self.partials.add(index * rows * (head_dim + 2));
                let (sums, values) = (maxima.add(rows), maxima.add(2 * rows));
                for row in 0..rows {
                    let (maximum, old, new) = rescale(l, totals.maxima[row], *maxima.add(row));
                    totals.maxima[row] = maximum;
                    totals.sums[row] = (*sums.add(row)).mul_add(new, totals.sums[row] * old);
                    for d in (row * head_dim..(row + 1) * head_dim).step_by(LANES) {
                        let total = totals.values.as_mut_ptr().add(d);
                        let kept = l.mul(l.load(total), l.splat(old));
                        l.store(total, l.fma(l.load(values.add(d)), l.splat(new), kept));
                    }
                }
            }
        }
        // SAFETY: as in `Run`.
        unsafe { write_out::<L, E>(l, self.attention, self.item, self.item.heads.start, totals) };
    }
}

/// The item's query rows side by side: [query, head of the group, `head_dim`].
unsafe fn gather_queries<E: Element>(
    attention: &Attention<'_>,
    item: &Item,
    head: usize,
    query: &mut Vec<u32>,
) {
    let group = attention.group();
    let words = group * attention.shape.head_dim / E::PER_WORD;
    query.clear();
    query.reserve(item.queries * words);
    for token in item.first_query..item.first_query + item.queries {
        let column = head * group * attention.shape.head_dim;
        // SAFETY: within qkv; words need no alignment here.
        unsafe {
            let source = attention.qkv.cast::<E::Raw>().add(token * attention.qkv_stride + column);
            source
                .cast::<u8>()
                .copy_to_nonoverlapping(query.as_mut_ptr().add(query.len()).cast(), words * 4);
            query.set_len(query.len() + words);
        }
    }
}

/// One register tile of rows against one chunk.
#[inline(always)]
unsafe fn run_tile<L: Lanes, E: Element>(
    l: L,
    attention: &Attention<'_>,
    scratch: &mut Scratch,
    pointers: &ChunkPointers,
    ahead: Option<&ChunkPointers>,
    first_row: usize,
    spans: &[Span],
) {
    let head_dim = attention.shape.head_dim;
    let steps = head_dim / E::PER_WORD;
    let rows = spans.len();
    let span = Span { first: spans[0].first, end: spans[rows - 1].end };
    if span.first >= span.end {
        return;
    }
    let scores = scratch.scores.as_mut_ptr();
    let weights = scratch.weights.as_mut_ptr();
    let end = span.end.div_ceil(LANES);
    let mut vector = span.first / LANES;
    while vector < end {
        let count = tile_vectors::<L>(end - vector);
        macro_rules! scores {
            ($m:literal, $n:literal) => {{
                let mut keys = [std::ptr::null(); $n];
                keys.copy_from_slice(&pointers.keys[vector..vector + $n]);
                let ahead = ahead.map(|ahead| {
                    let mut keys = [std::ptr::null(); $n];
                    keys.copy_from_slice(&ahead.keys[vector..vector + $n]);
                    keys
                });
                // SAFETY: the tile's rows lie within the scratch memory.
                let (query, out) = unsafe {
                    (scratch.query.as_ptr().add(first_row * steps), scores.add(vector * LANES))
                };
                l.call(Scores::<E, $m, $n> {
                    query,
                    keys,
                    ahead,
                    steps,
                    key_stride: attention.shape.block_size,
                    out,
                    element: PhantomData,
                });
            }};
        }
        with_tile!(rows, count, scores);
        vector += count;
    }
    let (mut maxima, mut sums) = ([0.0; MAX_ROWS], [0.0; MAX_ROWS]);
    let ahead_from = end.min(span.first / LANES + WEIGHTS_AHEAD);
    l.call(Weights::<E> {
        scores,
        weights,
        spans,
        span,
        scale: attention.scale,
        softcap: attention.softcap,
        maxima: &mut maxima,
        sums: &mut sums,
        ahead: ahead.map(|ahead| &ahead.values),
        ahead_from,
        lines: head_dim / E::PER_WORD,
        element: PhantomData,
    });
    let (mut old_scales, mut new_scales) = ([0.0; MAX_ROWS], [0.0; MAX_ROWS]);
    let totals = &mut scratch.totals;
    for row in 0..rows {
        let (maximum, old, new) = rescale(l, totals.maxima[first_row + row], maxima[row]);
        (old_scales[row], new_scales[row]) = (old, new);
        totals.maxima[first_row + row] = maximum;
        let sum = &mut totals.sums[first_row + row];
        *sum = sums[row].mul_add(new, *sum * old);
    }
    // SAFETY: the rows' totals.
    let totals = unsafe { totals.values.as_mut_ptr().add(first_row * head_dim) };
    let mut offset = 0;
    while offset < head_dim {
        let count = tile_vectors::<L>((head_dim - offset) / LANES);
        macro_rules! values {
            ($m:literal, $n:literal) => {
                l.call(Values::<'_, E, $m, $n> {
                    weights,
                    values: &pointers.values,
                    ahead: ahead.map(|ahead| &ahead.values),
                    ahead_from,
                    offset,
                    head_dim,
                    span,
                    old_scales: &old_scales,
                    new_scales: &new_scales,
                    totals,
                    element: PhantomData,
                })
            };
        }
        with_tile!(rows, count, values);
        offset += count * LANES;
    }
}

/// Totals over their sums, to the item's place in the output.
#[inline(always)]
unsafe fn write_out<L: Lanes, E: Element>(
    l: L,
    attention: &Attention<'_>,
    item: &Item,
    kv_head: usize,
    totals: &Totals,
) {
    let (head_dim, group) = (attention.shape.head_dim, attention.group());
    for row in 0..item.queries * group {
        let token = item.first_query + row / group;
        let head = kv_head * group + row % group;
        let sum = totals.sums[row];
        let sum = l.splat(if sum == 0.0 { 1.0 } else { sum });
        // SAFETY: the output holds every token and head.
        unsafe {
            let out =
                attention.out.cast::<E::Raw>().add((token * attention.num_heads + head) * head_dim);
            for d in (0..head_dim).step_by(LANES) {
                let value = l.load(totals.values.as_ptr().add(row * head_dim + d));
                E::store(l, out.add(d), l.div(value, sum));
            }
        }
    }
}
