//! What cannot work is refused at once, by name, and leaves no trace.

use octavo_core::{Config, Core, Error, RequestSpec};

const VOCAB: usize = 40;

fn config() -> Config {
    Config {
        block_size: 4,
        num_blocks: 41,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 64,
        vocab_size: VOCAB,
        eos_token_ids: vec![0],
        ..Config::default()
    }
}

fn prompt(len: u32, family: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 3 + family * 11 + 1) % VOCAB as u32).collect()
}

#[test]
fn what_can_never_fit_is_refused_at_once() {
    let mut core =
        Core::new(Config { num_blocks: 5, max_model_len: 32, ..config() }, None).expect("good");
    let spec = RequestSpec { prompt: prompt(10, 0), max_tokens: 7, n: 1, ..RequestSpec::default() };
    core.submit(spec.clone()).expect("17 tokens, of which 16 are written, fit 4 blocks");
    let refused = |core: &mut Core, spec: RequestSpec| {
        core.submit(RequestSpec { request_id: 9, ..spec }).expect_err("cannot")
    };
    assert_eq!(
        refused(&mut core, RequestSpec { max_tokens: 8, ..spec.clone() }),
        Error::CapacityExceeded { tokens: 17, needed: 5, blocks: 4 }
    );
    assert_eq!(
        refused(&mut core, RequestSpec { prompt: prompt(32, 0), ..spec.clone() }),
        Error::ContextLengthExceeded { prompt: 32, max_model_len: 32 }
    );
    let field = |error| match error {
        Error::InvalidRequest { field, .. } => field,
        other => panic!("{other}"),
    };
    for (name, spec) in [
        ("prompt", RequestSpec { prompt: vec![], ..spec.clone() }),
        ("prompt", RequestSpec { prompt: vec![VOCAB as u32], ..spec.clone() }),
        ("n", RequestSpec { n: 0, ..spec.clone() }),
        ("n", RequestSpec { n: 5, ..spec.clone() }),
        ("max_tokens", RequestSpec { max_tokens: 0, ..spec.clone() }),
        ("stop", RequestSpec { stop: vec![b"x".to_vec()], ..spec.clone() }),
        ("stop", RequestSpec { stop: vec![vec![]], ..spec.clone() }),
        ("stop_token_ids", RequestSpec { stop_token_ids: vec![VOCAB as u32], ..spec.clone() }),
        ("logit_bias", RequestSpec { logit_bias: vec![(VOCAB as u32, 1.0)], ..spec.clone() }),
        (
            "logit_bias",
            RequestSpec { logit_bias: vec![(3, 1.0), (1, 1.0), (3, 2.0)], ..spec.clone() },
        ),
        ("logit_bias", RequestSpec { logit_bias: vec![(3, f32::NAN)], ..spec.clone() }),
        ("logit_bias", RequestSpec { logit_bias: vec![(3, f32::INFINITY)], ..spec.clone() }),
        ("logit_bias", RequestSpec { logit_bias: vec![(3, 1.0); 1025], ..spec.clone() }),
        ("request_id", RequestSpec { request_id: 0, ..spec.clone() }),
    ] {
        let spec = RequestSpec { request_id: if name == "request_id" { 0 } else { 9 }, ..spec };
        assert_eq!(field(core.submit(spec).expect_err("cannot")), name);
    }
    for (name, set) in [
        ("temperature", (|s| s.temperature = f32::NAN) as fn(&mut octavo_core::Sampling)),
        ("temperature", |s| s.temperature = -1.0),
        ("top_p", |s| s.top_p = 0.0),
        ("min_p", |s| s.min_p = 1.5),
        ("repetition_penalty", |s| s.repetition_penalty = 0.0),
        ("presence_penalty", |s| s.presence_penalty = f32::INFINITY),
        ("frequency_penalty", |s| s.frequency_penalty = f32::NAN),
        ("logprobs", |s| s.logprobs = Some(VOCAB as u32 + 1)),
    ] {
        let mut spec = RequestSpec { request_id: 9, ..spec.clone() };
        set(&mut spec.sampling);
        assert_eq!(field(core.submit(spec).expect_err("cannot")), name);
    }
    core.check_invariants().expect("a refusal leaves no trace");
    assert_eq!(core.stats().waiting, 1);
}

#[test]
fn biases_that_fit_no_step_are_refused_and_those_of_one_answer_always_fit() {
    let config = Config { vocab_size: 2000, max_biases: 0, max_num_seqs: 8, ..config() };
    let mut core = Core::new(config, None).expect("good");
    let spec = RequestSpec {
        prompt: prompt(4, 0),
        max_tokens: 4,
        min_tokens: 2,
        n: 1,
        logit_bias: (100..1124).map(|token| (token, -1.0)).collect(),
        stop_token_ids: (1200..1328).collect(),
        ..RequestSpec::default()
    };
    core.submit(spec.clone()).expect("one answer");
    let error = core.submit(RequestSpec { request_id: 1, n: 2, ..spec }).expect_err("two");
    assert!(matches!(error, Error::InvalidRequest { field: "logit_bias", .. }), "{error}");
}

#[test]
fn settings_that_cannot_work_are_named() {
    for (name, config) in [
        ("num_blocks", Config { num_blocks: 1, ..config() }),
        ("block_size", Config { block_size: 0, ..config() }),
        ("max_num_seqs", Config { max_num_seqs: 0, ..config() }),
        ("max_num_batched_tokens", Config { max_num_batched_tokens: 3, ..config() }),
        ("num_blocks", Config { num_blocks: 1 << 28, block_size: 16, ..config() }),
        ("eos_token_ids", Config { eos_token_ids: vec![VOCAB as u32], ..config() }),
        ("vocab_size", Config { vocab_size: usize::MAX, ..config() }),
    ] {
        match Core::new(config, None).expect_err("cannot work") {
            Error::Config { field, .. } => assert_eq!(field, name),
            other => panic!("{other}"),
        }
    }
}
