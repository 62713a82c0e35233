//! Cache groups: a sliding window holds the blocks it needs and gives the others back, prefix hits are valid in every
//! group. The device checks what every row reads, and `drain` compares every answer with the one given alone.

mod support;

use octavo_core::kv_cache::cache_groups::CacheGroups;
use octavo_core::{Config, Core, Error, RequestSpec};
use support::VOCAB;
use support::engine::Engine;

fn config(windows: &[usize]) -> Config {
    Config {
        block_size: 4,
        num_blocks: 101,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 128,
        windows: windows.to_vec(),
        vocab_size: VOCAB,
        ..Config::default()
    }
}

fn request(request_id: i64, prompt_len: u32, max_tokens: usize) -> RequestSpec {
    let prompt = (0..prompt_len).map(|i| (i * 7 + i / 11 + 3) % VOCAB as u32).collect();
    RequestSpec { request_id, prompt, max_tokens, n: 1, ..RequestSpec::default() }
}

/// The most blocks that a request holds while it runs alone.
fn most_blocks(windows: &[usize], spec: &RequestSpec) -> u64 {
    let mut engine = Engine::new(config(windows), 1, false);
    engine.submit(spec);
    let mut most = 0;
    while engine.step() {
        most = most.max(engine.core.stats().blocks_used);
    }
    engine.drain();
    most
}

#[test]
fn a_window_gives_its_old_blocks_back() {
    // 100 tokens are 25 blocks. A window of 8 tokens and a row of up to 16 span at most 7 blocks.
    let prompt = request(1, 99, 2);
    assert_eq!(most_blocks(&[0], &prompt), 25);
    assert_eq!(most_blocks(&[8], &prompt), 7);
    assert_eq!(most_blocks(&[0, 8, 8], &prompt), 25 + 7 + 7);
    // While decoding, 8 tokens lie in at most 3 blocks; one more may wait until its tokens are indexed.
    let mut engine = Engine::new(config(&[8, 0]), 1, false);
    engine.submit(&request(1, 4, 90));
    for _ in 0..80 {
        engine.step();
    }
    let tokens = 4 + engine.core.stats().generated_tokens as usize;
    let sliding = engine.core.stats().blocks_used as usize - (tokens + 1).div_ceil(4);
    assert!((2..=4).contains(&sliding), "{sliding} blocks for a window of 8 tokens");
    engine.drain();
}

#[test]
fn a_prefix_is_found_beyond_the_window() {
    for windows in [&[0, 8][..], &[8, 0], &[0, 8, 20, 0]] {
        let mut engine = Engine::new(config(windows), 1, false);
        engine.submit(&request(1, 60, 9));
        engine.drain();
        engine.submit(&request(2, 100, 9));
        engine.drain();
        // All 15 full blocks of the first prompt, although its answer moved the window on.
        assert_eq!(engine.core.stats().prefix_hit_tokens, 60, "{windows:?}");
    }
}

#[test]
fn a_prefix_without_the_blocks_of_its_window_is_not_used() {
    let mut engine = Engine::new(Config { num_blocks: 31, ..config(&[0, 8]) }, 0, false);
    engine.submit(&request(1, 60, 1));
    engine.drain();
    let before = engine.core.stats();
    // Blocks of other prompts take the place of those that were released first.
    let other = RequestSpec { prompt: vec![1; 33], ..request(2, 0, 1) };
    engine.submit(&other);
    engine.drain();
    let stats = engine.core.stats();
    assert!(stats.evictions > 0, "{stats:?}");
    engine.submit(&request(3, 60, 5));
    engine.drain();
    let found = engine.core.stats().prefix_hit_tokens - before.prefix_hit_tokens;
    assert!(found.is_multiple_of(4) && found < 60, "{found} tokens");
}

#[test]
fn more_sequences_run_with_windows_than_with_full_attention() {
    let running = |windows: &[usize]| {
        let mut engine = Engine::new(Config { num_blocks: 60, ..config(windows) }, 0, false);
        for id in 0..4 {
            engine.submit(&RequestSpec { cache_salt: vec![id as u8], ..request(id, 80, 9) });
        }
        let mut most = 0;
        while engine.step() {
            most = most.max(engine.core.stats().running);
        }
        engine.drain();
        most
    };
    assert_eq!((running(&[0]), running(&[8])), (2, 4));
}

#[test]
fn every_group_has_its_tables_and_its_places() {
    let mut core = Core::new(config(&[0, 8]), None).expect("a good configuration");
    let mut arena = vec![0; core.layout().arena_len()];
    core.submit(request(1, 6, 2)).expect("fits");
    let plan = core.plan(&mut arena).expect("may be planned").expect("work is left");
    let array = |name, count: usize| &core.layout().slice(&arena, name)[..count];
    let updates = plan.num_table_updates;
    // Slot 0 of group 0, then slot 0 of group 1 behind the four slots of group 0.
    assert_eq!(array("table_slots", updates), [0, 0, 4, 4]);
    assert_eq!(array("table_indices", updates), [0, 1, 0, 1]);
    let blocks = array("table_blocks", updates);
    let places = |group: usize| -> Vec<i32> {
        (0..6).map(|i| blocks[group * 2 + i / 4] * 4 + i as i32 % 4).collect()
    };
    let mapping = core.layout().slice(&arena, "slot_mapping");
    assert_eq!(mapping.len(), 2 * 16);
    assert_eq!((&mapping[..6], &mapping[16..22]), (&places(0)[..], &places(1)[..]));
}

#[test]
fn a_sequence_that_fits_its_windows_is_accepted() {
    let groups = CacheGroups::new(&[0, 8], 4, 16);
    assert_eq!([3, 40, 100].map(|tokens| groups.max_blocks_per_sequence(tokens)), [2, 17, 32]);
    let mut core = Core::new(Config { num_blocks: 33, ..config(&[0, 8]) }, None).expect("good");
    core.submit(request(1, 90, 11)).expect("100 tokens are written, in 32 blocks");
    assert_eq!(
        core.submit(request(2, 90, 12)).expect_err("101 tokens need 33 blocks"),
        Error::CapacityExceeded { tokens: 101, needed: 33, blocks: 32 }
    );
    for windows in [vec![], vec![0; 65], vec![usize::MAX]] {
        let error = Core::new(Config { windows, ..config(&[0]) }, None).expect_err("cannot work");
        assert!(matches!(error, Error::Config { field: "windows", .. }), "{error}");
    }
}
