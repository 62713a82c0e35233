//! NEON: a vector is four registers.
#![allow(clippy::wildcard_imports, reason = "intrinsics")]

use super::{LANES, Lanes, Op};
use std::arch::aarch64::*;

/// NEON belongs to every 64-bit Arm processor.
macro_rules! with {
    ($body:expr) => {{
        // SAFETY: the token proves that the processor has the instructions; pointers are the caller's promise.
        #[allow(unused_unsafe)]
        unsafe {
            $body
        }
    }};
}

/// NEON.
#[derive(Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    /// SAFETY: the caller has checked that the processor has the instructions.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

#[target_feature(enable = "neon")]
fn run_neon<O: Op>(lanes: Neon, op: O) -> O::Output {
    op.run(lanes)
}

type V = [float32x4_t; 4];

/// One expression for each of the four registers.
macro_rules! each {
    ($i:ident => $body:expr) => {{
        with!([
            {
                let $i = 0;
                $body
            },
            {
                let $i = 1;
                $body
            },
            {
                let $i = 2;
                $body
            },
            {
                let $i = 3;
                $body
            },
        ])
    }};
}

/// Four bf16 after rounding to the nearest, ties to even; NaN stays NaN.
#[inline(always)]
fn halves(x: float32x4_t) -> uint16x4_t {
    with!({
        let bits = vreinterpretq_u32_f32(x);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        let number = vceqq_f32(x, x);
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        vshrn_n_u32::<16>(vbslq_u32(number, rounded, quiet))
    })
}

/// Eight bf16 as four words.
#[inline(always)]
fn words(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    with!(vreinterpretq_f32_u16(vcombine_u16(halves(a), halves(b))))
}

/// The lower bf16 of each word, widened.
#[inline(always)]
fn low(x: V) -> V {
    each!(i => vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_f32(x[i]))))
}

/// 2^n for whole n; 2^-127 and below have no exponent of their own: zero.
#[inline(always)]
fn power(n: float32x4_t) -> float32x4_t {
    with!({
        let n = vcvtq_s32_f32(vmaxq_f32(n, vdupq_n_f32(-127.0)));
        vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))))
    })
}

impl Lanes for Neon {
    type F = V;
    const ROWS: usize = 4;
    const VECTORS: usize = 1;

    #[inline(always)]
    fn call<O: Op>(self, op: O) -> O::Output {
        with!(run_neon(self, op))
    }
    #[inline(always)]
    fn splat(self, x: f32) -> V {
        with!([vdupq_n_f32(x); 4])
    }
    #[inline(always)]
    fn splat_word(self, x: u32) -> V {
        with!([vreinterpretq_f32_u32(vdupq_n_u32(x)); 4])
    }
    #[inline(always)]
    unsafe fn load(self, source: *const f32) -> V {
        each!(i => vld1q_f32(source.add(4 * i)))
    }
    #[inline(always)]
    unsafe fn store(self, destination: *mut f32, x: V) {
        with!({
            for i in 0..4 {
                vst1q_f32(destination.add(4 * i), x[i]);
            }
        });
    }
    #[inline(always)]
    unsafe fn load_bf16(self, source: *const u16) -> V {
        each!(i => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(source.add(4 * i)))))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, destination: *mut u16, x: V) {
        with!({
            for i in 0..4 {
                vst1_u16(destination.add(4 * i), halves(x[i]));
            }
        });
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        each!(i => vaddq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        each!(i => vsubq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        each!(i => vmulq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        each!(i => vdivq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        each!(i => vfmaq_f32(c[i], a[i], b[i]))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        each!(i => vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]))
    }
    #[inline(always)]
    fn round(self, x: V) -> V {
        each!(i => vrndnq_f32(x[i]))
    }
    #[inline(always)]
    fn scale(self, x: V, n: V) -> V {
        each!(i => vmulq_f32(x[i], power(n[i])))
    }
    #[inline(always)]
    fn keep(self, x: V, first: i32, end: i32, other: V) -> V {
        let lanes: [i32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        each!(i => {
            let lane = vld1q_s32(lanes.as_ptr().add(4 * i));
            let kept = vandq_u32(
                vcgeq_s32(lane, vdupq_n_s32(first)),
                vcltq_s32(lane, vdupq_n_s32(end)),
            );
            vbslq_f32(kept, x[i], other[i])
        })
    }
    #[inline(always)]
    fn and_word(self, x: V, mask: u32) -> V {
        each!(i => vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x[i]), vdupq_n_u32(mask))))
    }
    #[inline(always)]
    fn xor_sign(self, x: V, sign: V) -> V {
        let sign = self.and_word(sign, 0x8000_0000);
        each!(i => vreinterpretq_f32_u32(veorq_u32(
            vreinterpretq_u32_f32(x[i]),
            vreinterpretq_u32_f32(sign[i])
        )))
    }
    #[inline(always)]
    fn mask_ge(self, a: V, b: V) -> u32 {
        let (a, b) = (self.to_array(a), self.to_array(b));
        (0..LANES).fold(0, |mask, i| mask | u32::from(a[i] >= b[i]) << i)
    }
    #[inline(always)]
    fn select_ge(self, a: V, b: V, x: V, y: V) -> V {
        each!(i => vbslq_f32(vcgeq_f32(a[i], b[i]), x[i], y[i]))
    }
    #[inline(always)]
    fn dot_bf16(self, acc: V, a: V, b: V) -> V {
        let acc = self.fma(low(a), low(b), acc);
        self.fma(self.and_word(a, 0xffff_0000), self.and_word(b, 0xffff_0000), acc)
    }
    #[inline(always)]
    fn pack_bf16(self, a: V, b: V) -> V {
        [words(a[0], a[1]), words(a[2], a[3]), words(b[0], b[1]), words(b[2], b[3])]
    }
}
