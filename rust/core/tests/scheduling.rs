//! What the scheduler promises: fairness, deferral, preemption, sharing, limits. Steps are driven by hand.

mod support;

use octavo_core::step::layout::ALIGNMENT;
use octavo_core::{Config, Core, Error, Policy, RequestSpec, Stats, StepPlan};
use support::VOCAB;

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

/// A core and its arena; every sample is the same token.
struct Bench {
    core: Core,
    arena: Vec<i32>,
}

impl Bench {
    fn new(config: Config) -> Self {
        let core = Core::new(config, Some(support::token_table())).expect("a good configuration");
        let arena = vec![0; core.layout().arena_len()];
        Self { core, arena }
    }

    fn submit(&mut self, request_id: i64, prompt: &[u32], max_tokens: usize) {
        let spec = RequestSpec {
            request_id,
            prompt: prompt.to_vec(),
            max_tokens,
            n: 1,
            ..RequestSpec::default()
        };
        self.core.submit(spec).expect("fits");
    }

    fn plan(&mut self) -> Option<StepPlan> {
        let plan = self.core.plan(&mut self.arena).expect("a step may be planned");
        self.core.check_invariants().expect("no contradiction");
        plan
    }

    fn commit(&mut self, plan: &StepPlan, token: i32) -> Vec<(i64, i32)> {
        let sampled = vec![token; plan.num_logits];
        let frame = self.core.commit(plan.step, &sampled).expect("good samples");
        let events =
            frame.request_ids.iter().copied().zip(frame.finish_reasons.iter().copied()).collect();
        self.core.check_invariants().expect("no contradiction");
        events
    }

    fn step(&mut self, token: i32) -> (StepPlan, Vec<(i64, i32)>) {
        let plan = self.plan().expect("work is left");
        let events = self.commit(&plan, token);
        (plan, events)
    }

    /// Tokens of each row of the plan made last.
    fn row_lengths(&self, plan: &StepPlan) -> Vec<i32> {
        self.array(plan, "query_start")[..=plan.num_rows]
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .collect()
    }

    fn array(&self, _plan: &StepPlan, name: &str) -> &[i32] {
        self.core.layout().slice(&self.arena, name)
    }

    fn stats(&self) -> Stats {
        self.core.stats()
    }
}

fn prompt(len: u32, family: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 3 + family * 11 + 1) % VOCAB as u32).collect()
}

#[test]
fn arrays_begin_on_cache_lines_and_the_first_counts_the_others() {
    let mut bench = Bench::new(config());
    let mut end = 0;
    for array in bench.core.layout().arrays() {
        assert_eq!(array.offset % ALIGNMENT, 0, "{}", array.name);
        assert!((end..end + ALIGNMENT).contains(&array.offset), "{}", array.name);
        end = array.offset + array.capacity;
    }
    assert!((end..end + ALIGNMENT).contains(&bench.core.layout().arena_len()));
    assert_eq!(bench.core.layout().arrays()[0].name, "counts");

    bench.submit(1, &prompt(6, 0), 3);
    bench.submit(2, &prompt(5, 1), 3);
    let (plan, _) = bench.step(1);
    let updates = plan.num_table_updates as i32;
    assert_eq!(
        bench.array(&plan, "counts"),
        [11, 2, 0, 2, updates, 0, 2, 0, 0, 6, 6, 1, 0, 0, 0, 0]
    );
    let (plan, _) = bench.step(1);
    assert_eq!(bench.array(&plan, "counts")[..4], [2, 2, 2, 2]);
    assert_eq!(bench.array(&plan, "counts")[11], 2);
}

#[test]
fn a_long_prompt_leaves_half_of_a_step_to_those_behind_it() {
    let mut bench = Bench::new(config());
    bench.submit(1, &prompt(60, 0), 2);
    bench.submit(2, &prompt(5, 1), 2);
    let (plan, events) = bench.step(1);
    assert_eq!(
        bench.row_lengths(&plan),
        [11, 5],
        "what the short prompt leaves goes back to the long one"
    );
    assert_eq!(events, [(2, 0)], "the short request has its first token at once");
    let (plan, _) = bench.step(1);
    assert_eq!(
        (plan.num_decode_rows, bench.row_lengths(&plan)),
        (1, vec![1, 15]),
        "decode rows come first"
    );
}

#[test]
fn a_lone_prompt_takes_the_whole_budget() {
    let mut bench = Bench::new(config());
    bench.submit(1, &prompt(40, 0), 2);
    let lengths: Vec<_> = (0..3)
        .map(|_| {
            let (plan, _) = bench.step(1);
            bench.row_lengths(&plan)
        })
        .collect();
    assert_eq!(lengths, [[16], [16], [8]]);
}

#[test]
fn requests_with_one_new_prefix_compute_it_once() {
    let mut bench = Bench::new(config());
    for id in 0..4 {
        let mut tokens = prompt(24, 0);
        tokens.push(30 + id as u32);
        bench.submit(id, &tokens, 2);
    }
    let (plan, _) = bench.step(1);
    assert_eq!((plan.num_rows, bench.stats().deferred), (1, 3));
    let (plan, _) = bench.step(1);
    assert_eq!(
        (plan.num_rows, bench.stats().deferred, bench.stats().waiting),
        (1, 0, 3),
        "24 tokens are there"
    );
    let (plan, _) = bench.step(1);
    assert_eq!(bench.row_lengths(&plan), [1, 1, 1, 1], "each computes its last token alone");
    let stats = bench.stats();
    assert_eq!((stats.prompt_tokens, stats.cached_prompt_tokens), (100, 72));
    assert_eq!((stats.prefix_query_tokens, stats.prefix_hit_tokens), (100, 72));
}

#[test]
fn deferred_requests_go_on_when_the_one_they_wait_for_is_aborted() {
    let mut bench = Bench::new(config());
    for id in 0..3 {
        bench.submit(id, &prompt(40, 0), 2);
    }
    bench.step(1);
    assert_eq!(bench.stats().deferred, 2);
    assert!(bench.core.abort(0));
    assert_eq!((bench.stats().deferred, bench.stats().waiting), (0, 2));
    let (plan, _) = bench.step(1);
    assert_eq!((plan.num_rows, bench.stats().deferred), (1, 1), "the next one computes it");
    assert_eq!(bench.stats().prefix_hit_tokens, 16, "and begins with what the first had done");
}

#[test]
fn one_prompt_serves_n_answers_and_a_shared_block_is_copied_on_write() {
    let mut bench = Bench::new(config());
    let spec = RequestSpec {
        request_id: 1,
        prompt: prompt(6, 0),
        max_tokens: 3,
        n: 3,
        ..RequestSpec::default()
    };
    bench.core.submit(spec).expect("fits");
    let (plan, events) = bench.step(1);
    assert_eq!(
        (plan.num_tokens, plan.num_logits, plan.num_param_updates, events.len()),
        (6, 3, 3, 3)
    );
    let stats = bench.stats();
    assert_eq!((stats.blocks_used, stats.slots_held), (2, 8));
    assert_eq!(stats.slots_unfilled, 0, "the block with room is shared, and will be copied");
    let (plan, _) = bench.step(1);
    assert_eq!(
        (plan.num_decode_rows, plan.num_block_copies),
        (3, 2),
        "the last one writes in place"
    );
    let stats = bench.stats();
    assert_eq!((stats.blocks_used, stats.slots_held, stats.slots_unfilled), (4, 16, 3));
    let (_, events) = bench.step(1);
    assert_eq!(events, [(1, 2), (1, 2), (1, 2)]);
    let stats = bench.stats();
    assert_eq!((stats.finished_length, stats.blocks_used, stats.slots_unfilled), (3, 0, 0));
    assert_eq!((stats.blocks_cached, stats.blocks_free_cached), (2, 2));
}

#[test]
fn preemption_takes_the_one_that_loses_least_and_it_comes_back_first() {
    let mut bench = Bench::new(Config { num_blocks: 8, max_model_len: 28, ..config() });
    bench.submit(1, &prompt(11, 0), 12);
    bench.submit(2, &prompt(6, 1), 12);
    bench.step(1);
    while bench.stats().preemptions == 0 {
        bench.step(1);
    }
    bench.submit(3, &prompt(2, 2), 2);
    assert_eq!((bench.stats().waiting, bench.stats().running), (2, 1));
    let mut seen = Vec::new();
    while bench.core.has_work() {
        seen.extend(bench.step(1).1.into_iter().map(|event| event.0));
    }
    let first = |id| seen.iter().position(|&other| other == id);
    assert!(first(2) < first(3), "the preempted one is before the newcomer");
    assert_eq!(bench.stats().generated_tokens, 26, "no token is drawn twice");
}

#[test]
fn a_request_of_high_priority_passes_others_but_ages_stop_it_from_starving_them() {
    let config =
        Config { policy: Policy::Priority, aging_interval_us: 100, max_num_seqs: 1, ..config() };
    let mut bench = Bench::new(config);
    let mut submit = |request_id, arrival_us, priority| {
        let spec = RequestSpec {
            request_id,
            arrival_us,
            priority,
            prompt: prompt(3, request_id as u32),
            max_tokens: 1,
            n: 1,
            ..RequestSpec::default()
        };
        bench.core.submit(spec).expect("fits");
    };
    submit(1, 0, 5);
    submit(2, 10, 1);
    submit(3, 20, 0);
    submit(4, 20, 0);
    submit(5, 600, 0);
    let order: Vec<i64> = (0..5).map(|_| bench.step(1).1[0].0).collect();
    assert_eq!(order, [3, 4, 2, 1, 5], "five intervals of waiting are worth five priorities");
}

/// A core under the priority policy, where 100 us of waiting are worth one priority.
fn with_priorities(config: Config) -> Bench {
    Bench::new(Config { policy: Policy::Priority, aging_interval_us: 100, ..config })
}

/// Submit a prompt of `len` tokens that arrives at a time in microseconds.
fn submit_at(
    bench: &mut Bench,
    request_id: i64,
    arrival_us: u64,
    priority: i32,
    len: u32,
    max_tokens: usize,
) {
    let prompt = prompt(len, request_id as u32);
    let spec = RequestSpec {
        request_id,
        arrival_us,
        priority,
        prompt,
        max_tokens,
        n: 1,
        ..RequestSpec::default()
    };
    bench.core.submit(spec).expect("fits");
}

#[test]
fn an_urgent_request_takes_the_place_of_the_least_urgent_when_slots_are_full() {
    let mut bench = with_priorities(Config { max_num_seqs: 3, ..config() });
    for (id, priority) in [(1, 1), (2, 2), (3, 1)] {
        submit_at(&mut bench, id, id as u64, priority, 4, 9);
    }
    for _ in 0..3 {
        bench.step(1);
    }
    submit_at(&mut bench, 4, 10, 0, 4, 2);
    let (_, events) = bench.step(1);
    let ids: Vec<i64> = events.iter().map(|event| event.0).collect();
    assert_eq!(ids, [1, 3, 4], "the urgent one has its first token in the next step");
    assert_eq!((bench.stats().preemptions, bench.stats().waiting), (1, 1));
    while bench.core.has_work() {
        bench.step(1);
    }
    assert_eq!((bench.stats().generated_tokens, bench.stats().preemptions), (29, 1));
}

#[test]
fn an_urgent_request_takes_the_blocks_of_the_least_urgent() {
    let mut bench = with_priorities(Config {
        num_blocks: 12,
        max_model_len: 40,
        max_num_batched_tokens: 40,
        ..config()
    });
    submit_at(&mut bench, 1, 1, 5, 15, 9);
    submit_at(&mut bench, 2, 2, 1, 15, 9);
    bench.step(1);
    bench.step(1);
    submit_at(&mut bench, 3, 3, 0, 16, 2);
    let (_, events) = bench.step(1);
    assert!(
        events.contains(&(3, 0)) && events.contains(&(2, 0)) && events.len() == 2,
        "{events:?}"
    );
    while bench.core.has_work() {
        bench.step(1);
    }
    assert_eq!(bench.stats().generated_tokens, 20);
}

#[test]
fn a_request_displaces_none_of_its_own_priority_nor_one_that_has_aged() {
    for (priority, arrival_us) in [(1, 0), (2, 0), (0, 250)] {
        let mut bench = with_priorities(Config { max_num_seqs: 1, ..config() });
        submit_at(&mut bench, 1, 100, 1, 4, 5);
        bench.step(1);
        // Priority 0 at 250 us comes after priority 1 at 100 us, which has waited more than one interval of 100 us.
        submit_at(&mut bench, 2, arrival_us, priority, 4, 1);
        bench.step(1);
        assert_eq!((bench.stats().preemptions, bench.stats().waiting), (0, 1), "{priority}");
    }
}

#[test]
fn nothing_is_displaced_for_a_request_that_would_not_fit_all_the_same() {
    let mut bench = with_priorities(Config { num_blocks: 12, max_model_len: 40, ..config() });
    submit_at(&mut bench, 1, 1, 0, 25, 3);
    submit_at(&mut bench, 2, 2, 5, 3, 9);
    for _ in 0..3 {
        bench.step(1);
    }
    submit_at(&mut bench, 3, 3, 1, 30, 2);
    bench.step(1);
    assert_eq!((bench.stats().preemptions, bench.stats().waiting), (0, 1));
}

#[test]
fn nothing_starves_under_a_steady_stream_of_urgent_requests() {
    let config = Config {
        policy: Policy::Priority,
        aging_interval_us: 10,
        max_num_seqs: 2,
        num_blocks: 9,
        max_model_len: 32,
        ..config()
    };
    let mut bench = Bench::new(config);
    bench
        .core
        .submit(RequestSpec {
            request_id: -1,
            prompt: prompt(9, 5),
            max_tokens: 9,
            n: 1,
            priority: 20,
            ..RequestSpec::default()
        })
        .expect("fits");
    for now in 0..1000 {
        bench
            .core
            .submit(RequestSpec {
                request_id: now,
                arrival_us: now as u64,
                prompt: prompt(5, now as u32),
                max_tokens: 4,
                n: 1,
                ..RequestSpec::default()
            })
            .expect("fits");
        if bench.step(1).1.contains(&(-1, 2)) {
            return;
        }
    }
    panic!("the patient request never ended");
}

#[test]
fn steps_are_planned_two_ahead_and_committed_in_order() {
    let mut bench = Bench::new(config());
    bench.submit(1, &prompt(3, 0), 5);
    let first = bench.plan().expect("work");
    let second = bench.plan().expect("work");
    assert_eq!(bench.array(&second, "token_ids")[0], -1, "the token is on the device");
    assert_eq!(bench.core.plan(&mut bench.arena), Err(Error::TooManyOpenSteps));
    assert_eq!(
        bench.core.commit(second.step, &[1]).unwrap_err(),
        Error::NotOldestStep { step: second.step }
    );
    let short = Error::ShortBuffer { name: "sampled", len: 0, needed: 1 };
    assert_eq!(bench.core.commit(first.step, &[]).unwrap_err(), short);
    let bad = |token| Error::InvalidSample { token, place: 0, vocab_size: VOCAB };
    assert_eq!(bench.core.commit(first.step, &[-1]).unwrap_err(), bad(-1));
    assert_eq!(bench.core.commit(first.step, &[VOCAB as i32]).unwrap_err(), bad(VOCAB as i32));
    assert_eq!(bench.commit(&first, 1), [(1, 0)], "a refused commit changed nothing");
    assert_eq!((first.arena, second.arena), (1, 2));
    bench.commit(&second, 0);
    assert!(!bench.core.has_work());
}

#[test]
fn tokens_in_flight_of_an_ended_or_aborted_answer_are_dropped() {
    let mut bench = Bench::new(config());
    bench.submit(1, &prompt(3, 0), 9);
    bench.submit(2, &prompt(3, 1), 9);
    let first = bench.plan().expect("work");
    let second = bench.plan().expect("work");
    let sampled = [0, 1];
    let frame = bench.core.commit(first.step, &sampled).expect("good samples");
    assert_eq!(
        (frame.finish_reasons.clone(), frame.stop_reasons.clone()),
        (vec![1, 0], vec![i32::MIN; 2])
    );
    assert!(bench.core.abort(2) && !bench.core.abort(2) && !bench.core.abort(1));
    bench.core.check_invariants().expect("no contradiction");
    assert_eq!(bench.stats().blocks_used, 0, "free for the next plan");
    assert!(bench.core.has_work(), "a step is in flight");
    assert_eq!(bench.commit(&second, 1), []);
    assert!(!bench.core.has_work());
}

#[test]
fn an_answer_known_to_end_is_not_planned_again() {
    let mut bench = Bench::new(config());
    bench.submit(1, &prompt(3, 0), 2);
    let first = bench.plan().expect("work");
    let second = bench.plan().expect("work");
    bench.commit(&first, 1);
    assert_eq!(bench.plan(), None);
    assert_eq!(bench.commit(&second, 1), [(1, 2)]);
}

#[test]
fn end_tokens_are_held_back_below_the_minimum() {
    let mut bench = Bench::new(config());
    let spec = RequestSpec {
        request_id: 1,
        prompt: prompt(3, 0),
        max_tokens: 9,
        min_tokens: 2,
        n: 2,
        stop_token_ids: vec![4, 5],
        ..RequestSpec::default()
    };
    bench.core.submit(spec).expect("fits");
    let (plan, _) = bench.step(1);
    assert_eq!(&bench.array(&plan, "bias_logits")[..plan.num_biases], [0, 0, 0, 1, 1, 1]);
    assert_eq!(&bench.array(&plan, "bias_tokens")[..plan.num_biases], [0, 4, 5, 0, 4, 5]);
    let banned = f32::NEG_INFINITY.to_bits() as i32;
    assert_eq!(&bench.array(&plan, "bias_values")[..plan.num_biases], [banned; 6]);
    let (plan, _) = bench.step(1);
    assert_eq!(plan.num_biases, 6);
    let (plan, events) = bench.step(5);
    assert_eq!((plan.num_biases, events), (0, vec![(1, 1), (1, 1)]));
    assert_eq!(bench.core.output().stop_reasons, [5, 5]);
}

#[test]
fn decode_rows_that_share_blocks_are_grouped() {
    let mut bench =
        Bench::new(Config { group_min_blocks: 2, max_num_batched_tokens: 40, ..config() });
    for (id, family) in [(1, 0), (2, 1), (3, 0)] {
        let mut tokens = prompt(12, family);
        tokens.push(id as u32);
        bench.submit(id, &tokens, 9);
    }
    bench.step(1);
    bench.step(1);
    let (plan, _) = bench.step(1);
    assert_eq!((plan.num_decode_rows, plan.num_groups), (3, 1));
    assert_eq!(bench.array(&plan, "group_starts")[..2], [0, 2]);
    assert_eq!(bench.array(&plan, "group_rows")[..2], [0, 2]);
    assert_eq!(bench.array(&plan, "group_blocks")[0], 3);
}

#[test]
fn groups_grow_when_two_answers_write_the_same() {
    let mut bench = Bench::new(Config { group_min_blocks: 1, ..config() });
    bench.submit(1, &prompt(8, 0), 12);
    bench.submit(2, &prompt(8, 0), 12);
    let mut shared = Vec::new();
    while bench.core.has_work() {
        let (plan, _) = bench.step(1);
        if plan.num_decode_rows == 2 {
            assert_eq!(plan.num_groups, 1);
            shared.push(bench.array(&plan, "group_blocks")[0]);
        }
    }
    assert!(
        shared.is_sorted() && shared.first() == Some(&2) && shared.last() == Some(&4),
        "{shared:?}"
    );
}

#[test]
fn no_more_requests_wait_for_a_prefix_than_could_run() {
    let mut bench = Bench::new(config());
    for id in 0..20 {
        bench.submit(id, &prompt(40, 0), 1);
    }
    bench.step(1);
    assert_eq!((bench.stats().running, bench.stats().deferred, bench.stats().waiting), (1, 4, 15));
    while bench.core.has_work() {
        bench.step(1);
    }
    assert_eq!(bench.stats().finished_length, 20);
}

#[test]
fn rows_whose_biases_do_not_fit_wait_for_the_next_step() {
    let mut bench = Bench::new(Config {
        max_num_seqs: 32,
        max_num_batched_tokens: 64,
        num_blocks: 99,
        vocab_size: 400,
        max_biases: 0,
        ..config()
    });
    for request_id in 0..32 {
        let spec = RequestSpec {
            request_id,
            prompt: prompt(2, request_id as u32),
            max_tokens: 4,
            min_tokens: 4,
            n: 1,
            logit_bias: (5..305).map(|token| (token, 1.0)).collect(),
            ..RequestSpec::default()
        };
        bench.core.submit(spec).expect("fits");
    }
    // Each asks for 300 and its end token.
    let capacity = bench.core.config().bias_capacity();
    let (mut steps, mut rows) = (0, 0);
    while bench.core.has_work() {
        let (plan, _) = bench.step(1);
        assert!(plan.num_biases <= capacity);
        (steps, rows) = (steps + 1, rows.max(plan.num_rows));
    }
    assert_eq!((bench.stats().finished_length, rows), (32, capacity / 301));
    assert!(steps < 50, "{steps} steps");
}

#[test]
fn no_copy_of_a_step_writes_what_another_reads() {
    let mut bench = Bench::new(Config {
        max_num_seqs: 8,
        max_num_batched_tokens: 128,
        num_blocks: 36,
        max_table_updates: 0,
        ..config()
    });
    for (request_id, len, n) in [(1, 57, 6), (2, 58, 2)] {
        let prompt = prompt(len, request_id as u32);
        bench
            .core
            .submit(RequestSpec { request_id, prompt, max_tokens: 4, n, ..RequestSpec::default() })
            .expect("fits");
    }
    bench.step(1);
    // The sixth answer's table no longer fits this step's updates. Its block was copied for the others, and is the only
    // one that can come free for the next request's copy.
    let (plan, _) = bench.step(1);
    assert_eq!(bench.stats().preemptions, 2);
    let sources = &bench.array(&plan, "copy_sources")[..plan.num_block_copies];
    let destinations = &bench.array(&plan, "copy_destinations")[..plan.num_block_copies];
    assert_eq!(sources.len(), 5);
    assert!(
        !destinations.iter().any(|block| sources.contains(block)),
        "{sources:?} to {destinations:?}"
    );
    while bench.core.has_work() {
        bench.step(1);
    }
    assert_eq!(bench.stats().finished_length, 8);
}

#[test]
fn rows_that_find_a_long_prefix_cached_start_in_one_step() {
    for (max_table_updates, at_once) in [(0, false), (1 << 17, true)] {
        let mut bench = Bench::new(Config {
            max_num_seqs: 8,
            max_num_batched_tokens: 128,
            max_model_len: 480,
            num_blocks: 200,
            max_table_updates,
            ..config()
        });
        bench.submit(0, &prompt(401, 0), 1);
        while bench.core.has_work() {
            bench.step(1);
        }
        for id in 1..=8 {
            bench.submit(id, &prompt(401, 0), 1);
        }
        let (plan, _) = bench.step(1);
        assert_eq!(plan.num_rows == 8, at_once, "{} rows", plan.num_rows);
        while bench.core.has_work() {
            bench.step(1);
        }
        assert_eq!(bench.stats().finished_length, 9);
    }
}

#[test]
fn parameters_reach_the_device_with_the_first_row() {
    let mut bench = Bench::new(config());
    let mut spec = RequestSpec {
        request_id: 1,
        prompt: prompt(5, 0),
        max_tokens: 3,
        n: 1,
        adapter: 6,
        ..RequestSpec::default()
    };
    spec.sampling = octavo_core::Sampling {
        temperature: 0.5,
        top_p: 0.25,
        top_k: 7,
        min_p: 0.125,
        repetition_penalty: 2.0,
        presence_penalty: -1.0,
        frequency_penalty: 1.5,
        seed: 0x1234_5678_9abc_def0,
        logprobs: Some(3),
    };
    bench.core.submit(spec).expect("fits");
    let (plan, _) = bench.step(1);
    assert_eq!((plan.num_param_updates, bench.array(&plan, "param_slots")[0]), (1, 0));
    let values = &bench.array(&plan, "param_values")[..16];
    let floats: Vec<f32> = values[..6].iter().map(|&bits| f32::from_bits(bits as u32)).collect();
    assert_eq!(floats, [0.5, 0.25, 0.125, 2.0, -1.0, 1.5]);
    assert_eq!(values[6..], [7, 0x9abc_def0_u32 as i32, 0x1234_5678, 0, 3, 3, 5, 6, 0, 0]);
    assert_eq!(bench.step(1).0.num_param_updates, 0);
    let history: Vec<u32> = prompt(5, 0).into_iter().chain([1, 1]).collect();
    assert_eq!(bench.core.history(octavo_core::ids::Slot(0)), Some(&history[..]));
    assert_eq!(bench.core.history(octavo_core::ids::Slot(99)), None);
}
