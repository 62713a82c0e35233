//! What the scheduler promises: fairness, deferral, sharing, groups, limits. Steps are driven by hand.

mod support;

use octavo_core::step::layout::ALIGNMENT;
use octavo_core::{Config, RequestSpec};
use support::bench::{Bench, config, prompt};

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
