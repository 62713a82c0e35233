//! Register tiles of attention: scores, weights and weighted values of a few query rows.
//!
//! A score is one chain of products over the head's dimensions, a weighted sum one chain over the chunk's
//! positions, each lane on its own. Register tiles only choose how many chains run side by side, so neither the
//! tile nor the other queries in it show in a result.
#![allow(unsafe_code, reason = "reads cache blocks through raw pointers")]
#![allow(clippy::needless_range_loop, reason = "indices of register tiles")]
#![allow(clippy::struct_field_names, reason = "rows of weights are what the struct is about")]
#![allow(clippy::inline_always, reason = "generic code must inline into its target_feature caller")]

use std::marker::PhantomData;

use super::CHUNK;
use crate::math::{Element, LANES, Lanes, Op, exp2, tanh};

/// Most rows of a register tile.
pub(super) const MAX_ROWS: usize = 6;
/// Vectors of positions in a chunk.
pub(super) const CHUNK_VECTORS: usize = CHUNK / LANES;

/// Positions of a chunk that a query sees: first and end, 0 to [`CHUNK`].
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) first: usize,
    pub(super) end: usize,
}

/// Scores of M rows against N vectors of positions.
pub(super) struct Scores<E, const M: usize, const N: usize> {
    pub(super) query: *const u32,
    pub(super) keys: [*const u32; N],
    /// What to prefetch meanwhile.
    pub(super) ahead: Option<[*const u32; N]>,
    pub(super) steps: usize,
    pub(super) key_stride: usize,
    pub(super) out: *mut f32,
    pub(super) element: PhantomData<E>,
}

impl<E: Element, const M: usize, const N: usize> Scores<E, M, N> {
    /// The products of one step.
    #[inline(always)]
    unsafe fn step<L: Lanes>(&self, l: L, acc: &mut [[L::F; N]; M], step: usize) {
        // SAFETY: the caller gives M query rows of `steps` words and N key tiles of `steps` rows.
        unsafe {
            let mut keys = [l.splat(0.0); N];
            for n in 0..N {
                keys[n] = l.load(self.keys[n].add(step * self.key_stride).cast());
            }
            for m in 0..M {
                let query = l.splat_word(*self.query.add(m * self.steps + step));
                for n in 0..N {
                    acc[m][n] = E::mac(l, acc[m][n], keys[n], query);
                }
            }
        }
    }
}

impl<E: Element, const M: usize, const N: usize> Op for Scores<E, M, N> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        // SAFETY: the caller gives M query rows of `steps` words, N key tiles of `steps` rows and M rows of CHUNK scores.
        unsafe {
            let mut acc = [[l.splat(0.0); N]; M];
            if let Some(ahead) = self.ahead {
                for step in 0..self.steps {
                    for n in 0..N {
                        l.prefetch(ahead[n].wrapping_add(step * LANES));
                    }
                    self.step(l, &mut acc, step);
                }
            } else {
                for step in 0..self.steps {
                    self.step(l, &mut acc, step);
                }
            }
            for m in 0..M {
                for n in 0..N {
                    l.store(self.out.add(m * CHUNK + n * LANES), acc[m][n]);
                }
            }
        }
    }
}

/// total = total * `old_scale` + (weights x values) * `new_scale`, for M rows and N vectors of dimensions.
pub(super) struct Values<'a, E, const M: usize, const N: usize> {
    pub(super) weights: *const u32,
    pub(super) values: &'a [*const u32; CHUNK_VECTORS],
    /// What to prefetch meanwhile.
    pub(super) ahead: Option<&'a [*const u32; CHUNK_VECTORS]>,
    /// Vectors before it are asked for already.
    pub(super) ahead_from: usize,
    /// Dimensions from here.
    pub(super) offset: usize,
    pub(super) head_dim: usize,
    pub(super) span: Span,
    pub(super) old_scales: &'a [f32; MAX_ROWS],
    pub(super) new_scales: &'a [f32; MAX_ROWS],
    pub(super) totals: *mut f32,
    pub(super) element: PhantomData<E>,
}

impl<E: Element, const M: usize, const N: usize> Values<'_, E, M, N> {
    /// One word of positions; `mask` drops a value that no query sees.
    #[inline(always)]
    unsafe fn step<L: Lanes>(&self, l: L, acc: &mut [[L::F; N]; M], step: usize, mask: u32) {
        let per_vector = LANES / E::PER_WORD;
        // SAFETY: the caller's step lies within the span.
        unsafe {
            let row =
                self.values[step / per_vector].add(step % per_vector * self.head_dim + self.offset);
            let mut values = [l.splat(0.0); N];
            for n in 0..N {
                values[n] = l.load(row.add(n * LANES).cast());
                if mask != u32::MAX {
                    values[n] = l.and_word(values[n], mask);
                }
            }
            for m in 0..M {
                let weight = l.splat_word(*self.weights.add(m * (CHUNK / E::PER_WORD) + step));
                for n in 0..N {
                    acc[m][n] = E::mac(l, acc[m][n], values[n], weight);
                }
            }
        }
    }
}

impl<E: Element, const M: usize, const N: usize> Op for Values<'_, E, M, N> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let per_vector = LANES / E::PER_WORD;
        let mut acc = [[l.splat(0.0); N]; M];
        let mut step = self.span.first / E::PER_WORD;
        let whole_end = self.span.end / E::PER_WORD;
        // SAFETY: the caller gives values for the span, M rows of weights and of totals.
        unsafe {
            if !self.span.first.is_multiple_of(E::PER_WORD) {
                self.step(l, &mut acc, step, 0xffff_0000);
                step += 1;
            }
            while step < whole_end {
                let end = ((step / per_vector + 1) * per_vector).min(whole_end);
                if let Some(ahead) = self.ahead.filter(|_| step / per_vector >= self.ahead_from) {
                    let line = ahead[step / per_vector].wrapping_add(self.offset);
                    for step in step..end {
                        let row = line.wrapping_add(step % per_vector * self.head_dim);
                        for n in 0..N {
                            l.prefetch(row.wrapping_add(n * LANES));
                        }
                        self.step(l, &mut acc, step, u32::MAX);
                    }
                } else {
                    for step in step..end {
                        self.step(l, &mut acc, step, u32::MAX);
                    }
                }
                step = end;
            }
            if !self.span.end.is_multiple_of(E::PER_WORD) {
                self.step(l, &mut acc, step, 0x0000_ffff);
            }
            for m in 0..M {
                let old_scale = l.splat(self.old_scales[m]);
                let new_scale = l.splat(self.new_scales[m]);
                for n in 0..N {
                    let total = self.totals.add(m * self.head_dim + self.offset + n * LANES);
                    let old = l.mul(l.load(total), old_scale);
                    l.store(total, l.fma(acc[m][n], new_scale, old));
                }
            }
        }
    }
}

/// Scores of one tile to weights: 2^(score - maximum), in place of exp as the scale holds log2(e).
pub(super) struct Weights<'a, E> {
    pub(super) scores: *mut f32,
    pub(super) weights: *mut u32,
    pub(super) spans: &'a [Span],
    /// The tile's own span.
    pub(super) span: Span,
    pub(super) scale: f32,
    pub(super) softcap: f32,
    pub(super) maxima: &'a mut [f32; MAX_ROWS],
    pub(super) sums: &'a mut [f32; MAX_ROWS],
    /// Values to prefetch meanwhile, up to a vector, and cache lines of a vector's.
    pub(super) ahead: Option<&'a [*const u32; CHUNK_VECTORS]>,
    pub(super) ahead_from: usize,
    pub(super) lines: usize,
    pub(super) element: PhantomData<E>,
}

impl<E: Element> Weights<'_, E> {
    /// Caps and masks the scores of a row; returns their maximum.
    #[inline(always)]
    unsafe fn maximum<L: Lanes>(&self, l: L, scores: *mut f32, span: Span) -> f32 {
        let mut maximum = l.splat(f32::NEG_INFINITY);
        let last = self.span.end.div_ceil(LANES);
        for vector in self.span.first / LANES..last {
            let start = vector * LANES;
            // SAFETY: within the row's CHUNK scores.
            unsafe {
                let mut x = l.load(scores.add(start));
                if self.softcap > 0.0 {
                    x = tanh(l, l.mul(x, l.splat(self.scale / self.softcap)));
                    l.store(scores.add(start), x);
                }
                if span.first > start || span.end < start + LANES {
                    let (first, end) = (span.first as i32, span.end as i32);
                    let start = start as i32;
                    x = l.keep(x, first - start, end - start, l.splat(f32::NEG_INFINITY));
                    l.store(scores.add(vector * LANES), x);
                }
                maximum = l.max(x, maximum);
            }
        }
        l.max_lane(maximum)
    }
}

impl<E: Element> Op for Weights<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let scale =
            std::f32::consts::LOG2_E * if self.softcap > 0.0 { self.softcap } else { self.scale };
        let vectors = self.span.first / LANES..self.span.end.div_ceil(LANES);
        let mut lines = vectors.start * self.lines..self.ahead_from * self.lines;
        let share = lines.len().div_ceil(self.spans.len() * vectors.len().div_ceil(2));
        for (row, &span) in self.spans.iter().enumerate() {
            // SAFETY: the tile has a row of CHUNK scores and weights for every span.
            unsafe {
                let scores = self.scores.add(row * CHUNK);
                let weights = self.weights.add(row * (CHUNK / E::PER_WORD));
                let maximum = self.maximum(l, scores, span) * scale;
                // Nothing seen: every weight comes out 0 (or NaN, where a score is).
                let base = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
                let mut sum = l.splat(0.0);
                // By pairs of vectors from an even one, so that a position's lane never depends on the span.
                let mut vector = vectors.start & !1;
                while vector < vectors.end {
                    if let Some(ahead) = self.ahead {
                        for line in lines.by_ref().take(share) {
                            l.prefetch(
                                ahead[line / self.lines].wrapping_add(line % self.lines * LANES),
                            );
                        }
                    }
                    let mut pair = [l.splat(0.0); 2];
                    for (i, weight) in pair.iter_mut().enumerate() {
                        if vectors.contains(&(vector + i)) {
                            let x = l.load(scores.add((vector + i) * LANES));
                            *weight = exp2(l, l.fma(x, l.splat(scale), l.splat(-base)));
                        }
                    }
                    if E::PER_WORD == 2 {
                        // The sum is that of the rounded weights: what the values are multiplied by.
                        let words = l.pack_bf16(pair[0], pair[1]);
                        sum = l.dot_bf16(sum, words, l.splat_word(0x3f80_3f80));
                        l.store(weights.add(vector * LANES / 2).cast(), words);
                    } else {
                        sum = l.add(l.add(sum, pair[0]), pair[1]);
                        l.store(weights.add(vector * LANES).cast(), pair[0]);
                        l.store(weights.add(vector * LANES + LANES).cast(), pair[1]);
                    }
                    vector += 2;
                }
                self.maxima[row] = maximum;
                self.sums[row] = l.sum(sum);
            }
        }
    }
}

/// Calls `$call!(M, N)` with constants for the tile's rows and vectors.
macro_rules! with_tile {
    ($rows:expr, $vectors:expr, $call:ident) => {
        match ($rows, $vectors) {
            (1, 1) => $call!(1, 1),
            (2, 1) => $call!(2, 1),
            (3, 1) => $call!(3, 1),
            (4, 1) => $call!(4, 1),
            (5, 1) => $call!(5, 1),
            (6, 1) => $call!(6, 1),
            (1, 2) => $call!(1, 2),
            (2, 2) => $call!(2, 2),
            (3, 2) => $call!(3, 2),
            (4, 2) => $call!(4, 2),
            (5, 2) => $call!(5, 2),
            (6, 2) => $call!(6, 2),
            (1, 4) => $call!(1, 4),
            (2, 4) => $call!(2, 4),
            (3, 4) => $call!(3, 4),
            (4, 4) => $call!(4, 4),
            (5, 4) => $call!(5, 4),
            (6, 4) => $call!(6, 4),
            (rows, vectors) => unreachable!("no register tile of {rows} by {vectors}"),
        }
    };
}

/// Vectors of the next register tile where `left` are left.
pub(super) fn tile_vectors<L: Lanes>(left: usize) -> usize {
    [4, 2].into_iter().find(|&n| n <= left && n <= L::VECTORS).unwrap_or(1)
}

/// Factors that bring an old total and a new partial sum to their common maximum, and that maximum.
#[inline(always)]
pub(super) fn rescale<L: Lanes>(l: L, old: f32, new: f32) -> (f32, f32, f32) {
    let maximum = if new > old { new } else { old };
    let base = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
    let scales = exp2(l, l.keep(l.splat(old - base), 0, 1, l.splat(new - base)));
    let scales = l.to_array(scales);
    (maximum, scales[0], scales[1])
}

pub(super) use with_tile;
