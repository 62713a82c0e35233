//! Ids as distinct types, so that a block is never mistaken for a slot.

/// A block of the KV cache. Block 0 is the null block: padded rows write there and no sequence ever holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The null block.
    pub const NULL: Self = Self(0);

    /// The block's place in per-block vectors.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A dense slot of the device's per-sequence state: block table, last token, sampling parameters, counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

impl Slot {
    /// The slot's place in per-slot vectors.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A sequence's place in the scheduler's slab; reused only after all its rows are committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u32);

impl SequenceId {
    /// The sequence's place in the slab.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A node of the prefix trie. Ids only grow, so a reused block never gets the children of its earlier content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeUid(pub u64);

impl NodeUid {
    /// No node.
    pub const NONE: Self = Self(0);
    const ROOT_BIT: u64 = 1 << 63;

    /// The uid of the root with this number.
    #[must_use]
    pub fn root(number: u64) -> Self {
        Self(number | Self::ROOT_BIT)
    }

    /// Whether the node is the root of a tenant's trie. No block holds a root.
    #[must_use]
    pub fn is_root(self) -> bool {
        self.0 & Self::ROOT_BIT != 0
    }
}
