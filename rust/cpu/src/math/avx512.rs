//! AVX-512, with and without bf16 dot products.
#![allow(clippy::wildcard_imports, reason = "intrinsics")]

use super::{Lanes, Op};
use std::arch::x86_64::*;

/// The instructions exist: a token of these types is made only after detection.
macro_rules! with {
    ($body:expr) => {{
        // SAFETY: the token proves that the processor has the instructions; pointers are the caller's promise.
        #[allow(unused_unsafe)]
        unsafe {
            $body
        }
    }};
}

macro_rules! shared {
    () => {
        type F = __m512;
        const ROWS: usize = 6;
        const VECTORS: usize = 4;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            with!(_mm512_set1_ps(x))
        }
        #[inline(always)]
        fn splat_word(self, x: u32) -> __m512 {
            with!(_mm512_castsi512_ps(_mm512_set1_epi32(x as i32)))
        }
        #[inline(always)]
        fn prefetch(self, line: *const u32) {
            with!(_mm_prefetch::<_MM_HINT_T0>(line.cast()));
        }
        #[inline(always)]
        unsafe fn load(self, source: *const f32) -> __m512 {
            with!(_mm512_loadu_ps(source))
        }
        #[inline(always)]
        unsafe fn store(self, destination: *mut f32, x: __m512) {
            with!(_mm512_storeu_ps(destination, x));
        }
        #[inline(always)]
        unsafe fn load_bf16(self, source: *const u16) -> __m512 {
            with!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
                _mm256_loadu_si256(source.cast())
            ))))
        }
        #[inline(always)]
        fn sum(self, x: __m512) -> f32 {
            with!({
                let half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
                let x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
                let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
                _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
            })
        }
        #[inline(always)]
        fn max_lane(self, x: __m512) -> f32 {
            with!({
                let half = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
                let x = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
                let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
                _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
            })
        }
        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            with!(_mm512_add_ps(a, b))
        }
        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            with!(_mm512_sub_ps(a, b))
        }
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            with!(_mm512_mul_ps(a, b))
        }
        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            with!(_mm512_div_ps(a, b))
        }
        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            with!(_mm512_fmadd_ps(a, b, c))
        }
        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            with!(_mm512_max_ps(a, b))
        }
        #[inline(always)]
        fn round(self, x: __m512) -> __m512 {
            with!(_mm512_roundscale_ps::<8>(x))
        }
        #[inline(always)]
        fn scale(self, x: __m512, n: __m512) -> __m512 {
            with!(_mm512_scalef_ps(x, n))
        }
        #[inline(always)]
        fn keep(self, x: __m512, first: i32, end: i32, other: __m512) -> __m512 {
            let below = |n: i32| (1u32 << n.clamp(0, 16)) - 1;
            let mask = (below(end) & !below(first)) as __mmask16;
            with!(_mm512_mask_blend_ps(mask, other, x))
        }
        #[inline(always)]
        fn and_word(self, x: __m512, mask: u32) -> __m512 {
            with!(_mm512_castsi512_ps(_mm512_and_si512(
                _mm512_castps_si512(x),
                _mm512_set1_epi32(mask as i32)
            )))
        }
        #[inline(always)]
        fn xor_sign(self, x: __m512, sign: __m512) -> __m512 {
            with!({
                let sign = _mm512_and_si512(_mm512_castps_si512(sign), _mm512_set1_epi32(i32::MIN));
                _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), sign))
            })
        }
        #[inline(always)]
        fn mask_ge(self, a: __m512, b: __m512) -> u32 {
            with!(u32::from(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b)))
        }
        #[inline(always)]
        fn select_ge(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
            with!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b), y, x))
        }
    };
}

/// The upper 16 bits of each word after rounding to the nearest bf16, ties to even; NaN stays NaN.
#[inline(always)]
fn round_words(x: __m512) -> __m512i {
    with!({
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet))
    })
}

/// The lower bf16 of each word, widened.
#[inline(always)]
fn low(x: __m512) -> __m512 {
    with!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(x))))
}

/// AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// SAFETY: the caller has checked that the processor has the instructions.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,popcnt,lzcnt")]
fn run_avx512<O: Op>(lanes: Avx512, op: O) -> O::Output {
    op.run(lanes)
}

impl Lanes for Avx512 {
    shared!();

    #[inline(always)]
    fn call<O: Op>(self, op: O) -> O::Output {
        with!(run_avx512(self, op))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, destination: *mut u16, x: __m512) {
        with!(_mm256_storeu_si256(destination.cast(), _mm512_cvtepi32_epi16(round_words(x))));
    }
    #[inline(always)]
    fn dot_bf16(self, acc: __m512, a: __m512, b: __m512) -> __m512 {
        let acc = self.fma(low(a), low(b), acc);
        self.fma(self.and_word(a, 0xffff_0000), self.and_word(b, 0xffff_0000), acc)
    }
    #[inline(always)]
    fn pack_bf16(self, a: __m512, b: __m512) -> __m512 {
        with!(_mm512_castsi512_ps(_mm512_inserti64x4::<1>(
            _mm512_castsi256_si512(_mm512_cvtepi32_epi16(round_words(a))),
            _mm512_cvtepi32_epi16(round_words(b))
        )))
    }
}

/// AVX-512 with bf16 dot products.
#[derive(Clone, Copy)]
pub(super) struct Avx512Bf16(());

impl Avx512Bf16 {
    /// SAFETY: the caller has checked that the processor has the instructions.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

#[target_feature(
    enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,popcnt,lzcnt"
)]
fn run_avx512_bf16<O: Op>(lanes: Avx512Bf16, op: O) -> O::Output {
    op.run(lanes)
}

impl Lanes for Avx512Bf16 {
    shared!();

    #[inline(always)]
    fn call<O: Op>(self, op: O) -> O::Output {
        with!(run_avx512_bf16(self, op))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, destination: *mut u16, x: __m512) {
        with!(destination.cast::<__m256bh>().write_unaligned(_mm512_cvtneps_pbh(x)));
    }
    #[inline(always)]
    fn dot_bf16(self, acc: __m512, a: __m512, b: __m512) -> __m512 {
        with!(_mm512_dpbf16_ps(
            acc,
            std::mem::transmute::<__m512, __m512bh>(a),
            std::mem::transmute::<__m512, __m512bh>(b)
        ))
    }
    #[inline(always)]
    fn pack_bf16(self, a: __m512, b: __m512) -> __m512 {
        with!(std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(b, a)))
    }
}
