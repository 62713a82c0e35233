//! Golden traces of whole runs, and the replay of a recorded log.

mod support;

use octavo_core::ids::Slot;
use octavo_core::trace::{Operation, apply, describe};
use octavo_core::{Config, Core, Policy, RequestSpec};
use support::{Device, VOCAB, allowed, token_table};

fn config() -> Config {
    Config {
        block_size: 4,
        num_blocks: 17,
        max_num_seqs: 4,
        max_num_batched_tokens: 12,
        max_model_len: 48,
        vocab_size: VOCAB,
        eos_token_ids: vec![0],
        ..Config::default()
    }
}

fn request(
    request_id: i64,
    prompt: impl IntoIterator<Item = u32>,
    max_tokens: usize,
) -> RequestSpec {
    let prompt = prompt.into_iter().collect();
    RequestSpec {
        request_id,
        prompt,
        max_tokens,
        n: 1,
        arrival_us: request_id as u64,
        ..RequestSpec::default()
    }
}

/// A run and its log. `depth` steps stay in flight.
struct Run {
    core: Core,
    device: Device,
    arena: Vec<i32>,
    log: Vec<Operation>,
    trace: String,
}

impl Run {
    fn new(config: Config) -> Self {
        let core = Core::new(config, Some(token_table())).expect("a good configuration");
        let (device, arena) = (Device::new(&core), vec![0; core.layout().arena_len()]);
        Self { core, device, arena, log: Vec::new(), trace: String::new() }
    }

    fn apply(&mut self, operation: Operation) {
        self.trace += &apply(&mut self.core, &operation, &mut self.arena);
        self.log.push(operation);
    }

    fn submit(&mut self, spec: RequestSpec) {
        self.apply(Operation::Submit(Box::new(spec)));
    }

    /// Plan and run; the samples.
    fn launch(&mut self) -> Option<Vec<i32>> {
        let plan = self.core.plan(&mut self.arena).expect("a step may be planned");
        self.trace += &plan
            .map_or("nothing to plan\n".into(), |plan| describe(&self.core, &plan, &self.arena));
        self.log.push(Operation::Plan);
        let plan = plan?;
        let masked = &self.core.layout().slice(&self.arena, "mask_logits")[..plan.num_masks];
        let slots = self.core.layout().slice(&self.arena, "logits_slots");
        let masks: Vec<Vec<bool>> = masked
            .iter()
            .map(|&logit| {
                let history = self.core.history(Slot(slots[logit as usize] as u32));
                allowed(history.expect("it runs").iter().map(|&token| token as i32))
            })
            .collect();
        Some(self.device.run(&plan, &self.arena, &masks))
    }

    fn finish(mut self, overlap: bool) -> Self {
        let mut last = None;
        while self.core.has_work() {
            let launched = self.launch();
            if let Some(sampled) = last.take() {
                self.apply(Operation::Commit(sampled));
            }
            last = launched;
            if !overlap && let Some(sampled) = last.take() {
                self.apply(Operation::Commit(sampled));
            }
        }
        self
    }
}

#[test]
fn mixed_steps_with_a_shared_prefix_and_three_answers() {
    let mut run = Run::new(config());
    run.submit(request(1, 1..15, 4));
    run.submit(request(2, (1..11).chain([30, 31]), 3));
    run.submit(RequestSpec { n: 3, ..request(3, 20..26, 3) });
    insta::assert_snapshot!(run.finish(false).trace);
}

#[test]
fn overlap_with_preemption() {
    let mut run = Run::new(Config {
        num_blocks: 8,
        max_model_len: 28,
        enable_prefix_caching: false,
        ..config()
    });
    run.submit(RequestSpec { ignore_eos: true, ..request(1, 1..11, 10) });
    run.submit(RequestSpec { ignore_eos: true, ..request(2, 21..30, 9) });
    insta::assert_snapshot!(run.finish(true).trace);
}

#[test]
fn priority_and_stop_rules() {
    let mut run = Run::new(Config {
        policy: Policy::Priority,
        aging_interval_us: 1,
        max_num_seqs: 1,
        ..config()
    });
    run.submit(RequestSpec { stop: vec![b"zz".to_vec()], ..request(1, 1..4, 4) });
    run.submit(RequestSpec { priority: -3, min_tokens: 2, ..request(2, 5..8, 3) });
    run.submit(RequestSpec {
        priority: -9,
        stop_token_ids: (0..20).collect(),
        ..request(3, 9..12, 6)
    });
    run.submit(request(4, 1..60, 1));
    run.apply(Operation::Abort(1));
    run.apply(Operation::ResetPrefixCache);
    insta::assert_snapshot!(run.finish(false).trace);
}

#[test]
fn biases_and_masks_beside_an_answer_planned_ahead() {
    let mut run = Run::new(config());
    run.submit(request(1, 1..5, 3));
    run.submit(RequestSpec { n: 2, constrained: true, ..request(2, 5..9, 3) });
    run.submit(RequestSpec {
        logit_bias: vec![(0, 3.0), (7, 25.5), (9, f32::NEG_INFINITY)],
        min_tokens: 1,
        ..request(3, 9..12, 2)
    });
    insta::assert_snapshot!(run.finish(true).trace);
}

#[test]
fn a_recorded_log_replays_to_the_same_decisions() {
    let mut run =
        Run::new(Config { num_blocks: 11, max_model_len: 36, group_min_blocks: 1, ..config() });
    for id in 0..40 {
        let shared = 1..(id as u32 % 13 + 2);
        run.submit(RequestSpec {
            n: 1 + id as usize % 3,
            constrained: id % 5 == 0,
            ..request(id, shared.chain([id as u32 % 40]), 9)
        });
        let launched = run.launch();
        if id % 7 == 3 {
            run.apply(Operation::Abort(id - 2));
        }
        if let Some(sampled) = launched {
            run.apply(Operation::Commit(sampled));
        }
    }
    let run = run.finish(true);
    let stats = run.core.stats();
    assert!(
        stats.preemptions > 0 && stats.prefix_hit_tokens > 0 && stats.evictions > 0,
        "{stats:?}"
    );

    // Another hash seed: the table's layout differs, the decisions do not.
    for hash_seed in [0, 99] {
        let config = Config { hash_seed, ..run.core.config().clone() };
        let mut core = Core::new(config, Some(token_table())).expect("a good configuration");
        let mut arena = vec![-1; core.layout().arena_len()];
        let trace: String =
            run.log.iter().map(|operation| apply(&mut core, operation, &mut arena)).collect();
        assert!(trace == run.trace, "the replay differs with hash seed {hash_seed}");
        assert_eq!(core.stats(), stats);
    }
}
