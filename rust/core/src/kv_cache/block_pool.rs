//! The block pool: reference counts and the free list, every operation O(1).
//!
//! A block is either free (on the list) or referenced. The free list is circular and intrusive with the null block as
//! its sentinel, so its ends need no special case. A freed block keeps its content: a block that holds a prefix goes to
//! the back, any other to the front, and blocks are taken from the front.

use crate::ids::BlockId;

/// Where a block stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// On the free list.
    Free,
    /// In the tables of so many sequences.
    Referenced(u32),
}

#[derive(Clone, Copy, Debug)]
struct Links {
    prev: BlockId,
    next: BlockId,
    /// Tables that hold the block; 0 when it is free.
    count: u32,
}

const FREE: u32 = 0;

/// Reference counts and the free list.
#[derive(Clone, Debug)]
pub struct BlockPool {
    links: Vec<Links>,
    free: usize,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block included; all others are free, lowest id first.
    ///
    /// # Panics
    /// With no block at all.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        assert!(num_blocks > 0, "the null block is always there");
        let n = num_blocks as u32;
        let links = (0..n)
            .map(|i| Links {
                prev: BlockId(if i == 0 { n - 1 } else { i - 1 }),
                next: BlockId(if i + 1 == n { 0 } else { i + 1 }),
                count: FREE,
            })
            .collect();
        Self { links, free: num_blocks - 1 }
    }

    /// Blocks on the free list.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.free
    }

    /// Blocks that can be held, the null block apart.
    #[must_use]
    pub fn usable(&self) -> usize {
        self.links.len() - 1
    }

    /// Where a block stands.
    #[must_use]
    pub fn state(&self, block: BlockId) -> BlockState {
        match self.links[block.index()].count {
            FREE => BlockState::Free,
            count => BlockState::Referenced(count),
        }
    }

    /// Whether more than one table holds the block.
    #[must_use]
    pub fn is_shared(&self, block: BlockId) -> bool {
        self.links[block.index()].count > 1
    }

    /// Take the first free block; its count is one.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.links[0].next;
        if block == BlockId::NULL {
            return None;
        }
        self.unlink(block);
        self.links[block.index()].count = 1;
        Some(block)
    }

    /// Count one more holder of a block, free (it leaves the list) or referenced. True when it was free.
    ///
    /// # Panics
    /// When the block is null.
    pub fn acquire(&mut self, block: BlockId) -> bool {
        assert!(block != BlockId::NULL, "the null block is never held");
        let count = self.links[block.index()].count;
        if count == FREE {
            self.unlink(block);
        }
        self.links[block.index()].count = count + 1;
        count == FREE
    }

    /// Count one holder less; the last one puts the block on the free list, at the back when `keep` is set. True when
    /// that happened.
    ///
    /// # Panics
    /// When no table holds the block.
    pub fn release(&mut self, block: BlockId, keep: bool) -> bool {
        let count = self.links[block.index()].count;
        assert!(count != FREE, "only a referenced block can be released");
        self.links[block.index()].count = count - 1;
        if count > 1 {
            return false;
        }
        self.link(block, keep);
        true
    }

    /// The free blocks, in the order they will be taken.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = BlockId::NULL;
        std::iter::from_fn(move || {
            at = self.links[at.index()].next;
            (at != BlockId::NULL).then_some(at)
        })
    }

    /// Check that links are symmetric and that every block is in exactly one state.
    ///
    /// # Errors
    /// Says what contradicts what.
    pub fn check(&self) -> Result<(), String> {
        let mut on_list = vec![false; self.links.len()];
        let mut at = BlockId::NULL;
        loop {
            let next = self.links[at.index()].next;
            if self.links[next.index()].prev != at {
                return Err(format!("free list: {next:?} does not link back to {at:?}"));
            }
            if next == BlockId::NULL {
                break;
            }
            if std::mem::replace(&mut on_list[next.index()], true) {
                return Err(format!("free list: {next:?} is on it twice"));
            }
            at = next;
        }
        for (i, links) in self.links.iter().enumerate().skip(1) {
            if on_list[i] != (links.count == FREE) {
                return Err(format!(
                    "block {i}: count {} but on the list: {}",
                    links.count, on_list[i]
                ));
            }
        }
        let free = on_list.iter().filter(|&&on| on).count();
        if free != self.free {
            return Err(format!("pool: counts {} free blocks, there are {free}", self.free));
        }
        Ok(())
    }

    fn unlink(&mut self, block: BlockId) {
        let Links { prev, next, .. } = self.links[block.index()];
        self.links[prev.index()].next = next;
        self.links[next.index()].prev = prev;
        self.free -= 1;
    }

    fn link(&mut self, block: BlockId, back: bool) {
        let (prev, next) = if back {
            (self.links[0].prev, BlockId::NULL)
        } else {
            (BlockId::NULL, self.links[0].next)
        };
        self.links[prev.index()].next = block;
        self.links[next.index()].prev = block;
        let links = &mut self.links[block.index()];
        (links.prev, links.next) = (prev, next);
        self.free += 1;
    }
}
