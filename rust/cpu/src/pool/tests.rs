use super::testing::Turn;
use super::*;
use std::time::Duration;

fn count_items(items: usize) {
    let counts: Vec<_> = (0..items).map(|_| AtomicUsize::new(0)).collect();
    parallel_for(items, &|item| {
        counts[item].fetch_add(1, Ordering::Relaxed);
    });
    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
}

#[test]
fn every_item_runs_once_at_every_size_and_thread_count() {
    let _turn = Turn::with_threads(0);
    for threads in [1, 2, 3, 8, 2, 1] {
        set_num_threads(threads);
        for items in [0, 1, 2, 3, 7, 100, 1000] {
            count_items(items);
        }
    }
}

#[test]
fn many_small_loops_lose_nothing() {
    let _turn = Turn::with_threads(3);
    for round in 0..20_000_usize {
        let sum = AtomicUsize::new(0);
        parallel_for(5, &|item| {
            sum.fetch_add(item + round, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 10 + 5 * round);
    }
}

#[test]
fn workers_that_sleep_are_woken() {
    let _turn = Turn::with_threads(2);
    for _ in 0..3 {
        // Each item waits for the other: only two threads can finish this.
        let met = AtomicUsize::new(0);
        parallel_for(2, &|_| {
            met.fetch_add(1, Ordering::SeqCst);
            while met.load(Ordering::SeqCst) < 2 {
                thread::yield_now();
            }
        });
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_survives() {
    let _turn = Turn::with_threads(4);
    for culprit in [0, 1, 50, 99] {
        let outcome = catch_unwind(|| {
            parallel_for(100, &|item| assert!(item != culprit, "item {item} is bad"));
        });
        let message = *outcome.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(message, format!("item {culprit} is bad"));
        count_items(100);
    }
}

#[test]
fn loops_within_loops_run_on_their_own_thread() {
    let _turn = Turn::with_threads(3);
    let total = AtomicUsize::new(0);
    parallel_for(10, &|_| {
        let here = thread::current().id();
        parallel_for(10, &|_| {
            assert_eq!(thread::current().id(), here);
            total.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(total.into_inner(), 100);
}

#[test]
fn callers_from_several_threads_and_changing_sizes() {
    let _turn = Turn::with_threads(2);
    thread::scope(|scope| {
        for caller in 0..4 {
            scope.spawn(move || {
                for round in 0..300 {
                    if caller == 0 && round % 50 == 0 {
                        set_num_threads(1 + round / 50 % 4);
                    }
                    count_items(1 + round % 17);
                }
            });
        }
    });
}
