//! Paged attention, cache writes and sampling on the CPU, in the shapes of a 135M Llama: prefill in floating-point
//! operations a second, decode and sampling in bytes a second.
#![allow(unsafe_code, missing_docs, reason = "calls kernels on raw memory")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use octavo_cpu::activation::{ActAndMul, Activation, act_and_mul};
use octavo_cpu::attention::{Attention, attention};
use octavo_cpu::cache::{CacheShape, RopeAndCache, rope_and_cache};
use octavo_cpu::math::Dtype;
use octavo_cpu::norm::{RmsNorm, rms_norm};
use octavo_cpu::sample::{Constraints, PARAM_WORDS, Sample, sample};

const BLOCK: usize = 16;

/// bf16 values between -1 and 1, never the same twice in a row.
fn values(len: usize) -> Vec<u16> {
    let mut state = 1u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            0x3e00 | (state >> 16) as u16 & 0x81ff
        })
        .collect()
}

struct Case {
    name: &'static str,
    heads: [usize; 2],
    head_dim: usize,
    rows: usize,
    /// New tokens of each row, and all its tokens.
    queries: usize,
    length: usize,
    /// Caches gone through in turn, as a model's layers are.
    layers: usize,
}

fn run_case(criterion: &mut Criterion, case: &Case) {
    let [num_heads, num_kv_heads] = case.heads;
    let shape = CacheShape { num_kv_heads, head_dim: case.head_dim, block_size: BLOCK };
    let per_row = case.length.div_ceil(BLOCK);
    let blocks = case.rows * per_row;
    let layer = blocks * 2 * num_kv_heads * BLOCK * case.head_dim;
    let caches = values(layer * case.layers);
    // Blocks in an order of their own.
    let tables: Vec<i32> = (0..blocks).map(|i| (i * 7919 % blocks) as i32).collect();
    let tokens = case.rows * case.queries;
    let width = (num_heads + 2 * num_kv_heads) * case.head_dim;
    let qkv = values(tokens * width);
    let mut out = vec![0u16; tokens * num_heads * case.head_dim];
    let rows: Vec<i32> = (0..case.rows as i32).collect();
    let query_start: Vec<i32> = (0..=case.rows).map(|row| (row * case.queries) as i32).collect();
    let seq_lens = vec![case.length as i32; case.rows];
    let visible: usize = (case.length - case.queries + 1..=case.length).sum();
    let mut group = criterion.benchmark_group("attention");
    group.throughput(if case.queries > 1 {
        Throughput::Elements((4 * case.head_dim * num_heads * visible * case.rows) as u64)
    } else {
        Throughput::Bytes((layer * 2) as u64)
    });
    let mut turn = 0;
    group.bench_function(case.name, |bencher| {
        bencher.iter(|| {
            turn = (turn + 1) % case.layers;
            let call = Attention {
                dtype: Dtype::Bf16,
                qkv: qkv.as_ptr().cast(),
                qkv_stride: width,
                out: out.as_mut_ptr().cast(),
                kv_cache: caches[turn * layer..].as_ptr().cast(),
                shape,
                block_tables: tables.as_ptr(),
                table_stride: per_row,
                rows: &rows,
                query_start: &query_start,
                seq_lens: &seq_lens,
                num_heads,
                scale: 0.125,
                window: 0,
                softcap: 0.0,
            };
            // SAFETY: all memory has the shapes the call names.
            unsafe { attention(black_box(&call)) };
        });
    });
    group.finish();
}

fn attentions(criterion: &mut Criterion) {
    let base = Case {
        name: "prefill_64_prompts_of_290",
        heads: [9, 3],
        head_dim: 64,
        rows: 64,
        queries: 290,
        length: 290,
        layers: 1,
    };
    run_case(criterion, &base);
    run_case(
        criterion,
        &Case { name: "prefill_1_prompt_of_2048", rows: 1, queries: 2048, length: 2048, ..base },
    );
    run_case(
        criterion,
        &Case {
            name: "prefill_1_prompt_of_1024_heads_32_8_128",
            heads: [32, 8],
            head_dim: 128,
            rows: 1,
            queries: 1024,
            length: 1024,
            ..base
        },
    );
    let decode = Case { name: "decode_64_rows_of_350", queries: 1, length: 350, layers: 8, ..base };
    run_case(criterion, &decode);
    run_case(
        criterion,
        &Case { name: "decode_1_row_of_300", rows: 1, length: 300, layers: 200, ..decode },
    );
    run_case(
        criterion,
        &Case { name: "decode_1_row_of_16384", rows: 1, length: 16384, layers: 10, ..decode },
    );
    run_case(
        criterion,
        &Case {
            name: "decode_16_rows_of_1024_heads_32_8_128",
            heads: [32, 8],
            head_dim: 128,
            rows: 16,
            length: 1024,
            layers: 3,
            ..decode
        },
    );
}

fn token_wise(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("token_wise");
    for tokens in [1usize, 64, 2048] {
        let (heads, kv_heads, head_dim) = (9, 3, 64);
        let mut qkv = values(tokens * (heads + 2 * kv_heads) * head_dim);
        let shape = CacheShape { num_kv_heads: kv_heads, head_dim, block_size: BLOCK };
        let spread = if tokens == 64 { 320 } else { 1 };
        let blocks = (tokens * spread).div_ceil(BLOCK);
        let mut cache = values(blocks * 2 * kv_heads * BLOCK * head_dim);
        let cos_sin = vec![0.5f32; 2048 * head_dim];
        let positions: Vec<i32> = (0..tokens as i32).collect();
        let slots: Vec<i32> = (0..tokens).map(|i| (i * spread) as i32).collect();
        group.bench_function(format!("rope_and_cache_{tokens}"), |bencher| {
            bencher.iter(|| {
                let step = RopeAndCache {
                    dtype: Dtype::Bf16,
                    qkv: qkv.as_mut_ptr().cast(),
                    kv_cache: cache.as_mut_ptr().cast(),
                    shape,
                    positions: &positions,
                    slot_mapping: &slots,
                    cos_sin: cos_sin.as_ptr(),
                    num_heads: heads,
                    rotary_dim: head_dim,
                    q_norm: None,
                    k_norm: None,
                    eps: 0.0,
                };
                // SAFETY: all memory has the shapes the call names.
                unsafe { rope_and_cache(black_box(&step)) };
            });
        });
        let n = 576;
        let x = values(tokens * n);
        let mut residual = vec![0u16; tokens * n];
        let mut out = vec![0u16; tokens * n];
        let weight = vec![1.0f32; n];
        group.bench_function(format!("rms_norm_{tokens}"), |bencher| {
            bencher.iter(|| {
                let norm = RmsNorm {
                    dtype: Dtype::Bf16,
                    x: x.as_ptr().cast(),
                    weight: weight.as_ptr(),
                    out: out.as_mut_ptr().cast(),
                    residual: residual.as_mut_ptr().cast(),
                    rows: tokens,
                    n,
                    eps: 1e-5,
                };
                // SAFETY: all memory has the shapes the call names.
                unsafe { rms_norm(black_box(&norm)) };
            });
        });
        let n = 1536;
        let gate_up = values(tokens * 2 * n);
        let mut out = vec![0u16; tokens * n];
        group.bench_function(format!("silu_and_mul_{tokens}"), |bencher| {
            bencher.iter(|| {
                let call = ActAndMul {
                    dtype: Dtype::Bf16,
                    activation: Activation::Silu,
                    gate_up: gate_up.as_ptr().cast(),
                    out: out.as_mut_ptr().cast(),
                    rows: tokens,
                    n,
                };
                // SAFETY: all memory has the shapes the call names.
                unsafe { act_and_mul(black_box(&call)) };
            });
        });
    }
    group.finish();
}

fn samples(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sample");
    let vocab_size = 49_152;
    // Sums of uniform numbers: bell-shaped, about 3 wide, as a model's logits are.
    let bell: Vec<f32> = values(vocab_size * 64 * 4)
        .chunks(4)
        .map(|x| 3.0 * x.iter().map(|&x| f32::from_bits(u32::from(x) << 16)).sum::<f32>())
        .collect();
    let mut logits = bell.clone();
    let settings: [(&str, [f32; 3], i32); 6] = [
        ("masked", [0.0, 1.0, 0.0], 0),
        ("greedy", [0.0, 1.0, 0.0], 0),
        ("temperature", [0.8, 1.0, 0.0], 0),
        ("top_k", [0.8, 1.0, 0.0], 40),
        ("top_p", [0.8, 0.95, 0.0], 0),
        ("min_p", [0.8, 1.0, 0.05], 0),
    ];
    for rows in [1usize, 64] {
        for (name, floats, top_k) in settings {
            let mut params = vec![0i32; rows * PARAM_WORDS];
            for words in params.chunks_mut(PARAM_WORDS) {
                for (word, value) in words.iter_mut().zip(floats) {
                    *word = value.to_bits() as i32;
                }
                words[6] = top_k;
            }
            let slots: Vec<i32> = (0..rows as i32).collect();
            // Half of the tokens, so that every word is looked at.
            let mask_words = vocab_size.div_ceil(32);
            let masks = vec![0x5555_5555; rows * mask_words];
            let mask_logits = if name == "masked" { &slots[..] } else { &[] };
            let mut ids = vec![0i32; rows];
            let mut position = 0;
            group.throughput(Throughput::Bytes((rows * vocab_size * 4) as u64));
            group.bench_function(format!("{name}_{rows}"), |bencher| {
                bencher.iter(|| {
                    position += 1;
                    let call = Sample {
                        logits: logits.as_mut_ptr(),
                        vocab_size,
                        stride: vocab_size,
                        params: params.as_ptr(),
                        slots: &slots,
                        positions: &vec![position; rows],
                        counts: std::ptr::null(),
                        count_stride: 0,
                        out_ids: ids.as_mut_ptr(),
                        out_logprobs: std::ptr::null_mut(),
                        out_top_ids: std::ptr::null_mut(),
                        out_top_logprobs: std::ptr::null_mut(),
                        max_logprobs: 0,
                        constraints: Constraints {
                            mask_logits,
                            masks: &masks,
                            mask_words,
                            ..Constraints::default()
                        },
                    };
                    // SAFETY: all memory has the shapes the call names.
                    unsafe { sample(black_box(&call)) };
                });
            });
        }
    }
    group.finish();
}

fn short() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
}

criterion_group! { name = benches; config = short(); targets = attentions, token_wise, samples }
criterion_main!(benches);
