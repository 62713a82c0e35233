//! The core costs microseconds a step: plan and commit of decode rows, whatever waits; prefix lookup; submit.
//!
//! Bars, on one thread: 10, 40 and 160 us with 32, 256 and 1,024 decode rows; within 10 % of that from 10 to 100,000
//! waiting requests; 5 us to find 1,024 cached tokens; 50 us to submit 4,096.

use std::cell::RefCell;
use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use octavo_core::ids::NodeUid;
use octavo_core::kv_cache::KvCache;
use octavo_core::kv_cache::cache_groups::CacheGroups;
use octavo_core::{Config, Core, RequestSpec};

const VOCAB: usize = 32_000;

fn request(request_id: i64, prompt_len: usize, max_tokens: usize) -> RequestSpec {
    let prompt = (0..prompt_len as u32)
        .map(|i| (i * 31 + request_id as u32 * 7919) % VOCAB as u32)
        .collect();
    RequestSpec { request_id, prompt, n: 1, max_tokens, ignore_eos: true, ..RequestSpec::default() }
}

/// A core with `rows` answers under way, 100 prompt tokens each, and `waiting` requests behind them.
fn decoding(rows: usize, waiting: usize, group_min_blocks: usize) -> (Core, Vec<i32>) {
    let config = Config {
        num_blocks: rows * 80 + 1,
        max_num_seqs: rows,
        max_num_batched_tokens: 8192,
        max_model_len: 8192,
        vocab_size: VOCAB,
        eos_token_ids: vec![2],
        group_min_blocks,
        ..Config::default()
    };
    let mut core = Core::new(config, None).expect("a good configuration");
    let mut arena = vec![0; core.layout().arena_len()];
    let sampled = vec![5; rows];
    for i in 0..(rows + waiting) as i64 {
        core.submit(request(i, 100, 1100)).expect("fits");
    }
    while core.stats().running < rows as u64 || core.stats().generated_tokens < rows as u64 {
        step(&mut core, &mut arena, &sampled);
    }
    assert_eq!(core.stats().waiting as usize, waiting);
    // Queuing 100,000 requests sweeps the caches; do so in every case, so that only the number of waiting differs.
    black_box(vec![1_u8; 128 << 20]);
    (core, arena)
}

fn step(core: &mut Core, arena: &mut [i32], sampled: &[i32]) {
    let plan = core.plan(arena).expect("one step is open at most").expect("work is left");
    black_box(core.commit(plan.step, sampled).expect("good samples"));
}

/// A thousand steps of steady decode: the figure in milliseconds is that of one step in microseconds.
fn bench_steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("1000_plans_and_commits");
    for (rows, waiting, groups) in [
        (32, 0, 0),
        (32, 10, 0),
        (32, 100_000, 0),
        (256, 0, 0),
        (256, 10, 0),
        (256, 100_000, 0),
        (256, 0, 4),
        (1024, 0, 0),
    ] {
        let sampled = vec![5; rows];
        let name =
            format!("{rows}_rows_{waiting}_waiting{}", if groups > 0 { "_grouped" } else { "" });
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            // Not a clone of one core: a clone's vectors have no room to grow, and the steps would pay for that.
            b.iter_batched_ref(
                || decoding(rows, waiting, groups),
                |(core, arena)| (0..1000).for_each(|_| step(core, arena, &sampled)),
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

fn bench_lookup(c: &mut Criterion) {
    let mut cache = KvCache::new(65_537, 16, 1, CacheGroups::new(&[0], 16, 2048));
    let tokens: Vec<u32> =
        (0..65_536 * 16).map(|i: u32| i.wrapping_mul(2_654_435_761) % VOCAB as u32).collect();
    let root = cache.acquire_root(0, b"");
    let mut node = root;
    for (i, chunk) in tokens.chunks_exact(16).enumerate() {
        if i % 64 == 0 {
            node = root;
        }
        let block = cache.take().expect("room for all");
        node = cache.index(block, node, chunk).1;
    }
    let (mut found, mut prompt) = (Vec::with_capacity(64), 0);
    c.bench_function("lookup_1024_cached_tokens", |b| {
        b.iter(|| {
            prompt = (prompt + 617) % 1024;
            found.clear();
            let node: NodeUid = cache.prefix().walk(
                root,
                &tokens[prompt * 1024..(prompt + 1) * 1024],
                64,
                &mut found,
            );
            assert_eq!(found.len(), 64);
            black_box(node)
        });
    });
}

fn bench_submit(c: &mut Criterion) {
    let config =
        Config { num_blocks: 4097, max_model_len: 8192, vocab_size: VOCAB, ..Config::default() };
    let core = RefCell::new(Core::new(config, None).expect("a good configuration"));
    let mut id = 0;
    c.bench_function("submit_4096_tokens", |b| {
        b.iter_batched(
            || {
                core.borrow_mut().abort(id);
                id += 1;
                request(id, 4096, 16)
            },
            |spec| core.borrow_mut().submit(spec).expect("fits"),
            BatchSize::PerIteration,
        );
    });
}

criterion_group!(benches, bench_steps, bench_lookup, bench_submit);
criterion_main!(benches);
