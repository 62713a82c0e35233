//! AVX2 with FMA: a vector is two registers.
#![allow(clippy::wildcard_imports, reason = "intrinsics")]

use super::{LANES, Lanes, Op};
use std::arch::x86_64::*;

/// The instructions exist: a token of this type is made only after detection.
macro_rules! with {
    ($body:expr) => {{
        // SAFETY: the token proves that the processor has the instructions; pointers are the caller's promise.
        #[allow(unused_unsafe)]
        unsafe {
            $body
        }
    }};
}

/// AVX2 and FMA.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// SAFETY: the caller has checked that the processor has the instructions.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
fn run_avx2<O: Op>(lanes: Avx2, op: O) -> O::Output {
    op.run(lanes)
}

/// Each word shifted down to its upper half after rounding to the nearest bf16; NaN stays NaN.
#[inline(always)]
fn round_words(x: __m256) -> __m256i {
    with!({
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
    })
}

/// The lower bf16 of each word, widened.
#[inline(always)]
fn low(x: __m256) -> __m256 {
    with!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(x))))
}

/// 2^n for whole n; 2^-127 and below have no exponent of their own: zero.
#[inline(always)]
fn power(n: __m256) -> __m256 {
    with!({
        let n = _mm256_max_ps(n, _mm256_set1_ps(-127.0));
        let bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(bits))
    })
}

/// All ones in the lanes whose number, from `lane` on, is below n.
#[inline(always)]
fn below(n: i32, lane: __m256i) -> __m256i {
    with!(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane))
}

/// Sixteen bf16 in order.
#[inline(always)]
fn halves(x: [__m256; 2]) -> __m256i {
    with!(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(
        round_words(x[0]),
        round_words(x[1])
    )))
}

impl Lanes for Avx2 {
    type F = [__m256; 2];
    const ROWS: usize = 4;
    const VECTORS: usize = 1;

    #[inline(always)]
    fn call<O: Op>(self, op: O) -> O::Output {
        with!(run_avx2(self, op))
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        with!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn splat_word(self, x: u32) -> Self::F {
        with!([_mm256_castsi256_ps(_mm256_set1_epi32(x as i32)); 2])
    }
    #[inline(always)]
    fn prefetch(self, line: *const u32) {
        with!(_mm_prefetch::<_MM_HINT_T0>(line.cast()));
    }
    #[inline(always)]
    unsafe fn load(self, source: *const f32) -> Self::F {
        with!([_mm256_loadu_ps(source), _mm256_loadu_ps(source.add(8))])
    }
    #[inline(always)]
    unsafe fn store(self, destination: *mut f32, x: Self::F) {
        with!({
            _mm256_storeu_ps(destination, x[0]);
            _mm256_storeu_ps(destination.add(8), x[1]);
        });
    }
    #[inline(always)]
    unsafe fn load_bf16(self, source: *const u16) -> Self::F {
        with!({
            let half = _mm256_loadu_si256(source.cast());
            let low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(half));
            let high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(half));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        })
    }
    #[inline(always)]
    unsafe fn store_bf16(self, destination: *mut u16, x: Self::F) {
        with!(_mm256_storeu_si256(destination.cast(), halves(x)));
    }
    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        with!({
            let half = _mm256_add_ps(x[0], x[1]);
            let x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        with!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        with!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        with!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        with!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        with!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        with!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn round(self, x: Self::F) -> Self::F {
        with!([_mm256_round_ps::<8>(x[0]), _mm256_round_ps::<8>(x[1])])
    }
    #[inline(always)]
    fn scale(self, x: Self::F, n: Self::F) -> Self::F {
        with!([_mm256_mul_ps(x[0], power(n[0])), _mm256_mul_ps(x[1], power(n[1]))])
    }
    #[inline(always)]
    fn keep(self, x: Self::F, first: i32, end: i32, other: Self::F) -> Self::F {
        with!({
            let mut out = other;
            let mut lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            for i in 0..2 {
                let mask = _mm256_andnot_si256(below(first, lane), below(end, lane));
                out[i] = _mm256_blendv_ps(other[i], x[i], _mm256_castsi256_ps(mask));
                lane = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
            }
            out
        })
    }
    #[inline(always)]
    fn and_word(self, x: Self::F, mask: u32) -> Self::F {
        with!({
            let mask = _mm256_castsi256_ps(_mm256_set1_epi32(mask as i32));
            [_mm256_and_ps(x[0], mask), _mm256_and_ps(x[1], mask)]
        })
    }
    #[inline(always)]
    fn xor_sign(self, x: Self::F, sign: Self::F) -> Self::F {
        let sign = self.and_word(sign, 0x8000_0000);
        with!([_mm256_xor_ps(x[0], sign[0]), _mm256_xor_ps(x[1], sign[1])])
    }
    #[inline(always)]
    fn mask_ge(self, a: Self::F, b: Self::F) -> u32 {
        with!({
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(a[0], b[0]));
            let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(a[1], b[1]));
            low as u32 | (high as u32) << (LANES / 2)
        })
    }
    #[inline(always)]
    fn select_ge(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F {
        with!([
            _mm256_blendv_ps(y[0], x[0], _mm256_cmp_ps::<_CMP_GE_OQ>(a[0], b[0])),
            _mm256_blendv_ps(y[1], x[1], _mm256_cmp_ps::<_CMP_GE_OQ>(a[1], b[1])),
        ])
    }
    #[inline(always)]
    fn dot_bf16(self, acc: Self::F, a: Self::F, b: Self::F) -> Self::F {
        let acc = self.fma([low(a[0]), low(a[1])], [low(b[0]), low(b[1])], acc);
        self.fma(self.and_word(a, 0xffff_0000), self.and_word(b, 0xffff_0000), acc)
    }
    #[inline(always)]
    fn pack_bf16(self, a: Self::F, b: Self::F) -> Self::F {
        with!([_mm256_castsi256_ps(halves(a)), _mm256_castsi256_ps(halves(b))])
    }
}
