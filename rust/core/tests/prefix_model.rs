//! The prefix cache against a map from whole token prefixes to blocks.

use std::collections::BTreeMap;

use octavo_core::ids::{BlockId, NodeUid};
use octavo_core::kv_cache::KvCache;
use octavo_core::kv_cache::cache_groups::CacheGroups;
use proptest::prelude::*;
use proptest::sample::Index;

const BLOCK_SIZE: usize = 2;

#[derive(Clone, Debug)]
enum Operation {
    /// A sequence of a tenant: find what is cached, take blocks for the rest, index them.
    Begin(u8, Vec<u32>),
    End(Index),
    Forget,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        // Two tokens only, so that prefixes meet often.
        6 => (0_u8..2, prop::collection::vec(0_u32..2, 0..14)).prop_map(|(salt, tokens)| Operation::Begin(salt, tokens)),
        4 => any::<Index>().prop_map(Operation::End),
        1 => Just(Operation::Forget),
    ]
}

fn full_attention(num_blocks: usize, seed: u64) -> KvCache {
    KvCache::new(num_blocks, BLOCK_SIZE, seed, CacheGroups::new(&[0], BLOCK_SIZE, 16))
}

struct Held {
    root: NodeUid,
    table: Vec<BlockId>,
}

/// (tenant, whole prefix) to block.
type Cached = BTreeMap<(u8, Vec<u32>), BlockId>;

fn begin(
    cache: &mut KvCache,
    cached: &mut Cached,
    salt: u8,
    tokens: &[u32],
) -> Result<Option<Held>, TestCaseError> {
    let root = cache.acquire_root(0, &[salt]);
    let mut table = Vec::new();
    let mut node = cache.prefix().walk(root, tokens, usize::MAX, &mut table);
    let prefixes = (1..=tokens.len() / BLOCK_SIZE)
        .map(|blocks| (salt, tokens[..blocks * BLOCK_SIZE].to_vec()));
    let expected: Vec<BlockId> =
        prefixes.clone().map_while(|prefix| cached.get(&prefix).copied()).collect();
    prop_assert_eq!(&table, &expected, "the longest cached prefix");
    for &block in &table {
        cache.acquire(block);
    }
    let needed = prefixes.clone().count() - table.len();
    if needed > cache.pool().num_free() {
        cache.release_table(&table);
        cache.release_root(root);
        return Ok(None);
    }
    for (salt, prefix) in prefixes.skip(table.len()) {
        let block = cache.take().expect("counted");
        cached.retain(|_, other| *other != block);
        let (kept, uid) = cache.index(block, node, &prefix[prefix.len() - BLOCK_SIZE..]);
        prop_assert_eq!(kept, block);
        node = uid;
        table.push(block);
        cached.insert((salt, prefix), block);
    }
    Ok(Some(Held { root, table }))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn hits_are_exactly_the_longest_prefix_in_a_map(
        num_blocks in 2_usize..24, seed in any::<u64>(), operations in prop::collection::vec(operation(), 0..80),
    ) {
        let mut cache = full_attention(num_blocks, seed);
        let (mut held, mut cached) = (Vec::<Held>::new(), Cached::new());
        for operation in operations {
            match operation {
                Operation::Begin(salt, tokens) => held.extend(begin(&mut cache, &mut cached, salt, &tokens)?),
                Operation::End(index) => if !held.is_empty() {
                    let Held { root, table } = held.remove(index.index(held.len()));
                    cache.release_table(&table);
                    cache.release_root(root);
                },
                Operation::Forget => {
                    let before = cached.len();
                    cached.retain(|_, block| held.iter().any(|held| held.table.contains(block)));
                    prop_assert_eq!(cache.forget_free(), before - cached.len());
                }
            }
            cache.pool().check().map_err(TestCaseError::fail)?;
            // Says also that no child outlives its parent: leaves are lost first.
            cache.prefix().check().map_err(TestCaseError::fail)?;
            prop_assert_eq!(cache.prefix().len(), cached.len());
        }
        for Held { root, table } in held {
            cache.release_table(&table);
            cache.release_root(root);
        }
        cache.forget_free();
        prop_assert_eq!(cache.prefix().num_roots(), 0, "a tenant's root goes with its last block");
        prop_assert_eq!(cache.pool().num_free(), num_blocks - 1);
    }
}

#[test]
fn a_copy_gives_way_to_the_canonical_block() {
    let mut cache = full_attention(4, 0);
    let root = cache.acquire_root(0, b"");
    let (first, second) = (cache.take().expect("free"), cache.take().expect("free"));
    let (kept, node) = cache.index(first, root, &[5, 6]);
    assert_eq!(kept, first);
    assert_eq!(cache.index(second, root, &[5, 6]), (first, node));
    assert!(cache.pool().is_shared(first));
    assert_eq!(cache.pool().num_free(), 2);
}

#[test]
fn tenants_and_adapters_share_nothing() {
    let mut cache = full_attention(4, 0);
    let root = cache.acquire_root(0, b"one");
    let block = cache.take().expect("free");
    cache.index(block, root, &[5, 6]);
    let found = |cache: &KvCache, root| cache.prefix().find(root, &[5, 6]).map(|found| found.0);
    for (adapter, salt, expected) in
        [(0, &b"one"[..], Some(block)), (0, b"two", None), (1, b"one", None)]
    {
        let root = cache.acquire_root(adapter, salt);
        assert_eq!(found(&cache, root), expected);
    }
}
