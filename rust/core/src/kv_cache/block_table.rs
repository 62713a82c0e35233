//! The block tables of one sequence, one a cache group.

use crate::ids::BlockId;

/// The blocks of a sequence in one cache group.
///
/// Entry i holds tokens i * `block_size` and on. The first entries of a sliding window's table are released: they hold
/// the null block.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockTable {
    blocks: Vec<BlockId>,
    released: usize,
    /// Entries that the device knows, released ones included.
    synced: usize,
}

impl BlockTable {
    /// All entries, released ones included.
    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The blocks that the sequence holds.
    pub(crate) fn held(&self) -> &[BlockId] {
        &self.blocks[self.released..]
    }

    /// Entries, released ones included.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Entries at the start that are released.
    pub(crate) fn num_released(&self) -> usize {
        self.released
    }

    /// Entries that the device does not know yet: a suffix of the table.
    pub(crate) fn num_unsynced(&self) -> usize {
        self.blocks.len() - self.synced
    }

    pub(crate) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    pub(crate) fn reserve(&mut self, more: usize) {
        self.blocks.reserve(more);
    }

    /// Begin an empty table with `count` released entries.
    pub(crate) fn skip(&mut self, count: usize) {
        self.blocks.resize(count, BlockId::NULL);
        (self.released, self.synced) = (count, count);
    }

    /// Release the entries before `end`; the blocks they held are appended to `out`.
    pub(crate) fn release_before(&mut self, end: usize, out: &mut Vec<BlockId>) {
        let end = end.min(self.blocks.len());
        if end > self.released {
            out.extend_from_slice(&self.blocks[self.released..end]);
            self.blocks[self.released..end].fill(BlockId::NULL);
            self.released = end;
            self.synced = self.synced.max(end);
        }
    }

    /// Replace an entry; it and those after it are sent again.
    pub(crate) fn replace(&mut self, index: usize, block: BlockId) {
        self.blocks[index] = block;
        self.synced = self.synced.min(index);
    }

    /// The entries to send, with the index of the first. The device knows them from now on.
    pub(crate) fn sync(&mut self) -> (usize, &[BlockId]) {
        let start = std::mem::replace(&mut self.synced, self.blocks.len());
        (start, &self.blocks[start..])
    }

    /// The same blocks for another slot, of which the device knows nothing yet.
    fn fork(&self) -> Self {
        Self { blocks: self.blocks.clone(), released: self.released, synced: self.released }
    }

    /// Empty the table; the blocks it held replace the content of `out`.
    fn clear_into(&mut self, out: &mut Vec<BlockId>) {
        out.clear();
        out.extend_from_slice(self.held());
        self.blocks.clear();
        (self.released, self.synced) = (0, 0);
    }
}

/// One table a cache group. The first group's table lies inline, so that a model with one group pays nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockTables {
    first: BlockTable,
    others: Vec<BlockTable>,
}

impl BlockTables {
    /// Make room for this many groups.
    pub(crate) fn resize(&mut self, groups: usize) {
        self.others.resize_with(groups - 1, BlockTable::default);
    }

    pub(crate) fn group(&self, group: usize) -> &BlockTable {
        if group == 0 { &self.first } else { &self.others[group - 1] }
    }

    pub(crate) fn group_mut(&mut self, group: usize) -> &mut BlockTable {
        if group == 0 { &mut self.first } else { &mut self.others[group - 1] }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &BlockTable> {
        std::iter::once(&self.first).chain(&self.others)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut BlockTable> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }

    /// The first group's table, and those of the others.
    pub(crate) fn split_mut(&mut self) -> (&mut BlockTable, &mut [BlockTable]) {
        (&mut self.first, &mut self.others)
    }

    /// Entries of all groups that the device does not know yet.
    pub(crate) fn num_unsynced(&self) -> usize {
        self.first.num_unsynced() + self.others.iter().map(BlockTable::num_unsynced).sum::<usize>()
    }

    /// The same blocks for another slot, of which the device knows nothing yet.
    pub(crate) fn fork(&self) -> Self {
        Self {
            first: self.first.fork(),
            others: self.others.iter().map(BlockTable::fork).collect(),
        }
    }

    /// Empty every table; `release` gets the blocks that each held.
    pub(crate) fn clear(
        &mut self,
        scratch: &mut Vec<BlockId>,
        mut release: impl FnMut(&[BlockId]),
    ) {
        for table in self.iter_mut() {
            table.clear_into(scratch);
            release(scratch);
        }
        scratch.clear();
    }
}
