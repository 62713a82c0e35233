//! Whatever the chunking, preemption, sharing, forks, aborts and overlap: every answer is the one the request gives
//! alone, and nothing leaks.

#![allow(clippy::unwrap_used, reason = "a test's harness fails by panicking")]

mod support;

use std::collections::{BTreeMap, VecDeque};

use octavo_core::{Config, Core, Policy, RequestSpec, Sampling, StepPlan};
use proptest::prelude::*;
use support::{Answer, Device, VOCAB, alone, token_table};

/// One thing that happens to the engine.
#[derive(Clone, Debug)]
enum Event {
    Submit(RequestSpec),
    Step,
    Abort(prop::sample::Index),
    Reset,
}

/// An engine: the core, the device, the steps in flight and what came out.
struct Engine {
    core: Core,
    device: Device,
    arena: Vec<i32>,
    in_flight: VecDeque<(StepPlan, Vec<i32>)>,
    depth: usize,
    with_text: bool,
    specs: BTreeMap<i64, RequestSpec>,
    answers: BTreeMap<(i64, i32), Answer>,
}

impl Engine {
    fn new(config: Config, depth: usize, with_text: bool) -> Self {
        let core = Core::new(config, with_text.then(token_table)).unwrap();
        let device = Device::new(&core);
        let arena = vec![-7; core.layout().arena_len()];
        Self {
            core,
            device,
            arena,
            in_flight: VecDeque::new(),
            depth,
            with_text,
            specs: BTreeMap::new(),
            answers: BTreeMap::new(),
        }
    }

    fn submit(&mut self, spec: &RequestSpec) {
        if self.core.submit(spec.clone()).is_ok() {
            self.specs.insert(spec.request_id, spec.clone());
            for sample in 0..spec.n as i32 {
                self.answers.insert(
                    (spec.request_id, sample),
                    Answer { stop: i32::MIN, ..Answer::default() },
                );
            }
        }
    }

    fn abort(&mut self, id: i64) {
        if self.core.abort(id) {
            self.specs.remove(&id);
        }
        assert!(!self.core.abort(id));
    }

    /// Plan and launch, then commit what is older than `depth`; false when there was nothing to do.
    fn step(&mut self) -> bool {
        self.arena.fill(-7);
        let plan = self.core.plan(&mut self.arena).unwrap();
        self.core.check_invariants().unwrap();
        if let Some(plan) = plan {
            let sampled = self.device.run(&plan, &self.arena);
            self.in_flight.push_back((plan, sampled));
        }
        let keep = if plan.is_some() { self.depth } else { 0 };
        let worked = !self.in_flight.is_empty();
        while self.in_flight.len() > keep {
            let (plan, sampled) = self.in_flight.pop_front().unwrap();
            self.commit(&plan, &sampled);
            self.core.check_invariants().unwrap();
        }
        worked
    }

    fn commit(&mut self, plan: &StepPlan, sampled: &[i32]) {
        let frame = self.core.commit(plan.step, sampled).unwrap();
        let mut start = 0;
        for event in 0..frame.len() {
            let end = frame.text_ends[event] as usize;
            let key = (frame.request_ids[event], frame.sample_indices[event]);
            assert!(self.specs.contains_key(&key.0), "an event of an aborted request");
            let answer = self.answers.get_mut(&key).unwrap();
            assert_eq!(answer.finish, 0, "an event after the end");
            assert_eq!(sampled[frame.logit_indices[event] as usize], frame.token_ids[event]);
            answer.tokens.push(frame.token_ids[event]);
            answer.text.push_str(std::str::from_utf8(&frame.text[start..end]).unwrap());
            answer.finish = frame.finish_reasons[event];
            answer.stop = frame.stop_reasons[event];
            start = end;
        }
    }

    /// Run to the end; everything must have ended well and been given back.
    fn drain(&mut self) {
        let mut steps = 0;
        while self.core.has_work() {
            assert!(self.step(), "work is left and nothing runs: {:?}", self.core.stats());
            steps += 1;
            assert!(steps < 20_000, "no end: {:?}", self.core.stats());
        }
        let stats = self.core.stats();
        assert_eq!((stats.waiting, stats.deferred, stats.running, stats.blocks_used), (0, 0, 0, 0));
        assert_eq!(stats.blocks_free, stats.blocks_total);
        for (&(id, sample), answer) in &self.answers {
            if let Some(spec) = self.specs.get(&id) {
                let expected = &alone(spec, self.core.config(), self.with_text)[sample as usize];
                assert_eq!(answer, expected, "request {id} answer {sample}");
            }
        }
    }
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
        0_usize..3,
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
                group,
            )| Config {
                block_size,
                num_blocks,
                max_num_seqs,
                max_num_batched_tokens: max_num_seqs + extra,
                max_model_len,
                vocab_size: VOCAB,
                eos_token_ids: vec![0, 7],
                policy: if priority { Policy::Priority } else { Policy::Fcfs },
                aging_interval_us: 50,
                enable_prefix_caching: prefix,
                hash_seed: 5,
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
    (prompt, limits, stops, 0_u64..3, 0_u32..2).prop_map(
        |(prompt, limits, stops, seed, adapter)| {
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
                priority,
                cache_salt: if salted { vec![1] } else { Vec::new() },
                adapter,
                ..RequestSpec::default()
            }
        },
    )
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => specs().prop_map(Event::Submit),
        8 => Just(Event::Step),
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
                    let spec = RequestSpec { request_id: now as i64, arrival_us: now as u64, ..spec };
                    engine.submit(&spec);
                }
                Event::Step => drop(engine.step()),
                Event::Abort(index) if now > 0 => engine.abort(index.index(now) as i64),
                Event::Abort(_) => {}
                Event::Reset => drop(engine.core.reset_prefix_cache()),
            }
            engine.core.check_invariants().unwrap();
        }
        engine.drain();
    }
}
