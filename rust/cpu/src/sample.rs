//! Sampling: masks, biases, penalties, log probabilities, greedy choice, and draws by Gumbel noise.
//!
//! A row's sample depends on that row, its parameters and its noise alone. The draw is the largest of scaled logit
//! plus noise, so it is one pass without a sum, and the order of the tokens cannot matter.
#![allow(clippy::float_cmp, reason = "ties are exact")]
#![allow(unsafe_code, reason = "its arguments are raw pointers into tensors")]

mod constrain;
mod noise;
mod rows;
mod select;

pub use constrain::Constraints;

use crate::math::dispatch;
use crate::pool::{num_threads, parallel_for};
use crate::shared::Shared;
use constrain::Constrained;
use noise::{Noise, bound};
use rows::{DISTANCES, Draw, FindMaxima, GROUP, Masses, Maxima, Penalize, maxima_len};
use select::{Candidate, at_least, nucleus, sort, top_k};

/// Words of one slot's parameters.
pub const PARAM_WORDS: usize = 16;
/// Temperatures below this choose greedily.
const MIN_TEMPERATURE: f32 = 1e-5;
/// Groups of a row that one thread takes at a time.
const ITEM_GROUPS: usize = 64;

const HAS_PENALTIES: i32 = 1;
const WANTS_LOGPROBS: i32 = 2;

/// What one call of [`sample`] works on.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// float32 [rows, `stride`].
    pub logits: *mut f32,
    /// Logits of a row.
    pub vocab_size: usize,
    /// Floats from one row to the next.
    pub stride: usize,
    /// int32 [slots, 16], as the step plan gives them.
    pub params: *const i32,
    /// Slot of each row.
    pub slots: &'a [i32],
    /// Place of each row's new token in its sequence.
    pub positions: &'a [i32],
    /// int32 [slots, `count_stride`]; may be null when no row has penalties.
    pub counts: *const i32,
    /// Counts of a slot.
    pub count_stride: usize,
    /// int32 [rows].
    pub out_ids: *mut i32,
    /// float32 [rows], for rows that ask.
    pub out_logprobs: *mut f32,
    /// int32 [rows, `max_logprobs`].
    pub out_top_ids: *mut i32,
    /// float32 [rows, `max_logprobs`].
    pub out_top_logprobs: *mut f32,
    /// Most likeliest tokens of a row.
    pub max_logprobs: usize,
    /// What rows may choose of; it comes before all else.
    pub constraints: Constraints<'a>,
}

/// A row's sampling parameters.
#[derive(Clone, Copy)]
struct Params {
    temperature: f32,
    top_p: f32,
    min_p: f32,
    repetition: f32,
    presence: f32,
    frequency: f32,
    top_k: usize,
    seed: [u32; 2],
    sample_index: u32,
    flags: i32,
    num_logprobs: usize,
}

impl Params {
    fn new(words: &[i32]) -> Self {
        let float = |i: usize| f32::from_bits(words[i] as u32);
        Self {
            temperature: float(0),
            top_p: float(1),
            min_p: float(2),
            repetition: float(3),
            presence: float(4),
            frequency: float(5),
            top_k: usize::try_from(words[6]).unwrap_or(0),
            seed: [words[7] as u32, words[8] as u32],
            sample_index: words[9] as u32,
            flags: words[10],
            num_logprobs: usize::try_from(words[11]).unwrap_or(0),
        }
    }

    fn has(&self, flag: i32) -> bool {
        self.flags & flag != 0
    }
}

impl Sample<'_> {
    /// SAFETY: the pointers are valid and no other thread has the part.
    #[allow(clippy::mut_from_ref, reason = "rows are handed out once")]
    unsafe fn row(&self, row: usize) -> &mut [f32] {
        // SAFETY: the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(self.logits.add(row * self.stride), self.vocab_size)
        }
    }

    /// SAFETY: the pointers are valid.
    unsafe fn params(&self, row: usize) -> Params {
        let start = self.slots[row] as usize * PARAM_WORDS;
        // SAFETY: the caller's promise.
        Params::new(unsafe { std::slice::from_raw_parts(self.params.add(start), PARAM_WORDS) })
    }
}

/// Sample every row; its logits are changed where masks, biases and penalties apply.
///
/// # Safety
/// The pointers are valid for what the fields say, and nothing else touches the memory meanwhile.
pub unsafe fn sample(call: &Sample<'_>) {
    let rows = call.slots.len();
    let maxima_len = maxima_len(call.vocab_size);
    let constrained = Constrained::new(&call.constraints, rows);
    // SAFETY: pointers by the caller's promise; each row is read or changed by one item at a time.
    unsafe {
        // Rows that want the log probabilities of what penalties are about to change.
        let mut raw: Vec<Option<Vec<f32>>> = (0..rows)
            .map(|row| {
                let params = call.params(row);
                (params.has(HAS_PENALTIES) && params.has(WANTS_LOGPROBS))
                    .then(|| vec![0.0; call.vocab_size])
            })
            .collect();
        let raw_rows: Vec<Option<*mut f32>> =
            raw.iter_mut().map(|row| row.as_mut().map(Vec::as_mut_ptr)).collect();
        let mut maxima = vec![0.0f32; rows * maxima_len];
        let shared = Shared::new((*call, maxima.as_mut_ptr(), raw_rows));
        let groups = call.vocab_size.div_ceil(GROUP);
        // Few rows are cut, so that every thread has work.
        let item_groups = if rows < 2 * num_threads() { ITEM_GROUPS } else { groups };
        let parts = groups.div_ceil(item_groups);
        parallel_for(rows * parts, &|item| {
            let (call, maxima, raw_rows) = shared.get();
            let (row, first) = (item / parts, item % parts * item_groups);
            let end = groups.min(first + item_groups);
            let out = std::slice::from_raw_parts_mut(
                maxima.add(row * maxima_len + first * 16),
                (end - first) * 16,
            );
            let tokens = first * GROUP..call.vocab_size.min(end * GROUP);
            let part = std::slice::from_raw_parts_mut(
                call.logits.add(row * call.stride + tokens.start),
                tokens.len(),
            );
            constrained.apply(row, tokens.start, part);
            if let Some(raw) = raw_rows[row] {
                raw.add(tokens.start).copy_from_nonoverlapping(part.as_ptr(), part.len());
            }
            prepare(call, row, part, tokens.start, out);
        });
        parallel_for(rows, &|row| {
            let (call, maxima, _) = shared.get();
            let maxima = std::slice::from_raw_parts(maxima.add(row * maxima_len), maxima_len);
            sample_row(call, row, Maxima::new(maxima), raw[row].as_deref());
        });
    }
}

/// Penalties on a part of a row, then its maxima. SAFETY: as in [`sample`].
unsafe fn prepare(call: &Sample<'_>, row: usize, part: &mut [f32], start: usize, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    let params = unsafe { call.params(row) };
    if params.has(HAS_PENALTIES) && !call.counts.is_null() {
        // SAFETY: the slot's counts, as many as logits.
        let counts = unsafe {
            let slot = call.slots[row] as usize;
            std::slice::from_raw_parts(
                call.counts.add(slot * call.count_stride + start),
                part.len(),
            )
        };
        dispatch(Penalize {
            row: part,
            counts,
            repetition: params.repetition,
            presence: params.presence,
            frequency: params.frequency,
        });
    }
    dispatch(FindMaxima { row: part, out });
}

/// Choose a row's token and write what it asks for. SAFETY: as in [`sample`].
unsafe fn sample_row(call: &Sample<'_>, row: usize, maxima: Maxima<'_>, raw: Option<&[f32]>) {
    // SAFETY: the caller's promise.
    unsafe {
        let params = call.params(row);
        let logits: &[f32] = call.row(row);
        let token = choose(logits, maxima, &params, call.positions[row] as u32);
        *call.out_ids.add(row) = token as i32;
        if params.has(WANTS_LOGPROBS) {
            let count = params.num_logprobs.min(call.max_logprobs);
            let start = row * call.max_logprobs;
            let ids = std::slice::from_raw_parts_mut(call.out_top_ids.add(start), count);
            let top = std::slice::from_raw_parts_mut(call.out_top_logprobs.add(start), count);
            let logprob = &mut *call.out_logprobs.add(row);
            if let Some(raw) = raw {
                let mut lanes = vec![0.0; maxima_len(raw.len())];
                dispatch(FindMaxima { row: raw, out: &mut lanes });
                *logprob = write_logprobs(raw, Maxima::new(&lanes), token, ids, top);
            } else {
                *logprob = write_logprobs(logits, maxima, token, ids, top);
            }
        }
    }
}

/// The largest logit and its lowest token; NaN never wins, token 0 where all are NaN.
fn argmax(row: &[f32], maxima: Maxima<'_>) -> (f32, u32) {
    let maximum = maxima.lanes().iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let group = maxima.groups().position(|lanes| lanes.contains(&maximum)).unwrap_or(0);
    // A row of nothing above -inf has no maxima to go by.
    let start = if maximum == f32::NEG_INFINITY { 0 } else { group * GROUP };
    let token = row[start..].iter().position(|&x| x == maximum).unwrap_or(0);
    (maximum, (start + token) as u32)
}

/// The row's token.
fn choose(row: &[f32], maxima: Maxima<'_>, params: &Params, position: u32) -> u32 {
    let (maximum, likeliest) = argmax(row, maxima);
    let temperature = params.temperature;
    if temperature.is_nan() || temperature < MIN_TEMPERATURE || !maximum.is_finite() {
        return likeliest;
    }
    let noise = Noise::new(params.seed, params.sample_index, position);
    let scaled = |logit: f32| (logit - maximum) / temperature;
    let lowest =
        if params.min_p > 0.0 { f64::from(params.min_p).ln() as f32 } else { f32::NEG_INFINITY };
    let weight = |logit: f32| f64::from(scaled(logit)).exp();
    let mut candidates = Vec::new();
    let limits_p = params.top_p < 1.0;
    if params.top_k > 0 && params.top_k < row.len() {
        top_k(row, maxima, params.top_k, &mut candidates);
        if limits_p {
            sort(&mut candidates);
            let mass: f64 = candidates.iter().map(|c| weight(c.logit)).sum();
            nucleus(&mut candidates, mass * f64::from(params.top_p), weight);
        }
    } else if limits_p {
        let masses = dispatch(Masses { row, maximum, temperature });
        let mass = masses[4] * f64::from(params.top_p);
        // The nearest distance that surely holds the nucleus.
        let enough = masses.iter().position(|&within| within * (1.0 - 1e-6) >= mass).unwrap_or(4);
        let bound = if DISTANCES[enough].is_finite() {
            // A little lower, so that rounding leaves none out.
            maximum - DISTANCES[enough] * temperature * 1.000_01 - maximum.abs() * 1e-6
        } else {
            f32::NEG_INFINITY
        };
        at_least(row, maxima, bound, &mut candidates);
        nucleus(&mut candidates, mass, weight);
    } else {
        return dispatch(Draw { row, maxima, maximum, likeliest, temperature, lowest, noise });
    }
    draw(&candidates, likeliest, noise, |logit| {
        let z = scaled(logit);
        (z >= lowest).then_some(z)
    })
}

/// The candidate with the largest scaled logit plus noise, the lowest token at ties.
fn draw(
    candidates: &[Candidate],
    likeliest: u32,
    noise: Noise,
    scaled: impl Fn(f32) -> Option<f32>,
) -> u32 {
    let mut best = (noise.gumbel(likeliest), likeliest);
    for candidate in candidates {
        let Some(z) = scaled(candidate.logit) else { continue };
        let token = candidate.token;
        if z + bound(noise.bits(token)) < best.0 {
            continue;
        }
        let score = z + noise.gumbel(token);
        if score > best.0 || (score == best.0 && token < best.1) {
            best = (score, token);
        }
    }
    best.1
}

/// Log probabilities of the likeliest tokens; returns the chosen one's.
fn write_logprobs(
    row: &[f32],
    maxima: Maxima<'_>,
    token: u32,
    ids: &mut [i32],
    logprobs: &mut [f32],
) -> f32 {
    let (maximum, _) = argmax(row, maxima);
    let mass = dispatch(Masses { row, maximum, temperature: 1.0 })[4];
    let total = f64::from(maximum) + mass.ln();
    let logprob = |logit: f32| (f64::from(logit) - total) as f32;
    ids.fill(-1);
    logprobs.fill(f32::NEG_INFINITY);
    if !ids.is_empty() {
        let mut likeliest = Vec::new();
        top_k(row, maxima, ids.len().min(row.len()), &mut likeliest);
        sort(&mut likeliest);
        for ((id, value), candidate) in ids.iter_mut().zip(logprobs).zip(likeliest) {
            *id = candidate.token as i32;
            *value = logprob(candidate.logit);
        }
    }
    logprob(row[token as usize])
}
