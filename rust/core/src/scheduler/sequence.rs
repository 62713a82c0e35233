//! Sequences, one an answer, and the slab that holds them.

use crate::ids::{NodeUid, SequenceId, Slot};
use crate::kv_cache::block_table::BlockTables;
use crate::scheduler::queue::QueueKey;
use crate::text::TextStream;

/// The state of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The slab's place is free.
    Vacant,
    /// In the waiting queue; holds no block.
    Waiting,
    /// Waits for a prefix that another sequence computes; holds no block.
    Deferred,
    /// Its prompt, or what must be recomputed, is in progress.
    Prefill,
    /// One token a step.
    Decode,
    /// Finished; kept until its rows in flight are committed.
    Finished,
}

/// One answer in progress.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) state: State,
    /// The request's place among the requests.
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
    pub(crate) tables: BlockTables,
    /// Entries of its tables that are indexed, and the node of the last one.
    pub(crate) indexed: usize,
    pub(crate) node: NodeUid,
    /// Hash of its next node among the in-flight prefixes.
    pub(crate) in_flight_prefix: Option<u64>,
    /// While deferred: the sequence it waits for, and how many entries that one must have indexed.
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

    /// Whether its last token is committed or in flight, so that it is not planned again.
    pub(crate) fn is_at_limit(&self) -> bool {
        self.len() >= self.token_limit
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, State::Prefill | State::Decode)
    }

    /// Parent and tokens of the node it will index next.
    pub(crate) fn next_node(&self, block_size: usize) -> (NodeUid, &[u32]) {
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
            tables: BlockTables::default(),
            indexed: 0,
            node: NodeUid::NONE,
            in_flight_prefix: None,
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
    /// A new waiting sequence without tokens.
    pub(crate) fn add(&mut self, cache_groups: usize) -> SequenceId {
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.slab.push(Sequence::vacant());
            SequenceId(self.slab.len() as u32 - 1)
        });
        self[id].state = State::Waiting;
        self[id].tables.resize(cache_groups);
        id
    }

    /// Free a place and its memory.
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
