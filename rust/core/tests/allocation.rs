//! Steady decoding allocates nothing, and a hundred thousand requests leave no memory behind.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use octavo_core::{Config, Core, RequestSpec};

/// The system's allocator, counting.
struct Counting;

// Of the thread that asks: the test's harness has one of its own, which may allocate at any time.
thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<isize> = const { Cell::new(0) };
}

#[expect(unsafe_code, reason = "an allocator cannot be safe")]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        BYTES.set(BYTES.get() + layout.size() as isize);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.set(BYTES.get() - layout.size() as isize);
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn step(core: &mut Core, arena: &mut [i32], sampled: &[i32]) {
    let plan = core.plan(arena).expect("a step may be planned").expect("work is left");
    core.commit(plan.step, sampled).expect("good samples");
}

#[test]
fn steady_decode_allocates_nothing_and_requests_leave_nothing() {
    let config =
        Config { num_blocks: 4097, max_num_seqs: 32, group_min_blocks: 1, ..Config::default() };
    let mut core = Core::new(config, None).expect("a good configuration");
    let mut arena = vec![0; core.layout().arena_len()];
    let sampled = vec![7; 32];
    let request = |request_id: i64, max_tokens| RequestSpec {
        request_id,
        prompt: (0..40).map(|i| (i + request_id as u32 % 5) % 32_000).collect(),
        max_tokens,
        n: 1,
        cache_salt: (request_id % 1000).to_le_bytes().to_vec(),
        ..RequestSpec::default()
    };
    for id in 0..40 {
        core.submit(request(id, 500)).expect("fits");
    }
    for _ in 0..60 {
        step(&mut core, &mut arena, &sampled);
    }
    assert_eq!((core.stats().running, core.stats().waiting), (32, 8));
    let before = ALLOCATIONS.get();
    for _ in 0..300 {
        step(&mut core, &mut arena, &sampled);
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    while core.has_work() {
        step(&mut core, &mut arena, &sampled);
    }

    let mut bytes = Vec::new();
    for round in 0..3 {
        for id in 0..34_000 {
            core.submit(request(id, 2)).expect("fits");
            if id % 32 == 31 {
                while core.has_work() {
                    step(&mut core, &mut arena, &sampled);
                }
            }
        }
        while core.has_work() {
            step(&mut core, &mut arena, &sampled);
        }
        core.check_invariants().expect("no contradiction");
        core.reset_prefix_cache();
        assert_eq!(core.stats().blocks_free, core.stats().blocks_total, "round {round}");
        bytes.push(BYTES.get());
    }
    assert!(bytes[2] - bytes[0] < 4096, "memory grows: {bytes:?}");
}
