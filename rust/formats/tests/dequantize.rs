//! Every supported block type against its definition, element by element.

use half::{bf16, f16};
use octavo_formats::{DequantizeError, Kind, dequantize_row};
use proptest::prelude::*;

const SUPPORTED: [Kind; 11] = [
    Kind::F32,
    Kind::F16,
    Kind::BF16,
    Kind::Q8_0,
    Kind::Q4_0,
    Kind::Q4_1,
    Kind::Q5_0,
    Kind::Q5_1,
    Kind::Q4_K,
    Kind::Q5_K,
    Kind::Q6_K,
];

fn half(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// The 6-bit scale and shift of run `j` in the 12 bytes `s`.
fn scale_and_shift(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4)
    }
}

/// Element `k` of block `b`, by the formula of its type.
fn element(kind: Kind, b: &[u8], k: usize) -> f32 {
    let nibble = |at: usize| b[at + k % 16] >> (4 * (k / 16)) & 15;
    let fifth = |at: usize| (b[at + k / 8] >> (k % 8) & 1) << 4;
    match kind {
        Kind::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        Kind::F16 => half(b, 0),
        Kind::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        Kind::Q8_0 => half(b, 0) * f32::from(b[2 + k] as i8),
        Kind::Q4_0 => half(b, 0) * (f32::from(nibble(2)) - 8.0),
        Kind::Q4_1 => half(b, 0) * f32::from(nibble(4)) + half(b, 2),
        Kind::Q5_0 => half(b, 0) * (f32::from(nibble(6) | fifth(2)) - 16.0),
        Kind::Q5_1 => half(b, 0) * f32::from(nibble(8) | fifth(4)) + half(b, 2),
        Kind::Q4_K | Kind::Q5_K => {
            let j = k / 32;
            let (scale, shift) = scale_and_shift(&b[4..16], j);
            let quants = if kind == Kind::Q4_K { 16 } else { 48 };
            let mut q = b[quants + (k / 64) * 32 + k % 32] >> (4 * (j & 1)) & 15;
            if kind == Kind::Q5_K {
                q |= (b[16 + k % 32] >> j & 1) << 4;
            }
            half(b, 0) * f32::from(scale) * f32::from(q) - half(b, 2) * f32::from(shift)
        }
        Kind::Q6_K => {
            let (part, l, run) = (k / 128, k % 32, k % 128 / 32);
            let low = b[64 * part + 32 * (run & 1) + l] >> (4 * (run >> 1)) & 15;
            let high = b[128 + 32 * part + l] >> (2 * run) & 3;
            half(b, 208) * f32::from(b[192 + k / 16] as i8) * (f32::from(low | high << 4) - 32.0)
        }
        _ => unreachable!("not among the supported types"),
    }
}

/// Equal, zeros of either sign and NaNs of any payload included.
#[allow(clippy::float_cmp, reason = "not one bit may differ")]
fn same(a: f32, b: f32) -> bool {
    a == b || a.is_nan() && b.is_nan()
}

proptest! {
    #[test]
    fn every_element_is_what_its_formula_says(kind in proptest::sample::select(&SUPPORTED[..]), bytes in proptest::collection::vec(any::<u8>(), 1024)) {
        let blocks = bytes.len() / kind.block_bytes();
        let row = &bytes[..blocks * kind.block_bytes()];
        let mut values = vec![0.0f32; blocks * kind.block_len()];
        let mut rounded = vec![bf16::ZERO; values.len()];
        dequantize_row(kind, row, &mut values).unwrap();
        dequantize_row(kind, row, &mut rounded).unwrap();
        for (i, (value, rounded)) in values.iter().zip(rounded).enumerate() {
            let (block, k) = (i / kind.block_len(), i % kind.block_len());
            let expected = element(kind, &row[block * kind.block_bytes()..], k);
            prop_assert!(same(*value, expected), "{kind:?} {i}: {value} {expected}");
            prop_assert!(same(rounded.to_f32(), bf16::from_f32(expected).to_f32()));
        }
    }
}

#[test]
fn lengths_that_do_not_fit_and_types_not_known_are_refused() {
    let mut out = [0.0f32; 32];
    assert_eq!(
        dequantize_row(Kind::Q8_0, &[0; 33], &mut out),
        Err(DequantizeError::Lengths { kind: Kind::Q8_0, bytes: 33, elements: 32 })
    );
    assert!(dequantize_row(Kind::Q8_0, &[0; 34], &mut out[..31]).is_err(), "half a block");
    assert_eq!(
        dequantize_row(Kind::MXFP4, &[0; 17], &mut out),
        Err(DequantizeError::Unsupported(Kind::MXFP4))
    );
    for &kind in Kind::ALL {
        assert_eq!(kind.can_dequantize(), SUPPORTED.contains(&kind), "{kind:?}");
    }
}
