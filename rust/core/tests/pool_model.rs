//! The block pool against counts in a map and a free list in a vector.

use std::collections::BTreeMap;

use octavo_core::ids::BlockId;
use octavo_core::kv_cache::block_pool::{BlockPool, BlockState};
use proptest::prelude::*;
use proptest::sample::Index;

#[derive(Clone, Debug)]
enum Operation {
    Take,
    Acquire(Index),
    Release(Index, bool),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => Just(Operation::Take),
        2 => any::<Index>().prop_map(Operation::Acquire),
        4 => any::<(Index, bool)>().prop_map(|(index, keep)| Operation::Release(index, keep)),
    ]
}

/// The pool by the plainest means.
struct Model {
    free: Vec<u32>,
    counts: BTreeMap<u32, u32>,
}

impl Model {
    fn put_back(&mut self, block: u32, keep: bool) {
        if keep {
            self.free.push(block);
        } else {
            self.free.insert(0, block);
        }
    }
}

fn pick(index: Index, from: impl Iterator<Item = u32>) -> Option<u32> {
    let blocks: Vec<u32> = from.collect();
    (!blocks.is_empty()).then(|| *index.get(&blocks))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pool_agrees_with_a_map_and_a_vector(
        num_blocks in 1_usize..20, operations in prop::collection::vec(operation(), 0..200),
    ) {
        let mut pool = BlockPool::new(num_blocks);
        let mut model = Model {
            free: (1..num_blocks as u32).collect(), counts: BTreeMap::new(),
        };
        for operation in operations {
            match operation {
                Operation::Take => {
                    let expected = (!model.free.is_empty()).then(|| model.free.remove(0));
                    prop_assert_eq!(pool.take(), expected.map(BlockId));
                    if let Some(block) = expected {
                        model.counts.insert(block, 1);
                    }
                }
                Operation::Acquire(index) => {
                    if let Some(block) = pick(index, 1..num_blocks as u32) {
                        prop_assert_eq!(pool.acquire(BlockId(block)), !model.counts.contains_key(&block));
                        model.free.retain(|&free| free != block);
                        *model.counts.entry(block).or_insert(0) += 1;
                    }
                }
                Operation::Release(index, keep) => {
                    if let Some(block) = pick(index, model.counts.keys().copied()) {
                        let count = model.counts[&block] - 1;
                        prop_assert_eq!(pool.release(BlockId(block), keep), count == 0);
                        if count == 0 {
                            model.counts.remove(&block);
                            model.put_back(block, keep);
                        } else {
                            model.counts.insert(block, count);
                        }
                    }
                }
            }
            pool.check().map_err(TestCaseError::fail)?;
            prop_assert_eq!(pool.free_blocks().map(|block| block.0).collect::<Vec<_>>(), model.free.clone());
            prop_assert_eq!(pool.num_free(), model.free.len());
            for block in 1..num_blocks as u32 {
                let expected = match model.counts.get(&block) {
                    Some(&count) => BlockState::Referenced(count),
                    None => BlockState::Free,
                };
                prop_assert_eq!(pool.state(BlockId(block)), expected);
                prop_assert_eq!(pool.is_shared(BlockId(block)), model.counts.get(&block).is_some_and(|&n| n > 1));
            }
        }
    }
}

#[test]
#[should_panic(expected = "only a referenced block can be released")]
fn a_free_block_cannot_be_released() {
    BlockPool::new(3).release(BlockId(1), true);
}
