//! NEON tiles. The bf16 instructions of newer Arm processors are not stable in Rust: pairs are widened.

use std::arch::aarch64::*;

use half::bf16;

use super::Kernels;
use super::tile::{Simd, tiles};

pub(super) static WIDENED: Kernels = Kernels {
    skinny: tiles!(Widened, 8, [1, 2]),
    bulk: tiles!(Widened, 4, [1, 2, 3, 4, 5, 6]),
    skinny_rows: 2,
};

pub(super) static F32: Kernels = Kernels {
    skinny: tiles!(Plain, 8, [1, 2]),
    bulk: tiles!(Plain, 4, [1, 2, 3, 4, 5, 6]),
    skinny_rows: 2,
};

/// bf16 widened to f32, then multiplied and added with one rounding.
struct Widened;
/// f32.
struct Plain;

/// What both types have in common.
macro_rules! common {
    () => {
        const LANES: usize = 4;
        type Float = float32x4_t;
        type Words = float32x4_t;

        #[inline(always)]
        unsafe fn zero() -> float32x4_t {
            // SAFETY: the trait's promise.
            unsafe { vdupq_n_f32(0.0) }
        }
        #[inline(always)]
        unsafe fn multiply_add(
            sum: float32x4_t,
            x: float32x4_t,
            weight: float32x4_t,
        ) -> float32x4_t {
            // SAFETY: the trait's promise.
            unsafe { vfmaq_f32(sum, x, weight) }
        }
        #[inline(always)]
        unsafe fn load(source: *const f32) -> float32x4_t {
            // SAFETY: the trait's promise.
            unsafe { vld1q_f32(source) }
        }
        #[inline(always)]
        unsafe fn add(left: float32x4_t, right: float32x4_t) -> float32x4_t {
            // SAFETY: the trait's promise.
            unsafe { vaddq_f32(left, right) }
        }
        #[inline(always)]
        unsafe fn store(target: *mut f32, values: float32x4_t) {
            // SAFETY: the trait's promise.
            unsafe { vst1q_f32(target, values) }
        }
        #[inline(always)]
        unsafe fn store_bf16(target: *mut bf16, values: float32x4_t) {
            // SAFETY: the trait's promise.
            unsafe {
                let bits = vreinterpretq_u32_f32(values);
                let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
                let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
                let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
                let chosen = vbslq_u32(vceqq_f32(values, values), rounded, quiet);
                vst1_u16(target.cast(), vshrn_n_u32::<16>(chosen));
            }
        }
        #[inline(always)]
        unsafe fn prefetch(_address: *const u8) {}
    };
}

impl Simd for Widened {
    const HALVES: usize = 2;
    common!();

    #[inline(always)]
    unsafe fn words(source: *const u32, half: usize) -> float32x4_t {
        // SAFETY: the trait's promise.
        unsafe {
            let pairs = vld1q_u32(source);
            vreinterpretq_f32_u32(match half {
                0 => vshlq_n_u32::<16>(pairs),
                _ => vandq_u32(pairs, vdupq_n_u32(0xffff_0000)),
            })
        }
    }
    #[inline(always)]
    unsafe fn broadcast(source: *const u32, half: usize) -> float32x4_t {
        // SAFETY: the trait's promise.
        unsafe {
            let element = source.cast::<u16>().add(half).read_unaligned();
            vdupq_n_f32(f32::from_bits(u32::from(element) << 16))
        }
    }
}

impl Simd for Plain {
    const HALVES: usize = 1;
    common!();

    #[inline(always)]
    unsafe fn words(source: *const u32, _half: usize) -> float32x4_t {
        // SAFETY: the trait's promise.
        unsafe { vld1q_f32(source.cast()) }
    }
    #[inline(always)]
    unsafe fn broadcast(source: *const u32, _half: usize) -> float32x4_t {
        // SAFETY: the trait's promise.
        unsafe { vdupq_n_f32(source.cast::<f32>().read_unaligned()) }
    }
}
