//! Rows constrained to some tokens, and single logits that are changed.
#![allow(clippy::inline_always, reason = "generic code must inline into its target_feature caller")]

use crate::math::{Lanes, Op, dispatch};

/// Tokens of a word of a mask.
const WORD: usize = 32;

/// What rows of a step may choose of. Rows are counted among all logits of the step, of which a call has a part.
#[derive(Clone, Copy, Debug, Default)]
pub struct Constraints<'a> {
    /// The call's first row.
    pub first: usize,
    /// Row of each mask, none twice.
    pub mask_logits: &'a [i32],
    /// int32 [masks, `mask_words`]: bit t % 32 of word t / 32 is set where token t is allowed.
    pub masks: &'a [i32],
    /// Words of a mask; at least one for every 32 logits of a row.
    pub mask_words: usize,
    /// Row of each bias; no row and token twice.
    pub bias_logits: &'a [i32],
    /// Token of each bias.
    pub bias_tokens: &'a [i32],
    /// What is added to its logit; -inf makes the token impossible.
    pub bias_values: &'a [f32],
}

/// A change of one logit.
#[derive(Clone, Copy)]
struct Bias {
    row: usize,
    token: usize,
    value: f32,
}

/// What the rows of one call may choose of, found by row.
pub(super) struct Constrained<'a> {
    /// By row; empty where no row has one.
    masks: Vec<Option<&'a [i32]>>,
    /// By row, then token.
    biases: Vec<Bias>,
}

impl<'a> Constrained<'a> {
    pub(super) fn new(step: &Constraints<'a>, rows: usize) -> Self {
        let row_of =
            |row: i32| usize::try_from(row).ok()?.checked_sub(step.first).filter(|&row| row < rows);
        let mut masks = Vec::new();
        for (index, &row) in step.mask_logits.iter().enumerate() {
            if let Some(row) = row_of(row) {
                masks.resize(rows, None);
                masks[row] = Some(&step.masks[index * step.mask_words..][..step.mask_words]);
            }
        }
        let given = step.bias_logits.iter().zip(step.bias_tokens).zip(step.bias_values);
        let mut biases: Vec<Bias> = given
            .filter_map(|((&row, &token), &value)| {
                Some(Bias { row: row_of(row)?, token: usize::try_from(token).ok()?, value })
            })
            .collect();
        biases.sort_unstable_by_key(|bias| (bias.row, bias.token));
        Self { masks, biases }
    }

    /// Changes the logits of a row's tokens from `start` on, a multiple of 32.
    pub(super) fn apply(&self, row: usize, start: usize, logits: &mut [f32]) {
        if let Some(Some(words)) = self.masks.get(row) {
            dispatch(Mask { logits, words: &words[start / WORD..] });
        }
        let first = self.biases.partition_point(|bias| (bias.row, bias.token) < (row, start));
        for bias in &self.biases[first..] {
            if bias.row != row || bias.token >= start + logits.len() {
                break;
            }
            let logit = &mut logits[bias.token - start];
            // Not by a sum, which infinity would not give in to.
            let banned = bias.value == f32::NEG_INFINITY;
            *logit = if banned { bias.value } else { *logit + bias.value };
        }
    }
}

/// -inf for every logit whose bit is not set.
struct Mask<'a> {
    logits: &'a mut [f32],
    words: &'a [i32],
}

impl Op for Mask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        for (logits, &word) in self.logits.chunks_mut(WORD).zip(self.words) {
            match word {
                -1 => {}
                0 => logits.fill(f32::NEG_INFINITY),
                _ => keep(logits, word),
            }
        }
    }
}

/// One word of [`Mask`].
#[inline(always)]
fn keep(logits: &mut [f32], word: i32) {
    let kept =
        |logit: f32, bit: usize| if word & 1 << bit == 0 { f32::NEG_INFINITY } else { logit };
    // Of a whole word's length the compiler makes vectors.
    if let Ok(whole) = <&mut [f32; WORD]>::try_from(&mut *logits) {
        for (bit, logit) in whole.iter_mut().enumerate() {
            *logit = kept(*logit, bit);
        }
    } else {
        for (bit, logit) in logits.iter_mut().enumerate() {
            *logit = kept(*logit, bit);
        }
    }
}
