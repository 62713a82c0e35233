//! Gumbel noise as a hash of (seed, sample index, position, token): the same for any batch, order or machine.
#![allow(clippy::inline_always, reason = "must inline into a target_feature caller")]

/// The finalizer of `MurmurHash3`.
#[inline(always)]
const fn mix(mut h: u32) -> u32 {
    h ^= h >> 16;
    h = h.wrapping_mul(0x85eb_ca6b);
    h ^= h >> 13;
    h = h.wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

/// The noise of one place in one answer.
#[derive(Clone, Copy)]
pub(super) struct Noise {
    keys: [u32; 2],
}

impl Noise {
    pub(super) fn new(seed: [u32; 2], sample_index: u32, position: u32) -> Self {
        let absorb = |start: u32| {
            [seed[0], seed[1], sample_index, position]
                .iter()
                .fold(start, |key, word| mix(key ^ word).wrapping_mul(5).wrapping_add(0xe654_6b64))
        };
        Self { keys: [absorb(0x243f_6a88), absorb(0x85a3_08d3)] }
    }

    /// 32 random bits of a token.
    #[inline(always)]
    pub(super) fn bits(self, token: u32) -> u32 {
        mix(mix(token ^ self.keys[0]).wrapping_add(self.keys[1]))
    }

    /// The noise of a token.
    pub(super) fn gumbel(self, token: u32) -> f32 {
        let uniform = (f64::from(self.bits(token)) + 0.5) / f64::from(2.0f32).powi(32);
        (-(-uniform.ln()).ln()) as f32
    }
}

/// At least the noise that comes of some bits, without a logarithm.
///
/// -ln(-ln(u)) <= -ln(1 - u), and a float's own bits, read as a whole number, are a lower bound of its log2.
#[inline(always)]
pub(super) fn bound(bits: u32) -> f32 {
    let rest = (!bits as f32).max(0.5);
    let log2 = rest.to_bits() as f32 * (1.0 / 8_388_608.0) - 127.0;
    (32.0 - log2) * std::f32::consts::LN_2 + 1e-3
}

/// At least every token's noise.
pub(super) const LARGEST: f32 = 22.9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_above_the_noise_and_near_it() {
        let noise = Noise::new([1, 2], 3, 4);
        for token in 0..200_000 {
            let (bound, gumbel) = (bound(noise.bits(token)), noise.gumbel(token));
            assert!(bound >= gumbel && gumbel < LARGEST, "{token}: {bound} {gumbel}");
        }
        assert!(bound(u32::MAX) <= LARGEST + 0.1 && bound(u32::MAX) >= 22.87);
    }
}
