//! Dense layers of a 135M-parameter model and one of an 8B model. An element of throughput is one multiply-add: two
//! floating point operations.
//!
//! "cold" goes through more copies of the weight than the caches hold, as a forward pass does.
#![allow(missing_docs, reason = "criterion's macros")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use octavo_cpu::linear::{Dtype, Input, Linear, Output, Part};

/// Name, n, k.
const SHAPES: [(&str, usize, usize); 6] = [
    ("qkv", 960, 576),
    ("o", 576, 576),
    ("gate_up", 3072, 576),
    ("down", 576, 1536),
    ("head", 49152, 576),
    ("large", 4096, 4096),
];
const ROWS: [usize; 5] = [1, 16, 64, 256, 512];
/// More than the last-level cache.
const COLD_BYTES: usize = 96 << 20;

fn pack(n: usize, k: usize, dtype: Dtype) -> Linear {
    let read_row = |index: usize, row: &mut [f32]| {
        for (column, value) in row.iter_mut().enumerate() {
            *value = ((index * 31 + column * 7) % 97) as f32 / 97.0 - 0.5;
        }
    };
    Linear::new(&[Part { rows: n, read_row: &read_row }], k, dtype, None).expect("a valid shape")
}

/// Operands of one size in both dtypes.
struct Operands {
    rows: usize,
    x: Vec<f32>,
    x_bf16: Vec<bf16>,
    out: Vec<f32>,
    out_bf16: Vec<bf16>,
}

impl Operands {
    fn new(rows: usize, n: usize, k: usize) -> Self {
        let (x, x_bf16) = (vec![0.5; rows * k], vec![bf16::ONE; rows * k]);
        Self { rows, x, x_bf16, out: vec![0.0; rows * n], out_bf16: vec![bf16::ZERO; rows * n] }
    }

    fn forward(&mut self, linear: &Linear) {
        let (x, out) = match linear.dtype() {
            Dtype::Bf16 => (Input::Bf16(&self.x_bf16), Output::Bf16(&mut self.out_bf16)),
            Dtype::F32 => (Input::F32(&self.x), Output::F32(&mut self.out)),
        };
        linear.forward(x, linear.k(), out, linear.n(), self.rows).expect("arguments that fit");
    }
}

fn linear(criterion: &mut Criterion) {
    for (name, dtype) in [("bf16", Dtype::Bf16), ("f32", Dtype::F32)] {
        for (shape, n, k) in SHAPES {
            let one = pack(n, k, dtype);
            let copies = COLD_BYTES / one.num_bytes() + 1;
            let weights: Vec<_> = (1..copies).map(|_| pack(n, k, dtype)).chain([one]).collect();
            for (temperature, weights) in [("hot", &weights[..1]), ("cold", &weights[..])] {
                let mut group = criterion.benchmark_group(format!("{name}/{temperature}/{shape}"));
                group.sample_size(20).warm_up_time(Duration::from_millis(200));
                group.measurement_time(Duration::from_millis(800));
                let most = if temperature == "cold" { 64 } else { 64 * 49152 / n };
                for rows in ROWS.into_iter().filter(|&rows| rows <= most) {
                    let mut operands = Operands::new(rows, n, k);
                    let mut next = weights.iter().cycle();
                    group.throughput(Throughput::Elements((rows * n * k) as u64));
                    group.bench_function(BenchmarkId::from_parameter(rows), |bencher| {
                        bencher.iter(|| {
                            operands.forward(black_box(next.next().expect("a cycle")));
                        });
                    });
                }
            }
        }
    }
}

criterion_group!(benches, linear);
criterion_main!(benches);
