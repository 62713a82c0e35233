//! Tiles in plain Rust, for processors without a kernel of their own.
// Loops over a constant number of lanes become vectors; iterators over arrays do not, at every level of optimization.
#![allow(clippy::needless_range_loop)]

use half::bf16;

use super::Kernels;
use super::tile::{Simd, tiles};

pub(super) static WIDENED: Kernels = Kernels {
    skinny: tiles!(Portable<2>, 4, [1]),
    bulk: tiles!(Portable<2>, 2, [1, 2]),
    skinny_rows: 1,
};

pub(super) static F32: Kernels = Kernels {
    skinny: tiles!(Portable<1>, 4, [1]),
    bulk: tiles!(Portable<1>, 2, [1, 2]),
    skinny_rows: 1,
};

const LANES: usize = 8;

/// Arrays that the compiler may turn into vectors; a word holds one f32, or two bf16.
struct Portable<const HALVES: usize>;

impl<const HALVES: usize> Portable<HALVES> {
    #[inline(always)]
    fn widen(word: u32, half: usize) -> f32 {
        f32::from_bits(match (HALVES, half) {
            (1, _) => word,
            (_, 0) => word << 16,
            _ => word & 0xffff_0000,
        })
    }
}

impl<const HALVES: usize> Simd for Portable<HALVES> {
    const LANES: usize = LANES;
    const HALVES: usize = HALVES;
    type Float = [f32; LANES];
    type Words = [f32; LANES];

    #[inline(always)]
    unsafe fn zero() -> [f32; LANES] {
        [0.0; LANES]
    }
    #[inline(always)]
    unsafe fn words(source: *const u32, half: usize) -> [f32; LANES] {
        let mut words = [0.0; LANES];
        for lane in 0..LANES {
            // SAFETY: the trait's promise.
            words[lane] = Self::widen(unsafe { source.add(lane).read_unaligned() }, half);
        }
        words
    }
    #[inline(always)]
    unsafe fn broadcast(source: *const u32, half: usize) -> [f32; LANES] {
        // SAFETY: the trait's promise.
        [Self::widen(unsafe { source.read_unaligned() }, half); LANES]
    }
    #[inline(always)]
    unsafe fn multiply_add(
        mut sum: [f32; LANES],
        x: [f32; LANES],
        weight: [f32; LANES],
    ) -> [f32; LANES] {
        for lane in 0..LANES {
            sum[lane] += x[lane] * weight[lane];
        }
        sum
    }
    #[inline(always)]
    unsafe fn load(source: *const f32) -> [f32; LANES] {
        // SAFETY: the trait's promise.
        unsafe { source.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn add(mut left: [f32; LANES], right: [f32; LANES]) -> [f32; LANES] {
        for lane in 0..LANES {
            left[lane] += right[lane];
        }
        left
    }
    #[inline(always)]
    unsafe fn store(target: *mut f32, values: [f32; LANES]) {
        // SAFETY: the trait's promise.
        unsafe { target.cast::<[f32; LANES]>().write_unaligned(values) }
    }
    #[inline(always)]
    unsafe fn store_bf16(target: *mut bf16, values: [f32; LANES]) {
        for lane in 0..LANES {
            // SAFETY: the trait's promise.
            unsafe { target.add(lane).write_unaligned(bf16::from_f32(values[lane])) }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}
}
