//! Passes over a whole row of logits.
#![allow(unsafe_code, reason = "vector loads")]
#![allow(clippy::float_cmp, reason = "ties are exact")]
#![allow(clippy::inline_always, reason = "generic code must inline into its target_feature caller")]

use super::noise::{LARGEST, Noise, bound};
use crate::math::{LANES, Lanes, Op, exp};

/// Logits that share a vector of maxima.
pub(super) const GROUP: usize = 256;

/// The largest logit of every 16th of each group, NaN left out: by lanes, a vector a group.
#[derive(Clone, Copy)]
pub(super) struct Maxima<'a>(&'a [f32]);

impl<'a> Maxima<'a> {
    pub(super) fn new(lanes: &'a [f32]) -> Self {
        Self(lanes)
    }

    pub(super) fn lanes(self) -> &'a [f32] {
        self.0
    }

    pub(super) fn groups(self) -> std::slice::ChunksExact<'a, f32> {
        self.0.chunks_exact(LANES)
    }
}

/// Floats of the maxima of a row.
pub(super) fn maxima_len(vocab_size: usize) -> usize {
    vocab_size.div_ceil(GROUP) * LANES
}

/// A vector of the row from `start`, -inf past its end.
#[inline(always)]
fn vector<L: Lanes>(l: L, row: &[f32], start: usize) -> L::F {
    if let Some(whole) = row.get(start..start + LANES) {
        // SAFETY: sixteen floats.
        return unsafe { l.load(whole.as_ptr()) };
    }
    let mut part = [f32::NEG_INFINITY; LANES];
    let tail = &row[start.min(row.len())..];
    part[..tail.len()].copy_from_slice(tail);
    // SAFETY: sixteen floats.
    unsafe { l.load(part.as_ptr()) }
}

/// Writes the maxima of whole groups.
pub(super) struct FindMaxima<'a> {
    pub(super) row: &'a [f32],
    pub(super) out: &'a mut [f32],
}

impl Op for FindMaxima<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        for (group, out) in self.out.chunks_exact_mut(LANES).enumerate() {
            let start = group * GROUP;
            let mut maxima = [l.splat(f32::NEG_INFINITY); 2];
            for i in (0..GROUP).step_by(2 * LANES) {
                // The second operand comes back for NaN: NaN never enters.
                maxima[0] = l.max(vector(l, self.row, start + i), maxima[0]);
                maxima[1] = l.max(vector(l, self.row, start + i + LANES), maxima[1]);
            }
            // SAFETY: sixteen floats.
            unsafe { l.store(out.as_mut_ptr(), l.max(maxima[0], maxima[1])) };
        }
    }
}

/// Masses of e^((x - maximum) / temperature): of all, and of those within 2, 4, 8 and 16 of the maximum.
pub(super) struct Masses<'a> {
    pub(super) row: &'a [f32],
    pub(super) maximum: f32,
    pub(super) temperature: f32,
}

/// Distances from the maximum whose masses are measured.
pub(super) const DISTANCES: [f32; 5] = [2.0, 4.0, 8.0, 16.0, f32::INFINITY];

impl Op for Masses<'_> {
    type Output = [f64; 5];
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> [f64; 5] {
        let mut totals = [0.0; 5];
        let temperature = l.splat(self.temperature);
        for start in (0..self.row.len()).step_by(GROUP) {
            let mut sums = [l.splat(0.0); 5];
            for i in (0..GROUP).step_by(LANES) {
                let x = vector(l, self.row, start + i);
                let z = l.div(l.sub(x, l.splat(self.maximum)), temperature);
                // NaN weighs nothing.
                let weight = exp(l, l.max(z, l.splat(-200.0)));
                for (sum, distance) in sums.iter_mut().zip(DISTANCES) {
                    let within = l.select_ge(z, l.splat(-distance), weight, l.splat(0.0));
                    *sum = l.add(*sum, within);
                }
            }
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total += f64::from(l.sum(sum));
            }
        }
        totals
    }
}

/// The token with the largest (logit - maximum) / temperature + noise, the lowest at ties.
///
/// The noise is worked out only where its bound lets a token win.
pub(super) struct Draw<'a> {
    pub(super) row: &'a [f32],
    pub(super) maxima: Maxima<'a>,
    pub(super) maximum: f32,
    /// The first token with the maximum.
    pub(super) likeliest: u32,
    pub(super) temperature: f32,
    /// Scaled logits below this are left out.
    pub(super) lowest: f32,
    pub(super) noise: Noise,
}

impl Op for Draw<'_> {
    type Output = u32;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> u32 {
        let mut best = (self.noise.gumbel(self.likeliest), self.likeliest);
        let (maximum, temperature) = (l.splat(self.maximum), l.splat(self.temperature));
        let scaled = |x| l.div(l.sub(x, maximum), temperature);
        for (group, lanes) in self.maxima.groups().enumerate() {
            let limit = self.lowest.max(best.0 - LARGEST);
            // SAFETY: sixteen floats.
            let largest = scaled(unsafe { l.load(lanes.as_ptr()) });
            if l.mask_ge(largest, l.splat(limit)) == 0 {
                continue;
            }
            for i in (0..GROUP).step_by(LANES) {
                let start = group * GROUP + i;
                let z = scaled(vector(l, self.row, start));
                let mut bounds = [0.0; LANES];
                for (token, bits) in (start as u32..).zip(&mut bounds) {
                    *bits = bound(self.noise.bits(token));
                }
                // SAFETY: sixteen floats.
                let reach = l.add(z, unsafe { l.load(bounds.as_ptr()) });
                let mut winners = l.mask_ge(reach, l.splat(best.0))
                    & l.mask_ge(z, l.splat(self.lowest.max(f32::MIN)));
                if winners == 0 {
                    continue;
                }
                let z = l.to_array(z);
                while winners != 0 {
                    let lane = winners.trailing_zeros();
                    winners &= winners - 1;
                    let token = start as u32 + lane;
                    let score = z[lane as usize] + self.noise.gumbel(token);
                    if score > best.0 || (score == best.0 && token < best.1) {
                        best = (score, token);
                    }
                }
            }
        }
        best.1
    }
}

/// Repetition, frequency and presence penalties on a part of a row.
pub(super) struct Penalize<'a> {
    pub(super) row: &'a mut [f32],
    pub(super) counts: &'a [i32],
    pub(super) repetition: f32,
    pub(super) presence: f32,
    pub(super) frequency: f32,
}

/// Set in a count where the prompt holds the token.
const PROMPT: i32 = 1 << 30;

impl Op for Penalize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        for (logits, counts) in self.row.chunks_mut(LANES).zip(self.counts.chunks(LANES)) {
            if counts.iter().fold(0, |any, &count| any | count) == 0 {
                continue;
            }
            for (logit, &count) in logits.iter_mut().zip(counts) {
                if count == 0 {
                    continue;
                }
                let output = count & (PROMPT - 1);
                let repeated =
                    if *logit > 0.0 { *logit / self.repetition } else { *logit * self.repetition };
                *logit = repeated - output as f32 * self.frequency;
                if output > 0 {
                    *logit -= self.presence;
                }
            }
        }
    }
}
