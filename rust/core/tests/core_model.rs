//! Whatever the chunking, preemption, sharing, forks, aborts and overlap: every answer is the one the request gives
//! alone, and nothing leaks.

mod support;

use octavo_core::{Config, Policy, RequestSpec, Sampling};
use proptest::prelude::*;
use support::VOCAB;
use support::engine::Engine;

/// One thing that happens to the engine.
#[derive(Clone, Debug)]
enum Event {
    Submit(Box<RequestSpec>),
    Step,
    /// Plan ahead, committing nothing.
    Launch,
    Abort(prop::sample::Index),
    Reset,
}

/// One full group, or some groups with windows of their own.
fn windows() -> impl Strategy<Value = Vec<usize>> {
    let window = prop_oneof![Just(0), 1_usize..20];
    prop_oneof![1 => Just(vec![0]), 2 => prop::collection::vec(window, 1..5)]
}

fn configs() -> impl Strategy<Value = Config> {
    (
        1_usize..6,
        2_usize..40,
        1_usize..6,
        0_usize..30,
        4_usize..60,
        any::<bool>(),
        any::<bool>(),
        (0_usize..3, windows()),
    )
        .prop_map(
            |(
                block_size,
                num_blocks,
                max_num_seqs,
                extra,
                max_model_len,
                prefix,
                priority,
                (group, windows),
            )| Config {
                block_size,
                num_blocks,
                max_num_seqs,
                max_num_batched_tokens: max_num_seqs + extra,
                windows,
                max_model_len,
                vocab_size: VOCAB,
                eos_token_ids: vec![0, 7],
                policy: if priority { Policy::Priority } else { Policy::Fcfs },
                aging_interval_us: 50,
                enable_prefix_caching: prefix,
                hash_seed: 5,
                max_table_updates: if extra % 2 == 0 { 0 } else { 1 << 17 },
                max_biases: if extra % 3 == 0 { 0 } else { 1 << 17 },
                group_min_blocks: group,
            },
        )
}

/// Prompts share prefixes often: each is a cut of one of three long ones, with a tail of its own.
fn specs() -> impl Strategy<Value = RequestSpec> {
    let prompt = (0_u32..3, 0_usize..40, prop::collection::vec(0..VOCAB as u32, 0..6));
    let limits = (1_usize..5, 1_usize..30, 0_usize..8, 0_i32..4);
    let stops = (
        prop::collection::vec(0..VOCAB as u32, 0..3),
        prop::collection::vec("[a-e]{1,2}".prop_map(String::into_bytes), 0..3),
        any::<(bool, bool, bool)>(),
    );
    let bias = prop_oneof![Just(f32::NEG_INFINITY), -30.0_f32..30.0];
    let logit_bias = prop_oneof![
        2 => Just(Vec::new()),
        1 => prop::collection::btree_map(0..VOCAB as u32, bias, 0..5)
            .prop_map(|biases| biases.into_iter().collect()),
    ];
    let held = (logit_bias, prop::bool::weighted(0.3));
    (prompt, limits, stops, 0_u64..3, 0_u32..2, held).prop_map(
        |(prompt, limits, stops, seed, adapter, (logit_bias, constrained))| {
            let (family, shared, tail) = prompt;
            let (n, max_tokens, min_tokens, priority) = limits;
            let (stop_token_ids, stop, (ignore_eos, include_stop, salted)) = stops;
            let mut prompt: Vec<u32> =
                (0..shared as u32).map(|i| (i * 7 + family * 13 + i / 5) % VOCAB as u32).collect();
            prompt.extend(tail);
            RequestSpec {
                prompt,
                n: if n > 3 { 1 } else { n },
                max_tokens,
                min_tokens,
                sampling: Sampling { seed, ..Sampling::default() },
                stop_token_ids,
                stop,
                ignore_eos,
                include_stop,
                skip_special: true,
                begins_text: false,
                priority,
                cache_salt: if salted { vec![1] } else { Vec::new() },
                adapter,
                logit_bias,
                constrained,
                ..RequestSpec::default()
            }
        },
    )
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => specs().prop_map(|spec| Event::Submit(Box::new(spec))),
        8 => Just(Event::Step),
        3 => Just(Event::Launch),
        1 => any::<prop::sample::Index>().prop_map(Event::Abort),
        1 => Just(Event::Reset),
    ];
    prop::collection::vec(event, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_answer_is_the_one_the_request_gives_alone(
        config in configs(), depth in 0_usize..2, with_text in any::<bool>(), events in events(),
    ) {
        let mut engine = Engine::new(config, depth, with_text);
        for (now, event) in events.into_iter().enumerate() {
            match event {
                Event::Submit(spec) => {
                    let spec = RequestSpec { request_id: now as i64, arrival_us: now as u64, ..*spec };
                    engine.submit(&spec);
                }
                Event::Step => drop(engine.step()),
                Event::Launch => drop(engine.launch()),
                Event::Abort(index) if now > 0 => engine.abort(index.index(now) as i64),
                Event::Abort(_) => {}
                Event::Reset => drop(engine.core.reset_prefix_cache()),
            }
            engine.core.check_invariants().unwrap();
        }
        engine.drain();
    }
}
