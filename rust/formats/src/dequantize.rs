//! Blocks of quantized numbers to floats.
//!
//! Each block type is one small function over arrays of known length, without branches, so that the compiler makes
//! vector code of it. Products and sums are rounded one by one, in the order that ggml uses.

mod blocks;
mod numbers;

use half::bf16;

use crate::Kind;
use numbers::{f16_to_f32, round_to_bf16};

/// Why a row could not be dequantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DequantizeError {
    /// The lengths do not fit together.
    #[error("{bytes} bytes of {} are not {elements} elements", kind.name())]
    Lengths {
        /// The type of the row's blocks.
        kind: Kind,
        /// The row's length in bytes.
        bytes: usize,
        /// The elements that were asked for.
        elements: usize,
    },
    /// No dequantization is known for the type.
    #[error("dequantization of {} is not supported; convert the model to Q8_0, Q4_K or another supported type", .0.name())]
    Unsupported(Kind),
}

/// A type that rows are dequantized into: `f32`, or `bf16` rounded to nearest even.
pub trait Element: Copy + sealed::Sealed {
    #[doc(hidden)]
    fn from_f32(value: f32) -> Self;

    #[doc(hidden)]
    fn fill<const N: usize>(out: &mut [Self; N], block: impl FnOnce(&mut [f32; N]));
}

#[allow(clippy::use_self, reason = "the scratch is f32 because values are, not because `Self` is")]
impl Element for f32 {
    #[inline]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline]
    fn fill<const N: usize>(out: &mut [Self; N], block: impl FnOnce(&mut [f32; N])) {
        block(out);
    }
}

impl Element for bf16 {
    #[inline]
    fn from_f32(value: f32) -> Self {
        Self::from_bits(round_to_bf16(value))
    }

    #[inline]
    fn fill<const N: usize>(out: &mut [Self; N], block: impl FnOnce(&mut [f32; N])) {
        let mut values = [0.0; N];
        block(&mut values);
        for (out, value) in out.iter_mut().zip(values) {
            *out = Self::from_f32(value);
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

impl Kind {
    /// True where [`dequantize_row`] knows the type.
    #[must_use]
    pub fn can_dequantize(self) -> bool {
        dequantize_row::<f32>(self, &[], &mut []).is_ok()
    }

    /// Fails unless `bytes` are exactly the blocks of `elements`.
    ///
    /// # Errors
    ///
    /// [`DequantizeError::Lengths`].
    pub fn check_lengths(self, bytes: usize, elements: usize) -> Result<(), DequantizeError> {
        if self.num_bytes(elements as u64, elements as u64) == Some(bytes as u64) {
            return Ok(());
        }
        Err(DequantizeError::Lengths { kind: self, bytes, elements })
    }
}

/// Dequantize whole blocks of one type; `row` holds exactly `out.len()` elements.
///
/// # Errors
///
/// [`DequantizeError`] where the lengths do not fit together or the type is not supported.
pub fn dequantize_row<E: Element>(
    kind: Kind,
    row: &[u8],
    out: &mut [E],
) -> Result<(), DequantizeError> {
    kind.check_lengths(row.len(), out.len())?;
    match kind {
        Kind::F32 => each(row, out, f32::from_le_bytes),
        Kind::F16 => each(row, out, |bytes| f16_to_f32(u16::from_le_bytes(bytes))),
        Kind::BF16 => {
            each(row, out, |bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16));
        }
        Kind::Q4_0 => each_block(row, out, blocks::q4_0),
        Kind::Q4_1 => each_block(row, out, blocks::q4_1),
        Kind::Q5_0 => each_block(row, out, blocks::q5_0),
        Kind::Q5_1 => each_block(row, out, blocks::q5_1),
        Kind::Q8_0 => each_block(row, out, blocks::q8_0),
        Kind::Q4_K => each_block(row, out, blocks::q4_k),
        Kind::Q5_K => each_block(row, out, blocks::q5_k),
        Kind::Q6_K => each_block(row, out, blocks::q6_k),
        _ => return Err(DequantizeError::Unsupported(kind)),
    }
    Ok(())
}

#[inline]
fn each<const BYTES: usize, E: Element>(
    row: &[u8],
    out: &mut [E],
    value: impl Fn([u8; BYTES]) -> f32,
) {
    for (out, bytes) in out.iter_mut().zip(row.as_chunks().0) {
        *out = E::from_f32(value(*bytes));
    }
}

#[inline]
fn each_block<const BYTES: usize, const LEN: usize, E: Element>(
    row: &[u8],
    out: &mut [E],
    block: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (out, bytes) in out.as_chunks_mut().0.iter_mut().zip(row.as_chunks().0) {
        E::fill(out, |values| block(bytes, values));
    }
}
