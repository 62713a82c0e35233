//! Half precision without branches, tables or special instructions, so that whole arrays of it become vector code.

/// The value of a half-precision number; NaNs keep their payload.
#[inline]
pub(super) fn f16_to_f32(bits: u16) -> f32 {
    const REBIAS: u32 = (127 - 15) << 23;
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = bits & 0x7fff;
    let normal = (u32::from(rest) << 13) + REBIAS;
    // The smallest exponent has no hidden bit: the mantissa counts steps of 2^-24.
    let subnormal = (f32::from(rest) * f32::from_bits((127 - 24) << 23)).to_bits();
    let magnitude = match rest {
        ..0x400 => subnormal,
        0x7c00.. => normal + REBIAS,
        _ => normal,
    };
    f32::from_bits(sign | magnitude)
}

/// The nearest bfloat16, ties to even; NaNs stay NaNs.
#[inline]
pub(super) fn round_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_what_the_half_crate_says() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32();
            let value = f16_to_f32(bits);
            assert!(
                value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(),
                "{bits:#x}"
            );
        }
    }

    #[test]
    fn rounding_is_what_the_half_crate_says() {
        // Every upper half, with lower halves on both sides of a tie.
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                assert_eq!(
                    round_to_bf16(value),
                    half::bf16::from_f32(value).to_bits(),
                    "{upper:#x} {lower:#x}"
                );
            }
        }
    }
}
