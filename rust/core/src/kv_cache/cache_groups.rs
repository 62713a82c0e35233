//! Cache groups: sets of layers with equal cache needs, and the blocks that a sequence needs in each of them.

/// The windows of all cache groups; 0 stands for full attention.
#[derive(Clone, Debug)]
pub struct CacheGroups {
    windows: Vec<usize>,
    block_size: usize,
    /// Tokens of one prompt row, at most.
    max_chunk: usize,
    anchor: usize,
}

impl CacheGroups {
    /// The groups with these windows.
    ///
    /// # Panics
    /// Without a group.
    #[must_use]
    pub fn new(windows: &[usize], block_size: usize, max_num_batched_tokens: usize) -> Self {
        assert!(!windows.is_empty(), "a cache has at least one group");
        Self {
            windows: windows.to_vec(),
            block_size,
            max_chunk: max_num_batched_tokens,
            anchor: windows.iter().position(|&window| window == 0).unwrap_or(0),
        }
    }

    /// Groups.
    #[must_use]
    pub fn len(&self) -> usize {
        self.windows.len()
    }

    /// Always false: a cache has at least one group.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    /// The group that prefix nodes belong to: the first full one, or else the first.
    #[must_use]
    pub fn anchor(&self) -> usize {
        self.anchor
    }

    /// Whether some group has a sliding window.
    #[must_use]
    pub fn has_windows(&self) -> bool {
        self.windows.iter().any(|&window| window > 0)
    }

    /// Whether a group has a sliding window.
    #[must_use]
    pub fn is_sliding(&self, group: usize) -> bool {
        self.windows[group] > 0
    }

    /// The first block that queries from `position` on read.
    #[must_use]
    pub fn first_block(&self, group: usize, position: usize) -> usize {
        match self.windows[group] {
            0 => 0,
            window => (position + 1).saturating_sub(window) / self.block_size,
        }
    }

    /// The first block of a prefix of `hits` blocks that a group keeps for the tokens after it.
    #[must_use]
    pub fn first_hit(&self, group: usize, hits: usize) -> usize {
        self.first_block(group, hits * self.block_size).min(hits)
    }

    /// Blocks that a prompt of `blocks` blocks holds at once, at most.
    #[must_use]
    pub fn prompt_blocks(&self, group: usize, blocks: usize) -> usize {
        match self.windows[group] {
            0 => blocks,
            window => {
                blocks.min(window.saturating_add(self.max_chunk).div_ceil(self.block_size) + 1)
            }
        }
    }

    /// Blocks to take for a prompt of `blocks` blocks when the cache holds the first `hits` of them.
    #[must_use]
    pub fn blocks_to_take(&self, group: usize, hits: usize, blocks: usize) -> usize {
        let held = hits - self.first_hit(group, hits);
        (blocks - hits).min(self.prompt_blocks(group, blocks).saturating_sub(held))
    }

    /// Blocks that one sequence of `num_tokens` tokens holds at once, at most, in all groups together.
    #[must_use]
    pub fn max_blocks_per_sequence(&self, num_tokens: usize) -> usize {
        let blocks = num_tokens.div_ceil(self.block_size);
        (0..self.len()).map(|group| self.prompt_blocks(group, blocks)).sum()
    }
}
