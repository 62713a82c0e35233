//! Priorities: who goes first, who is displaced, and that nothing starves.

mod support;

use octavo_core::{Config, Policy, RequestSpec};
use support::bench::{Bench, config, prompt};

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
