//! AVX-512 and AVX2 tiles.
//!
//! AMX would suit large products, but its intrinsics are not stable in Rust.

use std::arch::x86_64::*;
use std::mem::transmute;

use half::bf16;

use super::Kernels;
use super::tile::{Simd, tiles};

pub(super) static AVX512_BF16: Kernels = Kernels {
    skinny: tiles!(
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")]
        Avx512Bf16,
        2,
        [1, 2, 3, 4, 5, 6, 7, 8]
    ),
    bulk: tiles!(
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")]
        Avx512Bf16,
        4,
        [1, 2, 3, 4, 5, 6]
    ),
    skinny_rows: 32,
};

pub(super) static AVX512_WIDENED: Kernels = Kernels {
    skinny: tiles!(
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
        Avx512Widened,
        2,
        [1, 2, 3, 4, 5, 6, 7, 8]
    ),
    bulk: tiles!(
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
        Avx512Widened,
        4,
        [1, 2, 3, 4, 5, 6]
    ),
    skinny_rows: 32,
};

pub(super) static AVX512_F32: Kernels = Kernels {
    skinny: tiles!(
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
        Avx512F32,
        2,
        [1, 2, 3, 4, 5, 6, 7, 8]
    ),
    bulk: tiles!(
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
        Avx512F32,
        4,
        [1, 2, 3, 4, 5, 6]
    ),
    skinny_rows: 32,
};

pub(super) static AVX2_WIDENED: Kernels = Kernels {
    skinny: tiles!(
        #[target_feature(enable = "avx2,fma")]
        Avx2Widened,
        4,
        [1, 2]
    ),
    bulk: tiles!(
        #[target_feature(enable = "avx2,fma")]
        Avx2Widened,
        2,
        [1, 2, 3, 4, 5, 6]
    ),
    skinny_rows: 2,
};

pub(super) static AVX2_F32: Kernels = Kernels {
    skinny: tiles!(
        #[target_feature(enable = "avx2,fma")]
        Avx2F32,
        4,
        [1, 2]
    ),
    bulk: tiles!(
        #[target_feature(enable = "avx2,fma")]
        Avx2F32,
        2,
        [1, 2, 3, 4, 5, 6]
    ),
    skinny_rows: 2,
};

/// Dot products of bf16 pairs; denormals count as zeros.
struct Avx512Bf16;
/// bf16 widened to f32, then multiplied and added with one rounding.
struct Avx512Widened;
struct Avx512F32;
struct Avx2Widened;
struct Avx2F32;

/// What the AVX-512 types have in common.
macro_rules! avx512_common {
    () => {
        const LANES: usize = 16;
        type Float = __m512;

        #[inline(always)]
        unsafe fn zero() -> __m512 {
            // SAFETY: the trait's promise.
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(source: *const f32) -> __m512 {
            // SAFETY: the trait's promise.
            unsafe { _mm512_loadu_ps(source) }
        }
        #[inline(always)]
        unsafe fn add(left: __m512, right: __m512) -> __m512 {
            // SAFETY: the trait's promise.
            unsafe { _mm512_add_ps(left, right) }
        }
        #[inline(always)]
        unsafe fn store(target: *mut f32, values: __m512) {
            // SAFETY: the trait's promise.
            unsafe { _mm512_storeu_ps(target, values) }
        }
        #[inline(always)]
        unsafe fn prefetch(address: *const u8) {
            // SAFETY: a prefetch of any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        }
    };
}

/// Rounding of f32 to bf16 without the instruction: to nearest even, NaN kept.
macro_rules! avx512_round {
    () => {
        #[inline(always)]
        unsafe fn store_bf16(target: *mut bf16, values: __m512) {
            // SAFETY: the trait's promise.
            unsafe {
                let bits = _mm512_castps_si512(values);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
                let rounded = _mm512_add_epi32(bits, bias);
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
                let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
                let chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
                let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(chosen));
                _mm256_storeu_si256(target.cast(), high);
            }
        }
    };
}

impl Simd for Avx512Bf16 {
    const HALVES: usize = 1;
    type Words = __m512i;
    avx512_common!();

    #[inline(always)]
    unsafe fn words(source: *const u32, _half: usize) -> __m512i {
        // SAFETY: the trait's promise.
        unsafe { _mm512_loadu_si512(source.cast()) }
    }
    #[inline(always)]
    unsafe fn broadcast(source: *const u32, _half: usize) -> __m512i {
        // SAFETY: the trait's promise.
        unsafe { _mm512_set1_epi32(source.read_unaligned() as i32) }
    }
    #[inline(always)]
    unsafe fn multiply_add(sum: __m512, x: __m512i, weight: __m512i) -> __m512 {
        // SAFETY: the trait's promise; the casts keep the bits.
        unsafe {
            let x = transmute::<__m512i, __m512bh>(x);
            _mm512_dpbf16_ps(sum, x, transmute::<__m512i, __m512bh>(weight))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(target: *mut bf16, values: __m512) {
        // SAFETY: the trait's promise; the cast keeps the bits.
        unsafe {
            let rounded = transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values));
            _mm256_storeu_si256(target.cast(), rounded);
        }
    }
}

impl Simd for Avx512Widened {
    const HALVES: usize = 2;
    type Words = __m512;
    avx512_common!();
    avx512_round!();

    #[inline(always)]
    unsafe fn words(source: *const u32, half: usize) -> __m512 {
        // SAFETY: the trait's promise.
        unsafe {
            let pairs = _mm512_loadu_si512(source.cast());
            _mm512_castsi512_ps(match half {
                0 => _mm512_slli_epi32::<16>(pairs),
                _ => _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)),
            })
        }
    }
    #[inline(always)]
    unsafe fn broadcast(source: *const u32, half: usize) -> __m512 {
        // SAFETY: the trait's promise.
        unsafe {
            let element = source.cast::<u16>().add(half).read_unaligned();
            _mm512_set1_ps(f32::from_bits(u32::from(element) << 16))
        }
    }
    #[inline(always)]
    unsafe fn multiply_add(sum: __m512, x: __m512, weight: __m512) -> __m512 {
        // SAFETY: the trait's promise.
        unsafe { _mm512_fmadd_ps(x, weight, sum) }
    }
}

impl Simd for Avx512F32 {
    const HALVES: usize = 1;
    type Words = __m512;
    avx512_common!();
    avx512_round!();

    #[inline(always)]
    unsafe fn words(source: *const u32, _half: usize) -> __m512 {
        // SAFETY: the trait's promise.
        unsafe { _mm512_loadu_ps(source.cast()) }
    }
    #[inline(always)]
    unsafe fn broadcast(source: *const u32, _half: usize) -> __m512 {
        // SAFETY: the trait's promise.
        unsafe { _mm512_set1_ps(source.cast::<f32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn multiply_add(sum: __m512, x: __m512, weight: __m512) -> __m512 {
        // SAFETY: the trait's promise.
        unsafe { _mm512_fmadd_ps(x, weight, sum) }
    }
}

/// What the AVX2 types have in common.
macro_rules! avx2_common {
    () => {
        const LANES: usize = 8;
        type Float = __m256;
        type Words = __m256;

        #[inline(always)]
        unsafe fn zero() -> __m256 {
            // SAFETY: the trait's promise.
            unsafe { _mm256_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn multiply_add(sum: __m256, x: __m256, weight: __m256) -> __m256 {
            // SAFETY: the trait's promise.
            unsafe { _mm256_fmadd_ps(x, weight, sum) }
        }
        #[inline(always)]
        unsafe fn load(source: *const f32) -> __m256 {
            // SAFETY: the trait's promise.
            unsafe { _mm256_loadu_ps(source) }
        }
        #[inline(always)]
        unsafe fn add(left: __m256, right: __m256) -> __m256 {
            // SAFETY: the trait's promise.
            unsafe { _mm256_add_ps(left, right) }
        }
        #[inline(always)]
        unsafe fn store(target: *mut f32, values: __m256) {
            // SAFETY: the trait's promise.
            unsafe { _mm256_storeu_ps(target, values) }
        }
        #[inline(always)]
        unsafe fn store_bf16(target: *mut bf16, values: __m256) {
            // SAFETY: the trait's promise.
            unsafe {
                let bits = _mm256_castps_si256(values);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
                let rounded = _mm256_add_epi32(bits, bias);
                let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
                let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
                let chosen = _mm256_blendv_epi8(rounded, quiet, nan);
                let high = _mm256_srli_epi32::<16>(chosen);
                let low = _mm256_castsi256_si128(high);
                let packed = _mm_packus_epi32(low, _mm256_extracti128_si256::<1>(high));
                _mm_storeu_si128(target.cast(), packed);
            }
        }
        #[inline(always)]
        unsafe fn prefetch(address: *const u8) {
            // SAFETY: a prefetch of any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        }
    };
}

impl Simd for Avx2Widened {
    const HALVES: usize = 2;
    avx2_common!();

    #[inline(always)]
    unsafe fn words(source: *const u32, half: usize) -> __m256 {
        // SAFETY: the trait's promise.
        unsafe {
            let pairs = _mm256_loadu_si256(source.cast());
            _mm256_castsi256_ps(match half {
                0 => _mm256_slli_epi32::<16>(pairs),
                _ => _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)),
            })
        }
    }
    #[inline(always)]
    unsafe fn broadcast(source: *const u32, half: usize) -> __m256 {
        // SAFETY: the trait's promise.
        unsafe {
            let element = source.cast::<u16>().add(half).read_unaligned();
            _mm256_set1_ps(f32::from_bits(u32::from(element) << 16))
        }
    }
}

impl Simd for Avx2F32 {
    const HALVES: usize = 1;
    avx2_common!();

    #[inline(always)]
    unsafe fn words(source: *const u32, _half: usize) -> __m256 {
        // SAFETY: the trait's promise.
        unsafe { _mm256_loadu_ps(source.cast()) }
    }
    #[inline(always)]
    unsafe fn broadcast(source: *const u32, _half: usize) -> __m256 {
        // SAFETY: the trait's promise.
        unsafe { _mm256_set1_ps(source.cast::<f32>().read_unaligned()) }
    }
}
