//! Plain Rust for any processor: no fused products, otherwise the same steps.

use super::{LANES, Lanes, Op};

/// Always there.
#[derive(Clone, Copy)]
pub(super) struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn map2(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    let mut out = a;
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[inline(always)]
fn low(word: f32) -> f32 {
    f32::from_bits(word.to_bits() << 16)
}

#[inline(always)]
fn high(word: f32) -> f32 {
    f32::from_bits(word.to_bits() & 0xffff_0000)
}

impl Lanes for Portable {
    type F = V;
    const ROWS: usize = 2;
    const VECTORS: usize = 1;

    #[inline(always)]
    fn call<O: Op>(self, op: O) -> O::Output {
        op.run(self)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    fn splat_word(self, x: u32) -> V {
        [f32::from_bits(x); LANES]
    }
    #[inline(always)]
    unsafe fn load(self, source: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { source.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, destination: *mut f32, x: V) {
        // SAFETY: the caller's promise.
        unsafe { destination.cast::<V>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, source: *const u16) -> V {
        // SAFETY: the caller's promise.
        let half = unsafe { source.cast::<[u16; LANES]>().read_unaligned() };
        half.map(|x| f32::from_bits(u32::from(x) << 16))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, destination: *mut u16, x: V) {
        // SAFETY: the caller's promise.
        unsafe { destination.cast::<[u16; LANES]>().write_unaligned(x.map(to_bf16)) }
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        map2(map2(a, b, |a, b| a * b), c, |a, b| a + b)
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn round(self, x: V) -> V {
        // Adding 1.5 * 2^23 leaves no bits behind the point.
        x.map(|x| (x + 12_582_912.0) - 12_582_912.0)
    }
    #[inline(always)]
    fn scale(self, x: V, n: V) -> V {
        map2(x, n, |x, n| {
            x * f32::from_bits(((n.max(-127.0) as i32).wrapping_add(127) as u32) << 23)
        })
    }
    #[inline(always)]
    fn keep(self, x: V, first: i32, end: i32, other: V) -> V {
        let mut out = other;
        for (i, lane) in (0..).zip(0..LANES) {
            if first <= i && i < end {
                out[lane] = x[lane];
            }
        }
        out
    }
    #[inline(always)]
    fn and_word(self, x: V, mask: u32) -> V {
        x.map(|x| f32::from_bits(x.to_bits() & mask))
    }
    #[inline(always)]
    fn xor_sign(self, x: V, sign: V) -> V {
        map2(x, sign, |x, s| f32::from_bits(x.to_bits() ^ (s.to_bits() & 0x8000_0000)))
    }
    #[inline(always)]
    fn mask_ge(self, a: V, b: V) -> u32 {
        let mut mask = 0;
        for i in 0..LANES {
            mask |= u32::from(a[i] >= b[i]) << i;
        }
        mask
    }
    #[inline(always)]
    fn select_ge(self, a: V, b: V, x: V, y: V) -> V {
        let mut out = y;
        for i in 0..LANES {
            if a[i] >= b[i] {
                out[i] = x[i];
            }
        }
        out
    }
    #[inline(always)]
    fn dot_bf16(self, acc: V, a: V, b: V) -> V {
        let acc = self.fma(a.map(low), b.map(low), acc);
        self.fma(a.map(high), b.map(high), acc)
    }
    #[inline(always)]
    fn pack_bf16(self, a: V, b: V) -> V {
        let mut out = a;
        for i in 0..LANES / 2 {
            let word = |x: &V, i: usize| {
                f32::from_bits(
                    u32::from(to_bf16(x[2 * i])) | u32::from(to_bf16(x[2 * i + 1])) << 16,
                )
            };
            out[i] = word(&a, i);
            out[i + LANES / 2] = word(&b, i);
        }
        out
    }
}
