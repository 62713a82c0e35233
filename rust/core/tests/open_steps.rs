//! Steps that are planned before the one ahead is committed, and how answers end.

mod support;

use octavo_core::{Error, RequestSpec};
use support::VOCAB;
use support::bench::{Bench, config, prompt};

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
