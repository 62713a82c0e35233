//! The KV cache's bookkeeping: the block pool and the prefix cache, kept consistent with each other.

pub mod block_pool;
pub(crate) mod block_table;
pub mod cache_groups;
pub mod prefix_cache;

use crate::ids::{BlockId, NodeUid};
use crate::kv_cache::block_pool::{BlockPool, BlockState};
use crate::kv_cache::cache_groups::CacheGroups;
use crate::kv_cache::prefix_cache::PrefixCache;

/// Block pool and prefix cache together. All cache groups take their blocks from the one pool.
#[derive(Clone, Debug)]
pub struct KvCache {
    pool: BlockPool,
    prefix: PrefixCache,
    groups: CacheGroups,
    allocations: u64,
    frees: u64,
    evictions: u64,
    free_cached: usize,
}

impl KvCache {
    /// An empty cache of `num_blocks` blocks, the null block included.
    #[must_use]
    pub fn new(num_blocks: usize, block_size: usize, seed: u64, groups: CacheGroups) -> Self {
        Self {
            pool: BlockPool::new(num_blocks),
            prefix: PrefixCache::new(num_blocks, block_size, seed, &groups),
            groups,
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

    /// The cache groups.
    #[must_use]
    pub fn groups(&self) -> &CacheGroups {
        &self.groups
    }

    /// Blocks taken from the free list for new content.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.allocations
    }

    /// Blocks that came back to the free list.
    #[must_use]
    pub fn frees(&self) -> u64 {
        self.frees
    }

    /// Prefixes lost because their block was taken.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Free blocks that hold a prefix.
    #[must_use]
    pub fn free_cached(&self) -> usize {
        self.free_cached
    }

    /// See [`PrefixCache::acquire_root`].
    pub fn acquire_root(&mut self, adapter: u32, salt: &[u8]) -> NodeUid {
        self.prefix.acquire_root(adapter, salt)
    }

    /// See [`PrefixCache::release_root`].
    pub fn release_root(&mut self, root: NodeUid) {
        self.prefix.release_root(root);
    }

    /// Take a block for new content; the prefix it held is forgotten.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.pool.take()?;
        self.allocations += 1;
        if self.forget(block) {
            self.evictions += 1;
        }
        Some(block)
    }

    /// Count one more holder of a block.
    pub fn acquire(&mut self, block: BlockId) {
        if self.pool.acquire(block) && self.prefix.contains(block) {
            self.free_cached -= 1;
        }
    }

    /// Count one holder less. Without a holder the block is free, and is kept longest when it holds a prefix. True when
    /// it came free.
    pub fn release(&mut self, block: BlockId) -> bool {
        let cached = self.prefix.contains(block);
        let freed = self.pool.release(block, cached);
        if freed {
            self.frees += 1;
            self.free_cached += usize::from(cached);
        }
        freed
    }

    /// Release a sequence's blocks, last first, so that the cache loses leaves before their parents. Returns how many
    /// came free.
    pub fn release_table(&mut self, table: &[BlockId]) -> usize {
        let frees = self.frees;
        for &block in table.iter().rev() {
            self.release(block);
        }
        (self.frees - frees) as usize
    }

    /// Find the longest prefix of `tokens` whose blocks every group can use: full groups need all of them, sliding ones
    /// those that the next token's window covers. The anchor group's blocks go to `out`, at most `max_blocks`.
    ///
    /// Returns the last node of the prefix.
    pub fn find_prefix(
        &self,
        root: NodeUid,
        tokens: &[u32],
        max_blocks: usize,
        out: &mut Vec<BlockId>,
    ) -> NodeUid {
        let node = self.prefix.walk(root, tokens, max_blocks, out);
        if self.groups.len() == 1 {
            return node;
        }
        let mut runs = vec![0; self.groups.len()];
        let mut usable = 0;
        for (i, &anchor) in out.iter().enumerate() {
            for (group, run) in runs.iter_mut().enumerate() {
                let present = self.prefix.group_block(anchor, group) != BlockId::NULL;
                *run = if present { *run + 1 } else { 0 };
            }
            let needs = |group| i + 1 - self.groups.first_hit(group, i + 1);
            if runs.iter().enumerate().all(|(group, &run)| run >= needs(group)) {
                usable = i + 1;
            }
        }
        out.truncate(usable);
        out.last().map_or(root, |&block| self.prefix.node(block))
    }

    /// The blocks of a group that a sequence with these hits holds; `hits` are the anchor group's.
    pub fn hit_blocks<'a>(
        &'a self,
        group: usize,
        hits: &'a [BlockId],
    ) -> impl Iterator<Item = BlockId> + 'a {
        let needed = &hits[self.groups.first_hit(group, hits.len())..];
        needed.iter().map(move |&anchor| self.prefix.group_block(anchor, group))
    }

    /// How many blocks would leave the free list if these hits were held in every group.
    #[must_use]
    pub fn count_free(&self, hits: &[BlockId]) -> usize {
        let is_free = |block: &BlockId| self.pool.state(*block) == BlockState::Free;
        (0..self.groups.len())
            .map(|group| self.hit_blocks(group, hits).filter(is_free).count())
            .sum()
    }

    /// Index a written block of the anchor group. When another block holds the same prefix already, that one is held
    /// instead and the copy is released.
    ///
    /// Returns the block to keep in the table, and its node.
    pub fn index(&mut self, block: BlockId, parent: NodeUid, tokens: &[u32]) -> (BlockId, NodeUid) {
        match self.prefix.find(parent, tokens) {
            Some((canonical, uid)) => {
                self.keep_canonical(block, canonical);
                (canonical, uid)
            }
            None => (block, self.prefix.insert(block, parent, tokens)),
        }
    }

    /// Index another group's block of the prefix that `anchor` holds, as `index` does.
    ///
    /// Returns the block to keep in the table.
    pub fn index_group(&mut self, anchor: BlockId, group: usize, block: BlockId) -> BlockId {
        let canonical = self.prefix.attach(anchor, group, block);
        self.keep_canonical(block, canonical);
        canonical
    }

    fn keep_canonical(&mut self, block: BlockId, canonical: BlockId) {
        if canonical != block {
            self.acquire(canonical);
            self.release(block);
        }
    }

    /// Forget the prefixes of all free blocks; how many.
    pub fn forget_free(&mut self) -> usize {
        let forgotten = self.free_cached;
        let cached: Vec<BlockId> =
            self.pool.free_blocks().filter(|&block| self.prefix.contains(block)).collect();
        for block in cached {
            self.forget(block);
        }
        forgotten
    }

    /// Forget the prefix of a block that no table holds. True when it had one.
    fn forget(&mut self, block: BlockId) -> bool {
        if !self.prefix.contains(block) {
            return false;
        }
        for group in 0..self.groups.len() {
            // Without its node, no one finds the block of another group.
            if let Some(other) = self.prefix.detach(block, group)
                && self.pool.state(other) == BlockState::Free
            {
                self.free_cached -= 1;
            }
        }
        self.prefix.remove(block);
        self.free_cached -= 1;
        true
    }
}
