//! Sequences: one answer being made, and the slab they live in.

use crate::block::{BlockId, NodeUid, SequenceId, Slot};
use crate::queue::QueueKey;
use crate::text::TextStream;

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The slab's place is free.
    Vacant,
    /// In the waiting queue; holds no block.
    Waiting,
    /// Waits for a prefix that another sequence computes; holds no block.
    Deferred,
    /// Its prompt, or what is to be recomputed, is under way.
    Prefill,
    /// One token a step.
    Decode,
    /// Over; kept until its rows in flight are committed.
    Finished,
}

/// The blocks of a sequence, and how many of its entries the device knows.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockTable {
    blocks: Vec<BlockId>,
    synced: usize,
}

impl BlockTable {
    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Entries the device does not know yet: a suffix of the table.
    pub(crate) fn num_unsynced(&self) -> usize {
        self.blocks.len() - self.synced
    }

    pub(crate) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    pub(crate) fn extend(&mut self, blocks: &[BlockId]) {
        self.blocks.extend_from_slice(blocks);
    }

    pub(crate) fn reserve(&mut self, more: usize) {
        self.blocks.reserve(more);
    }

    /// Replace an entry; it and those after it are sent again.
    pub(crate) fn replace(&mut self, index: usize, block: BlockId) {
        self.blocks[index] = block;
        self.synced = self.synced.min(index);
    }

    /// The entries to send, with the place of the first; from now on the device knows them.
    pub(crate) fn sync(&mut self) -> (usize, &[BlockId]) {
        let start = std::mem::replace(&mut self.synced, self.blocks.len());
        (start, &self.blocks[start..])
    }

    /// Empty the table; the blocks it held stay in `out`.
    pub(crate) fn clear_into(&mut self, out: &mut Vec<BlockId>) {
        out.clear();
        out.append(&mut self.blocks);
        self.synced = 0;
    }
}

/// One answer being made.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) state: State,
    /// The request's place in the core.
    pub(crate) request: u32,
    pub(crate) sample_index: u32,
    pub(crate) slot: Slot,
    /// Prompt and committed output.
    pub(crate) tokens: Vec<u32>,
    /// Prompt and output together, at most.
    pub(crate) token_limit: usize,
    /// No stop before the sequence is longer than this.
    pub(crate) min_len: usize,
    /// Tokens known at admission: what is computed as a prompt.
    pub(crate) prefill_len: usize,
    /// Tokens whose keys and values planned steps write.
    pub(crate) computed: usize,
    /// Of those, tokens of committed steps.
    pub(crate) committed: usize,
    /// Samples planned and not committed.
    pub(crate) in_flight: usize,
    /// Rows planned and not committed.
    pub(crate) open_rows: usize,
    /// The step it was chosen for last.
    pub(crate) chosen_in: u64,
    pub(crate) table: BlockTable,
    /// Blocks of the table that are indexed, and the node of the last of them.
    pub(crate) indexed: usize,
    pub(crate) node: NodeUid,
    /// Hash under which its next block is promised to others.
    pub(crate) promise: Option<u64>,
    /// What it waits for while deferred: a sequence, and how many of that one's blocks must be indexed.
    pub(crate) awaits: Option<(SequenceId, usize)>,
    /// Its slot's sampling parameters are still to be sent.
    pub(crate) params_due: bool,
    pub(crate) order: QueueKey,
    pub(crate) text: Option<TextStream>,
}

impl Sequence {
    /// Tokens, those in flight included.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len() + self.in_flight
    }

    /// Whether its last token is committed or in flight.
    pub(crate) fn is_at_limit(&self) -> bool {
        self.len() >= self.token_limit
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, State::Prefill | State::Decode)
    }

    /// The node it will index next: parent and tokens.
    pub(crate) fn promises(&self, block_size: usize) -> (NodeUid, &[u32]) {
        let start = self.indexed * block_size;
        (self.node, &self.tokens[start..start + block_size])
    }

    fn vacant() -> Self {
        Self {
            state: State::Vacant,
            request: 0,
            sample_index: 0,
            slot: Slot(u32::MAX),
            tokens: Vec::new(),
            token_limit: 0,
            min_len: 0,
            prefill_len: 0,
            computed: 0,
            committed: 0,
            in_flight: 0,
            open_rows: 0,
            chosen_in: 0,
            table: BlockTable::default(),
            indexed: 0,
            node: NodeUid::NONE,
            promise: None,
            awaits: None,
            params_due: false,
            order: QueueKey::default(),
            text: None,
        }
    }
}

/// All sequences, by id; places are reused, last freed first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequences {
    slab: Vec<Sequence>,
    vacant: Vec<SequenceId>,
}

impl Sequences {
    /// A fresh place; its fields are those of a new waiting sequence without tokens.
    pub(crate) fn add(&mut self) -> SequenceId {
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.slab.push(Sequence::vacant());
            SequenceId(self.slab.len() as u32 - 1)
        });
        self[id].state = State::Waiting;
        id
    }

    /// Give a place back. Its memory goes too: an idle core is small.
    pub(crate) fn remove(&mut self, id: SequenceId) {
        self[id] = Sequence::vacant();
        self.vacant.push(id);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SequenceId, &Sequence)> {
        let ids = (0..).map(SequenceId);
        ids.zip(&self.slab).filter(|(_, sequence)| sequence.state != State::Vacant)
    }
}

impl std::ops::Index<SequenceId> for Sequences {
    type Output = Sequence;

    fn index(&self, id: SequenceId) -> &Sequence {
        &self.slab[id.index()]
    }
}

impl std::ops::IndexMut<SequenceId> for Sequences {
    fn index_mut(&mut self, id: SequenceId) -> &mut Sequence {
        &mut self.slab[id.index()]
    }
}
