//! Any bytes as a configuration and the operations of an engine: the core never contradicts itself, and every answer is
//! the one its request gives alone.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octavo_core::{Config, Policy, RequestSpec, Sampling};

#[path = "../../rust/core/tests/support/mod.rs"]
mod support;

use support::VOCAB;
use support::engine::Engine;

/// Bytes as small numbers; zeros when they run out.
struct Numbers<'a>(std::slice::Iter<'a, u8>);

impl Numbers<'_> {
    fn below(&mut self, limit: usize) -> usize {
        self.0.next().map_or(0, |&byte| byte as usize % limit)
    }

    fn is_set(&mut self) -> bool {
        self.below(2) == 1
    }
}

fn config(numbers: &mut Numbers<'_>) -> Config {
    let max_num_seqs = 1 + numbers.below(6);
    Config {
        block_size: 1 + numbers.below(6),
        num_blocks: 2 + numbers.below(40),
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + numbers.below(32),
        windows: (0..=numbers.below(3)).map(|_| numbers.below(20)).collect(),
        max_model_len: 2 + numbers.below(60),
        vocab_size: VOCAB,
        eos_token_ids: (0..numbers.below(3) as u32).collect(),
        policy: if numbers.is_set() { Policy::Priority } else { Policy::Fcfs },
        aging_interval_us: numbers.below(200) as u64,
        enable_prefix_caching: numbers.is_set(),
        hash_seed: numbers.below(256) as u64,
        group_min_blocks: numbers.below(3),
        max_table_updates: numbers.below(200),
        max_biases: numbers.below(200),
    }
}

fn request(numbers: &mut Numbers<'_>, request_id: i64) -> RequestSpec {
    let (family, shared) = (numbers.below(3), numbers.below(50));
    let tail = numbers.below(4);
    let mut prompt: Vec<u32> =
        (0..shared).map(|i| ((i * 7 + family * 13) % VOCAB) as u32).collect();
    prompt.extend((0..tail).map(|_| numbers.below(VOCAB) as u32));
    RequestSpec {
        request_id,
        prompt,
        arrival_us: request_id as u64,
        n: numbers.below(4),
        max_tokens: numbers.below(40),
        min_tokens: numbers.below(6),
        sampling: Sampling { seed: numbers.below(4) as u64, ..Sampling::default() },
        stop_token_ids: (0..numbers.below(3)).map(|_| numbers.below(VOCAB + 1) as u32).collect(),
        stop: (0..numbers.below(3))
            .map(|_| vec![b'a' + numbers.below(5) as u8; numbers.below(3)])
            .collect(),
        ignore_eos: numbers.is_set(),
        include_stop: numbers.is_set(),
        skip_special: true,
        priority: numbers.below(7) as i32 - 3,
        cache_salt: vec![7; numbers.below(2)],
        adapter: numbers.below(2) as u32,
        logit_bias: (0..numbers.below(3))
            .map(|_| (numbers.below(VOCAB + 1) as u32, numbers.below(99) as f32 - 49.0))
            .collect(),
        constrained: numbers.is_set(),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut numbers = Numbers(bytes.iter());
    let (config, depth, with_text) = (config(&mut numbers), numbers.below(2), numbers.is_set());
    let mut engine = Engine::new(config, depth, with_text);
    let mut submitted = 0;
    while numbers.0.len() > 0 {
        match numbers.below(9) {
            0..3 => {
                let spec = request(&mut numbers, submitted);
                engine.submit(&spec);
                submitted += 1;
            }
            3 => engine.abort(numbers.below(256) as i64),
            4 => drop(engine.core.reset_prefix_cache()),
            5 => drop(engine.launch()),
            _ => drop(engine.step()),
        }
        engine.core.check_invariants().expect("no contradiction");
    }
    engine.drain();
});
