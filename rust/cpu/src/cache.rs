//! The KV cache's layout, and the step that fills it: per-head norms, rotary positions, keys and values to their
//! slots.
//!
//! A layer's cache is [blocks, 2, KV heads, block size, head dimension]. Within the tile of one (block, key or
//! value, head) the order serves the attention kernels' vectors: in 32-bit words, keys are [dimensions, positions]
//! and values [positions, dimensions]; a word of bf16 holds two neighbouring dimensions of a key, or two
//! neighbouring positions of a value.
#![allow(unsafe_code, reason = "its arguments are raw pointers into tensors")]
#![allow(clippy::cast_ptr_alignment, reason = "alignment is checked where the pointers come in")]
#![allow(clippy::inline_always, reason = "generic code must inline into its target_feature caller")]

use std::marker::PhantomData;

use crate::math::{Bf16, Dtype, Element, F32, LANES, Lanes, Op, dispatch};
use crate::norm::scale_of;
use crate::pool::{num_threads, parallel_for};
use crate::shared::Shared;

/// Largest head dimension of the kernels.
pub const MAX_HEAD_DIM: usize = 256;
/// Tokens that one thread takes at a time: at most, and at least where there are as many.
const ITEM_TOKENS: [usize; 2] = [64, 8];

/// The shape of one layer's cache; the number of blocks is the caller's.
#[derive(Clone, Copy, Debug)]
pub struct CacheShape {
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Dimensions of a head, a multiple of 16 up to [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Positions of a block, a multiple of 16.
    pub block_size: usize,
}

/// First element of the tile of a block's keys (side 0) or values (side 1) of one head.
pub(crate) fn tile_offset(shape: &CacheShape, block: usize, side: usize, head: usize) -> usize {
    ((block * 2 + side) * shape.num_kv_heads + head) * shape.block_size * shape.head_dim
}

/// What one call of [`rope_and_cache`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RopeAndCache<'a> {
    /// Element type of `qkv` and `kv_cache`.
    pub dtype: Dtype,
    /// [tokens, `(num_heads + 2 * num_kv_heads) * head_dim`].
    pub qkv: *mut u8,
    /// One layer's cache.
    pub kv_cache: *mut u8,
    /// The cache's shape.
    pub shape: CacheShape,
    /// Position of each token, below the rows of `cos_sin`.
    pub positions: &'a [i32],
    /// Slot of each token: block * block size + offset; below 0: none.
    pub slot_mapping: &'a [i32],
    /// float32 [positions, `rotary_dim`]: cosines, then sines.
    pub cos_sin: *const f32,
    /// Query heads.
    pub num_heads: usize,
    /// Dimensions that turn, even; the rest stay.
    pub rotary_dim: usize,
    /// Weights of the queries' norm, one a dimension.
    pub q_norm: Option<&'a [f32]>,
    /// Weights of the keys' norm.
    pub k_norm: Option<&'a [f32]>,
    /// Added to the mean square.
    pub eps: f32,
}

impl RopeAndCache<'_> {
    /// The first token from `token` on that does not continue the block of the one before it: no two threads then
    /// write to one block of a prompt.
    fn cut(&self, token: usize) -> usize {
        let slots = self.slot_mapping;
        let continues = |&token: &usize| {
            let slot = slots[token] as usize;
            token > 0
                && slots[token] == slots[token - 1] + 1
                && !slot.is_multiple_of(self.shape.block_size)
        };
        (token..slots.len()).find(|token| !continues(token)).unwrap_or(slots.len())
    }
}

/// Norm and turn queries and keys, the queries in place, and put keys and values into their slots.
///
/// # Safety
/// The pointers are valid for what the fields say; positions lie in the table, slots in the cache, no slot twice.
pub unsafe fn rope_and_cache(step: &RopeAndCache<'_>) {
    let tokens = step.positions.len();
    let [most, least] = ITEM_TOKENS;
    let item_tokens = tokens.div_ceil(4 * num_threads()).clamp(least, most);
    let shared = Shared::new(*step);
    parallel_for(tokens.div_ceil(item_tokens), &|item| {
        let step = shared.get();
        let first = step.cut(item * item_tokens);
        let end = step.cut((item + 1) * item_tokens);
        match step.dtype {
            Dtype::Bf16 => dispatch(Tokens::<Bf16> { step, first, end, element: PhantomData }),
            Dtype::F32 => dispatch(Tokens::<F32> { step, first, end, element: PhantomData }),
        }
    });
}

/// A range of tokens.
struct Tokens<'a, E> {
    step: &'a RopeAndCache<'a>,
    first: usize,
    end: usize,
    element: PhantomData<E>,
}

/// One head's values, widened.
type Head = [f32; MAX_HEAD_DIM];

impl<E: Element> Op for Tokens<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let step = self.step;
        let (heads, kv_heads) = (step.num_heads, step.shape.num_kv_heads);
        let head_dim = step.shape.head_dim;
        let mut buffer: Head = [0.0; MAX_HEAD_DIM];
        for token in self.first..self.end {
            if token + 1 < self.end {
                prefetch_slot::<L, E>(l, step, token + 1);
            }
            let slot = usize::try_from(step.slot_mapping[token]).ok();
            // SAFETY: rows of qkv and of the table, slots of the cache, by the caller's promise.
            unsafe {
                let row = step.qkv.cast::<E::Raw>().add(token * (heads + 2 * kv_heads) * head_dim);
                let angles = std::slice::from_raw_parts(
                    step.cos_sin.add(step.positions[token] as usize * step.rotary_dim),
                    step.rotary_dim,
                );
                let (cos, sin) = angles.split_at(step.rotary_dim / 2);
                for head in 0..heads {
                    let head = row.add(head * head_dim);
                    load_turned::<L, E>(l, step, head, step.q_norm, cos, sin, &mut buffer);
                    for d in (0..head_dim).step_by(LANES) {
                        E::store(l, head.add(d), l.load(buffer.as_ptr().add(d)));
                    }
                }
                let Some(slot) = slot else { continue };
                for head in 0..kv_heads {
                    let key = row.add((heads + head) * head_dim);
                    load_turned::<L, E>(l, step, key, step.k_norm, cos, sin, &mut buffer);
                    store_key::<L, E>(l, step, slot, head, &buffer);
                    store_value::<E>(
                        step,
                        slot,
                        head,
                        row.add((heads + kv_heads + head) * head_dim),
                    );
                }
            }
        }
    }
}

/// Ask for the cache's lines that a token's keys and values go to: a key has one a word, and stores that wait for
/// memory fill the store queue. A token that follows its neighbour finds them there.
#[inline(always)]
fn prefetch_slot<L: Lanes, E: Element>(l: L, step: &RopeAndCache<'_>, token: usize) {
    let shape = &step.shape;
    let Ok(slot) = usize::try_from(step.slot_mapping[token]) else { return };
    if token > 0 && step.slot_mapping[token - 1] + 1 == step.slot_mapping[token] {
        return;
    }
    let (block, position) = (slot / shape.block_size, slot % shape.block_size);
    let cache = step.kv_cache.cast::<u32>().cast_const();
    for head in 0..shape.num_kv_heads {
        let keys = tile_offset(shape, block, 0, head) / E::PER_WORD + position;
        for word in 0..shape.head_dim / E::PER_WORD {
            l.prefetch(cache.wrapping_add(keys + word * shape.block_size));
        }
        let values = tile_offset(shape, block, 1, head) / E::PER_WORD;
        let row = values + position / E::PER_WORD * shape.head_dim;
        for word in (0..shape.head_dim).step_by(LANES) {
            l.prefetch(cache.wrapping_add(row + word));
        }
    }
}

/// A head of queries or keys, normed and turned.
#[inline(always)]
unsafe fn load_turned<L: Lanes, E: Element>(
    l: L,
    step: &RopeAndCache<'_>,
    source: *const E::Raw,
    norm: Option<&[f32]>,
    cos: &[f32],
    sin: &[f32],
    buffer: &mut Head,
) {
    let head_dim = step.shape.head_dim;
    // SAFETY: `head_dim` elements; the norm has as many weights.
    unsafe {
        let scale = norm.map(|_| l.splat(scale_of::<L, E>(l, source, head_dim, step.eps)));
        for d in (0..head_dim).step_by(LANES) {
            let mut x = E::load(l, source.add(d));
            if let (Some(weight), Some(scale)) = (norm, scale) {
                let normed = E::round(l, l.mul(x, scale));
                x = E::round(l, l.mul(normed, l.load(weight.as_ptr().add(d))));
            }
            l.store(buffer.as_mut_ptr().add(d), x);
        }
    }
    let (low, high) = buffer.split_at_mut(cos.len());
    for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// A key into its column of the tile.
#[inline(always)]
unsafe fn store_key<L: Lanes, E: Element>(
    l: L,
    step: &RopeAndCache<'_>,
    slot: usize,
    head: usize,
    key: &Head,
) {
    let shape = &step.shape;
    let (block, position) = (slot / shape.block_size, slot % shape.block_size);
    // SAFETY: the slot lies in the cache.
    unsafe {
        let tile =
            step.kv_cache.cast::<f32>().add(tile_offset(shape, block, 0, head) / E::PER_WORD);
        let mut word = 0;
        for d in (0..shape.head_dim).step_by(LANES * E::PER_WORD) {
            let first = l.load(key.as_ptr().add(d));
            let words = if E::PER_WORD == 2 {
                // A head of an odd number of vectors ends with zeros that are not stored.
                let second = if d + LANES < shape.head_dim {
                    l.load(key.as_ptr().add(d + LANES))
                } else {
                    l.splat(0.0)
                };
                l.pack_bf16(first, second)
            } else {
                first
            };
            let count = LANES.min(shape.head_dim / E::PER_WORD - word);
            for (i, value) in l.to_array(words).into_iter().take(count).enumerate() {
                *tile.add((word + i) * shape.block_size + position) = value;
            }
            word += count;
        }
    }
}

/// A value into its row of the tile, as it is.
#[inline(always)]
unsafe fn store_value<E: Element>(
    step: &RopeAndCache<'_>,
    slot: usize,
    head: usize,
    value: *const E::Raw,
) {
    let shape = &step.shape;
    let (block, position) = (slot / shape.block_size, slot % shape.block_size);
    // SAFETY: the slot lies in the cache.
    unsafe {
        let tile = step.kv_cache.cast::<E::Raw>().add(tile_offset(shape, block, 1, head));
        let row = tile
            .add(position / E::PER_WORD * E::PER_WORD * shape.head_dim + position % E::PER_WORD);
        for d in 0..shape.head_dim {
            *row.add(d * E::PER_WORD) = *value.add(d);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null, null_mut};

    #[test]
    fn cuts_fall_between_the_blocks_of_a_prompt_and_anywhere_else() {
        // Three decode rows, a prompt from the middle of block 4 on, tokens without a slot.
        let slots =
            [&[5, 33, 50], &[70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81][..], &[-1, -1]];
        let slots = slots.concat();
        let step = RopeAndCache {
            dtype: Dtype::F32,
            qkv: null_mut(),
            kv_cache: null_mut(),
            shape: CacheShape { num_kv_heads: 1, head_dim: 16, block_size: 16 },
            positions: &slots,
            slot_mapping: &slots,
            cos_sin: null(),
            num_heads: 1,
            rotary_dim: 16,
            q_norm: None,
            k_norm: None,
            eps: 0.0,
        };
        let cuts: Vec<_> = (0..=18).map(|token| step.cut(token)).collect();
        assert_eq!(cuts, [0, 1, 2, 3, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 15, 15, 16, 17, 17]);
    }
}
