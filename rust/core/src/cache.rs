//! The KV cache's bookkeeping: the block pool and the prefix cache, kept in step.

use crate::block::{BlockId, NodeUid};
use crate::pool::{BlockPool, BlockState};
use crate::prefix::PrefixCache;

/// Block pool and prefix cache together.
#[derive(Clone, Debug)]
pub struct KvCache {
    pool: BlockPool,
    prefix: PrefixCache,
    /// Blocks taken from the free list for new content.
    pub(crate) allocations: u64,
    /// Blocks that came back to the free list.
    pub(crate) frees: u64,
    /// Prefixes forgotten because their block was taken.
    pub(crate) evictions: u64,
    /// Free blocks that hold a prefix.
    pub(crate) free_cached: usize,
}

impl KvCache {
    /// An empty cache of `num_blocks` blocks, the null block included.
    #[must_use]
    pub fn new(num_blocks: usize, block_size: usize, seed: u64) -> Self {
        Self {
            pool: BlockPool::new(num_blocks),
            prefix: PrefixCache::new(num_blocks, block_size, seed),
            allocations: 0,
            frees: 0,
            evictions: 0,
            free_cached: 0,
        }
    }

    /// The pool, to read.
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The prefix cache, to read.
    #[must_use]
    pub fn prefix(&self) -> &PrefixCache {
        &self.prefix
    }

    /// See [`PrefixCache::acquire_root`].
    pub fn acquire_root(&mut self, adapter: u32, salt: &[u8]) -> NodeUid {
        self.prefix.acquire_root(adapter, salt)
    }

    /// See [`PrefixCache::release_root`].
    pub fn release_root(&mut self, root: NodeUid) {
        self.prefix.release_root(root);
    }

    /// Take a block for new content; what it held is forgotten.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.pool.take()?;
        self.allocations += 1;
        if self.prefix.remove(block) {
            self.evictions += 1;
            self.free_cached -= 1;
        }
        Some(block)
    }

    /// Hold a block once more.
    pub fn acquire(&mut self, block: BlockId) {
        if self.pool.acquire(block) && self.prefix.contains(block) {
            self.free_cached -= 1;
        }
    }

    /// Hold a block once less; with the last holder it becomes free, and is kept longest when it holds a prefix.
    pub fn release(&mut self, block: BlockId) {
        let cached = self.prefix.contains(block);
        if self.pool.release(block, cached) {
            self.frees += 1;
            self.free_cached += usize::from(cached);
        }
    }

    /// Release a sequence's blocks, tail first, so that the cache loses leaves before their parents.
    pub fn release_table(&mut self, table: &[BlockId]) {
        for &block in table.iter().rev() {
            self.release(block);
        }
    }

    /// How many of `blocks` would leave the free list if they were held.
    #[must_use]
    pub fn count_free(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|&&block| self.pool.state(block) == BlockState::Free).count()
    }

    /// Index a written block. When another block holds the same prefix already, that canonical one is held instead and
    /// the copy is released. The block to keep in the table, and its node.
    pub fn index(&mut self, block: BlockId, parent: NodeUid, tokens: &[u32]) -> (BlockId, NodeUid) {
        match self.prefix.find(parent, tokens) {
            Some((canonical, uid)) => {
                if canonical != block {
                    self.acquire(canonical);
                    self.release(block);
                }
                (canonical, uid)
            }
            None => (block, self.prefix.insert(block, parent, tokens)),
        }
    }

    /// Forget the prefixes of all free blocks; how many.
    pub fn forget_free(&mut self) -> usize {
        let prefix = &mut self.prefix;
        self.free_cached = 0;
        self.pool.free_blocks().filter(|&block| prefix.remove(block)).count()
    }
}
