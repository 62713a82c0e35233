//! One block of each type. Numbers are little-endian; `d` scales, `m` shifts.

use super::numbers::f16_to_f32;

/// The half-precision number at `at`.
#[inline]
fn half_at(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Bytes from `at`, their number known to the compiler.
#[inline]
fn bytes_at<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&block[at..at + N]);
    bytes
}

/// `d` f16, 16 bytes: low nibbles are elements 0 to 15, high nibbles 16 to 31.
#[inline]
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let quants: [u8; 16] = bytes_at(block, 2);
    for i in 0..16 {
        out[i] = d * f32::from((quants[i] & 15) as i8 - 8);
        out[i + 16] = d * f32::from((quants[i] >> 4) as i8 - 8);
    }
}

/// `d`, `m` f16, 16 bytes of nibbles as in `q4_0`.
#[inline]
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let quants: [u8; 16] = bytes_at(block, 4);
    for i in 0..16 {
        out[i] = d * f32::from(quants[i] & 15) + m;
        out[i + 16] = d * f32::from(quants[i] >> 4) + m;
    }
}

/// 32 elements of five bits: u32 of fifth bits, 16 bytes of nibbles as in `q4_0`.
#[inline]
fn five_bits(bits: [u8; 4], quants: [u8; 16]) -> [u8; 32] {
    let bits = u32::from_le_bytes(bits);
    let mut out = [0; 32];
    for i in 0..16 {
        out[i] = quants[i] & 15;
        out[i + 16] = quants[i] >> 4;
    }
    // Eight fifth bits at once: the product repeats the byte's lower seven bits every 7 bits, so that bit `i` of one of
    // them is at bit `8 * i`; the eighth bit goes its own way.
    for (run, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let byte = u64::from((bits >> (8 * run)) & 0xff);
        let spread = (byte & 0x7f).wrapping_mul(0x0000_0408_1020_4081) & 0x0001_0101_0101_0101
            | (byte >> 7) << 56;
        *out = (u64::from_le_bytes(*out) | spread << 4).to_le_bytes();
    }
    out
}

/// `d` f16, then as `five_bits`.
#[inline]
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let quants = five_bits(bytes_at(block, 2), bytes_at(block, 6));
    for i in 0..32 {
        out[i] = d * f32::from(quants[i] as i8 - 16);
    }
}

/// `d`, `m` f16, then as `five_bits`.
#[inline]
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let quants = five_bits(bytes_at(block, 4), bytes_at(block, 8));
    for i in 0..32 {
        out[i] = d * f32::from(quants[i]) + m;
    }
}

/// `d` f16, 32 signed bytes.
#[inline]
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let quants: [u8; 32] = bytes_at(block, 2);
    for i in 0..32 {
        out[i] = d * f32::from(quants[i] as i8);
    }
}

/// Scale and shift of the eight runs of 32 elements in `q4_k` and `q5_k`: 6 bits each, the upper two of the last four
/// runs beside the first four.
#[inline]
fn scales_and_shifts(block: &[u8]) -> [(f32, f32); 8] {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let packed: [u8; 12] = bytes_at(block, 4);
    std::array::from_fn(|run| {
        let (scale, shift) = match run {
            0..4 => (packed[run] & 63, packed[run + 4] & 63),
            _ => (
                packed[run + 4] & 15 | (packed[run - 4] >> 6) << 4,
                packed[run + 4] >> 4 | (packed[run] >> 6) << 4,
            ),
        };
        (d * f32::from(scale), m * f32::from(shift))
    })
}

/// `d`, `m` f16, 12 bytes of scales, 4 times 32 bytes: low nibbles are one run of 32, high nibbles the next.
#[inline]
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let scales = scales_and_shifts(block);
    for (pair, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let quants: [u8; 32] = bytes_at(block, 16 + 32 * pair);
        let [(d0, m0), (d1, m1)] = [scales[2 * pair], scales[2 * pair + 1]];
        for i in 0..32 {
            out[i] = d0 * f32::from(quants[i] & 15) - m0;
            out[i + 32] = d1 * f32::from(quants[i] >> 4) - m1;
        }
    }
}

/// As `q4_k`, with 32 bytes of fifth bits between: bit `run` of byte `i` belongs to element `i` of that run.
#[inline]
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let scales = scales_and_shifts(block);
    let high: [u8; 32] = bytes_at(block, 16);
    for (pair, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let quants: [u8; 32] = bytes_at(block, 48 + 32 * pair);
        let [(d0, m0), (d1, m1)] = [scales[2 * pair], scales[2 * pair + 1]];
        for i in 0..32 {
            let bits = high[i] >> (2 * pair);
            out[i] = d0 * f32::from(quants[i] & 15 | (bits & 1) << 4) - m0;
            out[i + 32] = d1 * f32::from(quants[i] >> 4 | (bits & 2) << 3) - m1;
        }
    }
}

/// 128 bytes of low nibbles, 64 of upper bit pairs, 16 signed scales of 16 elements, `d` f16; each half of 128
/// elements is four runs of 32 that share their bytes.
#[inline]
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    let scales: [u8; 16] = bytes_at(block, 192);
    let scales = scales.map(|scale| d * f32::from(scale as i8));
    for (half, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let low: [u8; 64] = bytes_at(block, 64 * half);
        let high: [u8; 32] = bytes_at(block, 128 + 32 * half);
        for part in 0..2 {
            let scale: [f32; 4] = std::array::from_fn(|run| scales[8 * half + 2 * run + part]);
            for i in 16 * part..16 * part + 16 {
                let quants = [
                    low[i] & 15 | (high[i] & 3) << 4,
                    low[i + 32] & 15 | (high[i] >> 2 & 3) << 4,
                    low[i] >> 4 | (high[i] >> 4 & 3) << 4,
                    low[i + 32] >> 4 | (high[i] >> 6) << 4,
                ];
                for run in 0..4 {
                    out[32 * run + i] = scale[run] * f32::from(quants[run] as i8 - 32);
                }
            }
        }
    }
}
