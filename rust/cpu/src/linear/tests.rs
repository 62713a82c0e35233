use proptest::prelude::*;

use super::*;
use crate::isa::{Isa, usable};
use crate::pool::set_num_threads;
use crate::pool::testing::Turn;

/// Numbers in (-1, 1) that differ from each other, from a seed.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn round(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

fn pack_rows(rows: &[f32], k: usize, dtype: Dtype, bias: Option<&[f32]>) -> Linear {
    let read_row = |index: usize, row: &mut [f32]| row.copy_from_slice(&rows[index * k..][..k]);
    let part = Part { rows: rows.len() / k, read_row: &read_row };
    Linear::new(&[part], k, dtype, bias).unwrap()
}

/// Activations of either dtype; the values are those of the dtype.
struct Activations {
    bf16: Vec<bf16>,
    f32: Vec<f32>,
    dtype: Dtype,
}

impl Activations {
    fn new(values: &[f32], dtype: Dtype) -> Self {
        let bf16 = round(values);
        let f32 = match dtype {
            Dtype::Bf16 => bf16.iter().map(|value| value.to_f32()).collect(),
            Dtype::F32 => values.to_vec(),
        };
        Self { bf16, f32, dtype }
    }

    fn from(&self, start: usize) -> Input<'_> {
        match self.dtype {
            Dtype::Bf16 => Input::Bf16(&self.bf16[start..]),
            Dtype::F32 => Input::F32(&self.f32[start..]),
        }
    }
}

/// The product in f64, and for each element how far an f32 chain may be from it.
fn reference(x: &[f32], weight: &[f32], bias: Option<&[f32]>, k: usize) -> Vec<(f64, f64)> {
    let mut results = Vec::new();
    for x in x.chunks(k) {
        for (column, weight) in weight.chunks(k).enumerate() {
            let products =
                x.iter().zip(weight).map(|(&x, &weight)| f64::from(x) * f64::from(weight));
            let bias = bias.map_or(0.0, |bias| f64::from(bias[column]));
            let (mut sum, mut size) = (bias, bias.abs());
            for product in products {
                sum += product;
                size += product.abs();
            }
            results.push((sum, size * (k + 2) as f64 * f64::from(f32::EPSILON) + 1e-30));
        }
    }
    results
}

fn check(isa: Isa, dtype: Dtype, rows: usize, n: usize, k: usize, with_bias: bool) {
    let seed = (rows * 1_000_003 + n * 1009 + k) as u64;
    let weight = Activations::new(&noise(n * k, seed), dtype).f32;
    let x = Activations::new(&noise(rows * k, seed + 1), dtype);
    let bias = noise(n, seed + 2);
    let bias = with_bias.then_some(&bias[..]);
    let linear = pack_rows(&weight, k, dtype, bias);
    let case = format!("{} {dtype:?} {rows} x {n} x {k}, bias {with_bias}", isa.name());

    let mut sums = vec![f32::NAN; rows * n];
    linear.forward_with(isa, x.from(0), k, Output::F32(&mut sums), n, rows).unwrap();
    for (index, (sum, (exact, bound))) in
        sums.iter().zip(reference(&x.f32, &weight, bias, k)).enumerate()
    {
        let error = (f64::from(*sum) - exact).abs();
        assert!(error <= bound, "{case}: element {index} is {sum}, not {exact}");
    }
    if dtype == Dtype::Bf16 {
        let mut rounded = vec![bf16::NAN; rows * n];
        linear.forward_with(isa, x.from(0), k, Output::Bf16(&mut rounded), n, rows).unwrap();
        assert_eq!(rounded, round(&sums), "{case}: rounding");
    }
}

#[test]
fn products_match_a_reference_on_every_instruction_set() {
    for isa in usable() {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            for (rows, n, k) in [
                (1, 1, 1),
                (1, 33, 3),
                (2, 32, 2),
                (3, 31, 64),
                (5, 64, 65),
                (8, 96, 31),
                (9, 100, 33),
                (25, 65, 128),
                (26, 129, 66),
                (37, 7, 577),
                (70, 95, 48),
                (300, 33, 5),
            ] {
                check(isa, dtype, rows, n, k, (rows + n) % 2 == 0);
            }
        }
    }
}

#[test]
fn long_rows_are_summed_block_by_block() {
    for isa in usable() {
        check(isa, Dtype::Bf16, 30, 70, 2 * 2 * 1024 + 77, true);
        check(isa, Dtype::F32, 30, 40, 2 * 1024 + 5, true);
        check(isa, Dtype::Bf16, 3, 40, 4097, false);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn products_match_a_reference_at_any_shape(
        rows in 1_usize..60,
        n in 1_usize..140,
        k in 1_usize..200,
        isa in proptest::sample::select(usable()),
        dtype in proptest::sample::select(vec![Dtype::Bf16, Dtype::F32]),
        with_bias: bool,
    ) {
        check(isa, dtype, rows, n, k, with_bias);
    }
}

/// Every row must equal, bit for bit, the row computed alone on one thread.
fn check_sameness(isa: Isa, dtype: Dtype, n: usize, k: usize) {
    let most = 80;
    let linear = pack_rows(&noise(n * k, 1), k, dtype, Some(&noise(n, 2)));
    let x = Activations::new(&noise(most * k, 3), dtype);
    set_num_threads(1);
    let mut alone = vec![0.0_f32; most * n];
    for row in 0..most {
        let out = Output::F32(&mut alone[row * n..][..n]);
        linear.forward_with(isa, x.from(row * k), k, out, n, 1).unwrap();
    }
    for threads in [1, 2, 5] {
        set_num_threads(threads);
        for rows in [2, 3, 6, 7, 8, 9, 12, 16, 24, 25, 31, 33, 64, 65, 79] {
            for first in [0, most - rows] {
                let mut together = vec![0.0_f32; rows * n];
                let out = Output::F32(&mut together);
                linear.forward_with(isa, x.from(first * k), k, out, n, rows).unwrap();
                let expected = &alone[first * n..][..rows * n];
                let same = together.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{} {dtype:?}, {rows} rows, {threads} threads", isa.name());
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_company_or_the_threads() {
    let _turn = Turn::with_threads(1);
    for isa in usable() {
        check_sameness(isa, Dtype::Bf16, 100, 130);
        check_sameness(isa, Dtype::F32, 100, 67);
    }
    // Longer than a block of k.
    check_sameness(isa(), Dtype::Bf16, 70, 4500);
    check_sameness(isa(), Dtype::F32, 70, 2500);
}

#[test]
fn strides_are_kept_and_nothing_between_rows_is_touched() {
    let (rows, n, k) = (27, 45, 21);
    let weight = noise(n * k, 5);
    for isa in usable() {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let linear = pack_rows(&weight, k, dtype, None);
            let (x_stride, out_stride) = (k + 9, n + 5);
            // Infinities between the rows must not leak into the sums.
            let mut wide = vec![f32::INFINITY; rows * x_stride];
            let narrow = noise(rows * k, 6);
            for (wide, narrow) in wide.chunks_mut(x_stride).zip(narrow.chunks(k)) {
                wide[..k].copy_from_slice(narrow);
            }
            let (wide, narrow) = (Activations::new(&wide, dtype), Activations::new(&narrow, dtype));
            let mut expected = vec![0.0; rows * n];
            linear
                .forward_with(isa, narrow.from(0), k, Output::F32(&mut expected), n, rows)
                .unwrap();
            let mut out = vec![7.0; rows * out_stride];
            let output = Output::F32(&mut out);
            linear.forward_with(isa, wide.from(0), x_stride, output, out_stride, rows).unwrap();
            for (out, expected) in out.chunks(out_stride).zip(expected.chunks(n)) {
                assert_eq!(&out[..n], expected);
                assert_eq!(out[n..], vec![7.0; out.len() - n]);
            }
        }
    }
}

#[test]
fn special_values_survive_rounding() {
    let weight = [1.0, 1.0, 1.0, 1.0];
    let values = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.003_906_3, 3.4e38, -0.0];
    for isa in usable() {
        let linear = pack_rows(&weight, 1, Dtype::Bf16, None);
        let x = round(&values);
        let mut out = vec![bf16::ZERO; 4 * values.len()];
        let rows = values.len();
        linear.forward_with(isa, Input::Bf16(&x), 1, Output::Bf16(&mut out), 4, rows).unwrap();
        for (out, x) in out.chunks(4).zip(x) {
            assert!(
                out.iter().all(|out| *out == x || (out.is_nan() && x.is_nan())),
                "{}",
                isa.name()
            );
        }
    }
}

#[test]
fn parts_are_stacked() {
    let k = 37;
    let weight = noise(100 * k, 9);
    let whole = pack_rows(&weight, k, Dtype::F32, None);
    let reader = |first: usize| {
        let weight = &weight;
        move |index: usize, row: &mut [f32]| {
            row.copy_from_slice(&weight[(first + index) * k..][..k]);
        }
    };
    let (first, second, third) = (reader(0), reader(1), reader(70));
    let parts = [
        Part { rows: 1, read_row: &first },
        Part { rows: 69, read_row: &second },
        Part { rows: 0, read_row: &second },
        Part { rows: 30, read_row: &third },
    ];
    let stacked = Linear::new(&parts, k, Dtype::F32, None).unwrap();
    assert_eq!((stacked.n(), stacked.k(), stacked.dtype()), (100, k, Dtype::F32));
    assert_eq!(&stacked.words[..], &whole.words[..]);
    assert_eq!(stacked.num_bytes(), 128 * k * 4);
}

#[test]
fn embedding_returns_the_rows_themselves() {
    let (n, k) = (70, 33);
    let weight = noise(n * k, 11);
    let ids = [69, 0, 31, 32, 69, 5];
    let expected: Vec<f32> =
        ids.iter().flat_map(|&id| weight[id as usize * k..][..k].to_vec()).collect();
    let mut out = vec![0.0; ids.len() * k];
    pack_rows(&weight, k, Dtype::F32, None).embed(&ids, Output::F32(&mut out)).unwrap();
    assert_eq!(out, expected);
    let linear = pack_rows(&weight, k, Dtype::Bf16, None);
    let mut out = vec![bf16::ZERO; ids.len() * k];
    linear.embed(&ids, Output::Bf16(&mut out)).unwrap();
    assert_eq!(out, round(&expected));

    for id in [-1, 70, i32::MIN, i32::MAX] {
        let error = linear.embed(&[3, id], Output::Bf16(&mut out)).unwrap_err();
        assert_eq!(error, LinearError::TokenId { id, rows: 70 });
        assert!(error.to_string().contains(&id.to_string()));
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let weight = noise(12, 1);
    let linear = pack_rows(&weight, 3, Dtype::Bf16, None);
    let (x, mut out) = (vec![bf16::ONE; 6], vec![0.0_f32; 8]);
    let mut forward = |x: Input<'_>, x_stride, out_stride, rows| {
        linear.forward(x, x_stride, Output::F32(&mut out), out_stride, rows).unwrap_err()
    };
    let short = LinearError::TooShort { argument: "x", given: 6, needed: 9 };
    assert_eq!(forward(Input::Bf16(&x), 3, 4, 3), short);
    let short = LinearError::TooShort { argument: "out", given: 8, needed: 9 };
    assert_eq!(forward(Input::Bf16(&x), 3, 5, 2), short);
    let stride = LinearError::Stride { argument: "x", stride: 2, row: 3 };
    assert_eq!(forward(Input::Bf16(&x), 2, 4, 2), stride);
    assert_eq!(forward(Input::F32(&[0.0; 6]), 3, 4, 2), LinearError::DtypeMismatch);
    let read_row = |_: usize, row: &mut [f32]| row.fill(0.0);
    let new = |rows, k, bias: Option<&[f32]>| {
        Linear::new(&[Part { rows, read_row: &read_row }], k, Dtype::F32, bias).unwrap_err()
    };
    assert_eq!(new(0, 3, None), LinearError::EmptyWeight);
    assert_eq!(new(3, 0, None), LinearError::EmptyWeight);
    assert_eq!(new(usize::MAX, 2, None), LinearError::TooLarge);
    assert_eq!(new(1 << 40, 1 << 30, None), LinearError::TooLarge);
    assert_eq!(new(3, 2, Some(&[0.0])), LinearError::BiasLength { given: 1, needed: 3 });
}
