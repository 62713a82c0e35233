//! RMS norm, with the residual sum before it.
#![allow(unsafe_code, reason = "its arguments are raw pointers into tensors")]
#![allow(clippy::inline_always, reason = "generic code must inline into its target_feature caller")]

use std::marker::PhantomData;

use crate::math::{Bf16, Dtype, Element, F32, LANES, Lanes, Op, dispatch, load_part, store_part};
use crate::pool::parallel_for;
use crate::shared::Shared;

/// Elements that one thread takes at a time.
const ITEM_ELEMENTS: usize = 8192;

/// What one call of [`rms_norm`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// Element type of all but the weight.
    pub dtype: Dtype,
    /// [rows, n].
    pub x: *const u8,
    /// float32[n].
    pub weight: *const f32,
    /// [rows, n]; may be `x`.
    pub out: *mut u8,
    /// [rows, n], or null.
    pub residual: *mut u8,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub n: usize,
    /// Added to the mean square.
    pub eps: f32,
}

/// out = `rms_norm(x)` * weight; with a residual: residual += x first, and the sum is normed.
///
/// float32 inside, rounded where Llama of transformers rounds: the sum, the normed value, the product.
///
/// # Safety
/// The pointers are valid for what the fields say.
pub unsafe fn rms_norm(norm: &RmsNorm) {
    let shared = Shared::new(*norm);
    let item_rows = (ITEM_ELEMENTS / norm.n.max(1)).max(1);
    parallel_for(norm.rows.div_ceil(item_rows), &|item| {
        let norm = shared.get();
        let first = item * item_rows;
        let end = norm.rows.min(first + item_rows);
        match norm.dtype {
            Dtype::Bf16 => dispatch(Rows::<Bf16> { norm, first, end, element: PhantomData }),
            Dtype::F32 => dispatch(Rows::<F32> { norm, first, end, element: PhantomData }),
        }
    });
}

/// A range of rows.
struct Rows<'a, E> {
    norm: &'a RmsNorm,
    first: usize,
    end: usize,
    element: PhantomData<E>,
}

impl<E: Element> Op for Rows<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let norm = self.norm;
        for row in self.first..self.end {
            // SAFETY: rows of n elements, by the caller's promise.
            unsafe {
                let start = row * norm.n;
                let mut x = norm.x.cast::<E::Raw>().add(start);
                let out = norm.out.cast::<E::Raw>().add(start);
                if !norm.residual.is_null() {
                    let residual = norm.residual.cast::<E::Raw>().add(start);
                    for i in (0..norm.n).step_by(LANES) {
                        let count = LANES.min(norm.n - i);
                        let sum = l.add(
                            load_part::<L, E>(l, residual.add(i), count),
                            load_part::<L, E>(l, x.add(i), count),
                        );
                        store_part::<L, E>(l, residual.add(i), sum, count);
                    }
                    x = residual;
                }
                let scale = l.splat(scale_of::<L, E>(l, x, norm.n, norm.eps));
                for i in (0..norm.n).step_by(LANES) {
                    let count = LANES.min(norm.n - i);
                    let normed = E::round(l, l.mul(load_part::<L, E>(l, x.add(i), count), scale));
                    let weight = load_part::<L, F32>(l, norm.weight.add(i), count);
                    store_part::<L, E>(l, out.add(i), l.mul(normed, weight), count);
                }
            }
        }
    }
}

/// 1 / sqrt(mean of squares + eps): four sums of every fourth vector, folded.
#[inline(always)]
pub(crate) unsafe fn scale_of<L: Lanes, E: Element>(
    l: L,
    x: *const E::Raw,
    n: usize,
    eps: f32,
) -> f32 {
    let mut sums = [l.splat(0.0); 4];
    let mut i = 0;
    // SAFETY: n elements, by the caller's promise.
    unsafe {
        while i + 4 * LANES <= n {
            for (k, sum) in sums.iter_mut().enumerate() {
                let x = E::load(l, x.add(i + k * LANES));
                *sum = l.fma(x, x, *sum);
            }
            i += 4 * LANES;
        }
        while i < n {
            let x = load_part::<L, E>(l, x.add(i), LANES.min(n - i));
            sums[0] = l.fma(x, x, sums[0]);
            i += LANES;
        }
    }
    let sum = l.sum(l.add(l.add(sums[0], sums[1]), l.add(sums[2], sums[3])));
    1.0 / (sum / n as f32 + eps).sqrt()
}
