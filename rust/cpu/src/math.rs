//! Vectors of 16 float32 lanes over every instruction set, and the functions the kernels are made of.
//!
//! A kernel is written once, as an [`Op`] generic over [`Lanes`], and compiled for each instruction set by
//! [`dispatch`]. A value of a `Lanes` type is proof that the processor has its instructions: only `dispatch`
//! makes one. The width is 16 everywhere, so the order of every sum is the same on every machine.
#![allow(unsafe_code, reason = "the one place where instructions and raw loads meet")]
#![allow(clippy::inline_always, reason = "generic code must inline into its target_feature caller")]
#![allow(clippy::missing_safety_doc, clippy::many_single_char_names)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use crate::isa::{Isa, isa};

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// The type of activations and of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// The upper half of a float32.
    Bf16,
    /// IEEE single precision.
    F32,
}

/// A computation compiled once for each instruction set.
pub(crate) trait Op {
    /// What it returns.
    type Output;
    /// The body; always `#[inline(always)]`.
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Run an operation with the instruction set in use.
pub(crate) fn dispatch<O: Op>(op: O) -> O::Output {
    // SAFETY: `isa()` names only what the processor has.
    unsafe {
        match isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => avx512::Avx512Bf16::new().call(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::Avx512::new().call(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::Avx2::new().call(op),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::Neon::new().call(op),
            _ => portable::Portable.call(op),
        }
    }
}

/// Sixteen float32 lanes; pointers need no alignment beyond their element's.
pub(crate) trait Lanes: Copy {
    /// A vector; also seen as sixteen 32-bit words.
    type F: Copy;
    /// Rows of a register tile.
    const ROWS: usize;
    /// Vectors across a register tile.
    const VECTORS: usize;

    /// Run an operation in a function of its own, with its own registers.
    fn call<O: Op>(self, op: O) -> O::Output;

    fn splat(self, x: f32) -> Self::F;
    fn splat_word(self, x: u32) -> Self::F;
    unsafe fn load(self, source: *const f32) -> Self::F;
    unsafe fn store(self, destination: *mut f32, x: Self::F);
    /// Sixteen bf16 values, widened.
    unsafe fn load_bf16(self, source: *const u16) -> Self::F;
    /// Rounded to the nearest bf16, ties to even.
    unsafe fn store_bf16(self, destination: *mut u16, x: Self::F);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The nearest whole number (|x| < 2^22).
    fn round(self, x: Self::F) -> Self::F;
    /// x * 2^n for whole n from -160 to 128; a result below 2^-126 may be zero.
    fn scale(self, x: Self::F, n: Self::F) -> Self::F;
    /// x where the lane number is in first..end, else `other`.
    fn keep(self, x: Self::F, first: i32, end: i32, other: Self::F) -> Self::F;
    /// Every word and-ed with a mask.
    fn and_word(self, x: Self::F, mask: u32) -> Self::F;
    /// x with the signs of `sign` exchanged: `x ^ (sign & 0x8000_0000)`.
    fn xor_sign(self, x: Self::F, sign: Self::F) -> Self::F;
    /// A bit for each lane with a >= b.
    fn mask_ge(self, a: Self::F, b: Self::F) -> u32;
    /// `x` where a >= b, else `y`.
    fn select_ge(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F;
    /// Ask for a cache line ahead of its use.
    fn prefetch(self, _line: *const u32) {}
    /// acc + a * b, each word a pair of bf16 whose products are both added.
    fn dot_bf16(self, acc: Self::F, a: Self::F, b: Self::F) -> Self::F;
    /// 32 values rounded to bf16 pairs: words 0..8 from `a`, the rest from `b`.
    fn pack_bf16(self, a: Self::F, b: Self::F) -> Self::F;

    /// Sum of the lanes: halves folded together, 16 to 1.
    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        let mut lanes = self.to_array(x);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0]
    }
    /// Largest lane; no lane may be NaN.
    #[inline(always)]
    fn max_lane(self, x: Self::F) -> f32 {
        let mut best = f32::NEG_INFINITY;
        for lane in self.to_array(x) {
            if lane > best {
                best = lane;
            }
        }
        best
    }
    #[inline(always)]
    fn to_array(self, x: Self::F) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: sixteen floats.
        unsafe { self.store(lanes.as_mut_ptr(), x) };
        lanes
    }
    /// Rounded to bf16 and widened again.
    #[inline(always)]
    fn round_bf16(self, x: Self::F) -> Self::F {
        let mut half = [0u16; LANES];
        // SAFETY: sixteen halves.
        unsafe {
            self.store_bf16(half.as_mut_ptr(), x);
            self.load_bf16(half.as_ptr())
        }
    }
}

/// An element of activations and cache: float32, or bf16 in pairs that fill a 32-bit word.
pub(crate) trait Element: Copy {
    /// What lies in memory.
    type Raw: Copy + Default;
    /// Elements in a 32-bit word.
    const PER_WORD: usize;
    unsafe fn load<L: Lanes>(lanes: L, source: *const Self::Raw) -> L::F;
    unsafe fn store<L: Lanes>(lanes: L, destination: *mut Self::Raw, x: L::F);
    /// acc + a * b over words.
    fn mac<L: Lanes>(lanes: L, acc: L::F, a: L::F, b: L::F) -> L::F;
    /// As stored and loaded again.
    fn round<L: Lanes>(lanes: L, x: L::F) -> L::F;
}

/// bf16 in memory, float32 sums.
#[derive(Clone, Copy)]
pub(crate) struct Bf16;

/// float32 throughout.
#[derive(Clone, Copy)]
pub(crate) struct F32;

impl Element for Bf16 {
    type Raw = u16;
    const PER_WORD: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, source: *const u16) -> L::F {
        // SAFETY: the caller's promise.
        unsafe { lanes.load_bf16(source) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(lanes: L, destination: *mut u16, x: L::F) {
        // SAFETY: the caller's promise.
        unsafe { lanes.store_bf16(destination, x) }
    }
    #[inline(always)]
    fn mac<L: Lanes>(lanes: L, acc: L::F, a: L::F, b: L::F) -> L::F {
        lanes.dot_bf16(acc, a, b)
    }
    #[inline(always)]
    fn round<L: Lanes>(lanes: L, x: L::F) -> L::F {
        lanes.round_bf16(x)
    }
}

impl Element for F32 {
    type Raw = f32;
    const PER_WORD: usize = 1;
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, source: *const f32) -> L::F {
        // SAFETY: the caller's promise.
        unsafe { lanes.load(source) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(lanes: L, destination: *mut f32, x: L::F) {
        // SAFETY: the caller's promise.
        unsafe { lanes.store(destination, x) }
    }
    #[inline(always)]
    fn mac<L: Lanes>(lanes: L, acc: L::F, a: L::F, b: L::F) -> L::F {
        lanes.fma(a, b, acc)
    }
    #[inline(always)]
    fn round<L: Lanes>(_lanes: L, x: L::F) -> L::F {
        x
    }
}

/// 2^x to about 1e-7; 0 below 2^-127, NaN stays NaN.
#[inline(always)]
pub(crate) fn exp2<L: Lanes>(l: L, x: L::F) -> L::F {
    // The second operand of max comes back for NaN.
    let x = l.max(l.splat(-160.0), x);
    let n = l.round(x);
    let r = l.sub(x, n);
    // Fitted to 2^r, |r| <= 1/2, with 1 at 0: relative error 2e-9 before rounding.
    let mut p = l.splat(1.535_336_2e-4);
    p = l.fma(p, r, l.splat(1.339_887_4e-3));
    p = l.fma(p, r, l.splat(9.618_437e-3));
    p = l.fma(p, r, l.splat(5.550_332_4e-2));
    p = l.fma(p, r, l.splat(2.402_264_8e-1));
    p = l.fma(p, r, l.splat(std::f32::consts::LN_2));
    p = l.fma(p, r, l.splat(1.0));
    l.scale(p, n)
}

/// e^x to about 1e-7, for x up to 88; 0 below -87, NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(l: L, x: L::F) -> L::F {
    let x = l.max(l.splat(-110.0), x);
    // The negated minimum, NaN kept.
    let x = l.sub(l.splat(0.0), l.max(l.splat(-88.3), l.sub(l.splat(0.0), x)));
    let n = l.round(l.mul(x, l.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first of few bits: r is exact.
    let r = l.fma(n, l.splat(-0.693_359_4), x);
    let r = l.fma(n, l.splat(2.121_944_4e-4), r);
    let mut p = l.splat(1.384_364_7e-3);
    p = l.fma(p, r, l.splat(8.374_161e-3));
    p = l.fma(p, r, l.splat(4.166_8e-2));
    p = l.fma(p, r, l.splat(1.666_643_2e-1));
    p = l.fma(p, r, l.splat(4.999_999_4e-1));
    p = l.fma(p, r, l.splat(1.0));
    p = l.fma(p, r, l.splat(1.0));
    l.scale(p, n)
}

/// The hyperbolic tangent, to about 2e-7 absolute, overflow-safe.
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(l: L, x: L::F) -> L::F {
    let e = exp(l, l.add(x, x));
    l.sub(l.splat(1.0), l.div(l.splat(2.0), l.add(e, l.splat(1.0))))
}

/// The error function, to about 1e-7 absolute.
#[inline(always)]
pub(crate) fn erf<L: Lanes>(l: L, x: L::F) -> L::F {
    let magnitude = l.xor_sign(x, x);
    let square = l.mul(x, x);
    // Below 1: x times a polynomial of x^2.
    let mut near = l.splat(7.853_893e-5);
    near = l.fma(near, square, l.splat(-8.010_204e-4));
    near = l.fma(near, square, l.splat(5.188_329e-3));
    near = l.fma(near, square, l.splat(-2.685_381_3e-2));
    near = l.fma(near, square, l.splat(1.128_358_54e-1));
    near = l.fma(near, square, l.splat(-3.761_262_6e-1));
    near = l.fma(near, square, l.splat(std::f32::consts::FRAC_2_SQRT_PI));
    near = l.mul(near, x);
    // Above: the logarithm of 1 - erf is a polynomial; from 4 on the result is 1.
    let t = l.sub(l.splat(0.0), l.max(l.sub(l.splat(0.0), magnitude), l.splat(-4.0)));
    let mut far = l.splat(1.855_740_3e-4);
    far = l.fma(far, t, l.splat(-2.939_607_5e-3));
    far = l.fma(far, t, l.splat(2.180_531_8e-2));
    far = l.fma(far, t, l.splat(-1.030_373_7e-1));
    far = l.fma(far, t, l.splat(-6.382_257e-1));
    far = l.fma(far, t, l.splat(-1.127_04));
    far = l.fma(far, t, l.splat(-3.537_192_8e-4));
    far = l.xor_sign(l.sub(l.splat(1.0), exp(l, far)), x);
    l.select_ge(magnitude, l.splat(1.0), far, near)
}

/// The first `count` elements, zeros after them.
#[inline(always)]
pub(crate) unsafe fn load_part<L: Lanes, E: Element>(
    l: L,
    source: *const E::Raw,
    count: usize,
) -> L::F {
    // SAFETY: `count` elements, by the caller's promise.
    unsafe {
        if count == LANES {
            return E::load(l, source);
        }
        let mut part = [E::Raw::default(); LANES];
        part.as_mut_ptr().copy_from_nonoverlapping(source, count);
        E::load(l, part.as_ptr())
    }
}

/// The first `count` lanes.
#[inline(always)]
pub(crate) unsafe fn store_part<L: Lanes, E: Element>(
    l: L,
    destination: *mut E::Raw,
    x: L::F,
    count: usize,
) {
    // SAFETY: room for `count` elements, by the caller's promise.
    unsafe {
        if count == LANES {
            return E::store(l, destination, x);
        }
        let mut part = [E::Raw::default(); LANES];
        E::store(l, part.as_mut_ptr(), x);
        destination.copy_from_nonoverlapping(part.as_ptr(), count);
    }
}

#[cfg(test)]
mod tests;
