//! The core itself: what it holds, and the verbs that need no step (`submit`, `abort`).

use std::collections::VecDeque;
use std::sync::Arc;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::block::{BlockId, SequenceId, Slot};
use crate::cache::KvCache;
use crate::commit::{FinishReason, OpenStep, StepOutput};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::groups::Groups;
use crate::plan::{Layout, NUM_ARENAS};
use crate::queue::{InFlightPrefixes, Queue, QueueKey};
use crate::request::{Request, RequestSpec};
use crate::sequence::{Sequences, State};
use crate::slots::Slots;
use crate::stats::Stats;
use crate::text::{TextStream, TokenTable};

/// Block pool, prefix cache, scheduler and sequences of one engine.
#[derive(Clone, Debug)]
pub struct Core {
    pub(crate) config: Config,
    pub(crate) layout: Layout,
    pub(crate) token_table: Option<Arc<TokenTable>>,
    pub(crate) kv: KvCache,
    pub(crate) slots: Slots,
    pub(crate) sequences: Sequences,
    pub(crate) requests: Vec<Option<Request>>,
    vacant_requests: Vec<u32>,
    /// Place of each request, by the caller's number.
    by_id: HashMap<i64, u32, FixedState>,
    pub(crate) queue: Queue,
    pub(crate) promises: InFlightPrefixes,
    /// Running sequences past their prompt, in order of their keys.
    pub(crate) decoding: Vec<SequenceId>,
    /// Running sequences within their prompt, in order of their keys.
    pub(crate) prefilling: Vec<SequenceId>,
    /// Steps planned and not committed, oldest first; two at most.
    pub(crate) open: VecDeque<OpenStep>,
    /// Records of committed steps, to be filled again.
    pub(crate) spare: Vec<OpenStep>,
    pub(crate) groups: Groups,
    pub(crate) frame: StepOutput,
    /// Request and answer of each masked sample of the step planned last.
    pub(crate) masked: Vec<(i64, u32)>,
    /// Requests admitted for the first time since the step planned last.
    pub(crate) started: Vec<i64>,
    pub(crate) stats: Stats,
    /// The step planned last.
    pub(crate) step: u64,
    arrivals: u64,
    /// The head of the queue that found too few blocks, and how often blocks had come free by then.
    pub(crate) blocked: Option<(QueueKey, u64)>,
    /// Scratch space, empty between calls.
    pub(crate) scratch: Vec<BlockId>,
    pub(crate) set_aside: Vec<BlockId>,
    pub(crate) prompt_rows: Vec<(SequenceId, usize)>,
}

impl Core {
    /// A core without requests. Without a token table it makes no text.
    ///
    /// # Errors
    /// `Error::Config` for a setting that cannot work.
    pub fn new(config: Config, token_table: Option<Arc<TokenTable>>) -> Result<Self> {
        config.validate()?;
        if let Some(table) = token_table.as_ref().filter(|table| table.len() > config.vocab_size) {
            return Err(Error::Config {
                field: "token_table",
                message: format!(
                    "has {} tokens, more than the vocabulary of {}",
                    table.len(),
                    config.vocab_size
                ),
            });
        }
        let rows = config.max_num_seqs;
        Ok(Self {
            layout: Layout::new(&config),
            kv: KvCache::new(config.num_blocks, config.block_size, config.hash_seed),
            slots: Slots::new(rows),
            sequences: Sequences::default(),
            requests: Vec::new(),
            vacant_requests: Vec::new(),
            by_id: HashMap::with_hasher(FixedState::with_seed(config.hash_seed)),
            queue: Queue::default(),
            promises: InFlightPrefixes::default(),
            decoding: Vec::with_capacity(rows),
            prefilling: Vec::with_capacity(rows),
            open: VecDeque::with_capacity(2),
            spare: vec![OpenStep::with_capacity(rows), OpenStep::with_capacity(rows)],
            groups: Groups::default(),
            frame: StepOutput::with_capacity(rows),
            masked: Vec::with_capacity(rows),
            started: Vec::with_capacity(rows),
            stats: Stats { blocks_total: config.usable_blocks() as u64, ..Stats::default() },
            step: 0,
            arrivals: 0,
            blocked: None,
            scratch: Vec::with_capacity(config.max_blocks_per_seq()),
            set_aside: Vec::new(),
            prompt_rows: Vec::with_capacity(rows),
            token_table,
            config,
        })
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where each plan array lies in an arena.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Blocks and prefixes, to read.
    #[must_use]
    pub fn kv(&self) -> &KvCache {
        &self.kv
    }

    /// The arena that the next step fills.
    #[must_use]
    pub fn next_arena(&self) -> usize {
        (self.step + 1) as usize % NUM_ARENAS
    }

    /// (step, arena, samples) of the oldest step that is not committed.
    #[must_use]
    pub fn oldest_open(&self) -> Option<(u64, usize, usize)> {
        let open = self.open.front()?;
        Some((open.step, open.step as usize % NUM_ARENAS, open.samples.len()))
    }

    /// Queue a request.
    ///
    /// # Errors
    /// What can never be served or never fit is refused at once, so nothing waits for ever.
    pub fn submit(&mut self, mut spec: RequestSpec) -> Result<()> {
        spec.validate(&self.config, self.token_table.is_some())?;
        if self.by_id.contains_key(&spec.request_id) {
            return Err(Error::InvalidRequest {
                field: "request_id",
                message: format!("{} is in use", spec.request_id),
            });
        }
        self.arrivals += 1;
        let token_limit = spec.token_limit(&self.config);
        let prompt = std::mem::take(&mut spec.prompt);
        let request = Request {
            end_tokens: spec.end_tokens(&self.config).collect(),
            key: spec.queue_key(&self.config),
            arrival: self.arrivals,
            token_limit,
            num_prompt: prompt.len(),
            root: self.kv.acquire_root(spec.adapter, &spec.cache_salt),
            cached_tokens: None,
            sequences: Vec::with_capacity(spec.n),
            forked: false,
            reserved: Vec::new(),
            early_biases: if spec.min_tokens > 0 {
                spec.early_biases(&self.config)
            } else {
                Vec::new()
            },
            spec,
        };
        let place = self.vacant_requests.pop().unwrap_or_else(|| {
            self.requests.push(None);
            self.requests.len() as u32 - 1
        });
        self.by_id.insert(request.spec.request_id, place);
        self.requests[place as usize] = Some(request);
        let id = self.add_sequence(place, 0, prompt);
        self.queue.push(self.sequences[id].order, id);
        self.stats.requests += 1;
        Ok(())
    }

    /// End a request without an event: its blocks are free for the next plan, and tokens in flight are dropped. False
    /// when it is not known (any more).
    pub fn abort(&mut self, request_id: i64) -> bool {
        let Some(&place) = self.by_id.get(&request_id) else { return false };
        let last = |core: &Self| core.requests[place as usize].as_ref()?.sequences.last().copied();
        while let Some(id) = last(self) {
            self.finish(id, FinishReason::Abort);
        }
        self.drop_stopped();
        true
    }

    /// (request, answer) of each sample of the step planned last that is held to a set of tokens, in the order of
    /// `mask_logits`. All that these answers have drawn so far is committed.
    #[must_use]
    pub fn masked(&self) -> &[(i64, u32)] {
        &self.masked
    }

    /// Prompt and committed output of the sequence in a slot.
    #[must_use]
    pub fn history(&self, slot: Slot) -> Option<&[u32]> {
        self.slots.holder(slot).map(|id| self.sequences[id].tokens.as_slice())
    }

    /// True while a request is waiting, running or in flight.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.by_id.is_empty() || !self.open.is_empty()
    }

    /// Gauges and counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let free = self.kv.pool().num_free();
        let used = self.kv.pool().usable() - free;
        Stats {
            waiting: self.queue.num_waiting() as u64,
            deferred: self.queue.num_deferred() as u64,
            running: (self.decoding.len() + self.prefilling.len()) as u64,
            blocks_free: free as u64,
            blocks_cached: self.kv.prefix().len() as u64,
            blocks_used: used as u64,
            blocks_free_cached: self.kv.free_cached as u64,
            slots_held: (used * self.config.block_size) as u64,
            slots_unfilled: self.num_unfilled_slots() as u64,
            evictions: self.kv.evictions,
            allocations: self.kv.allocations,
            frees: self.kv.frees,
            ..self.stats
        }
    }

    /// Token slots at the ends of running sequences that hold no token yet; a block that several answers share is not
    /// counted: whoever writes first takes one of its own.
    fn num_unfilled_slots(&self) -> usize {
        let (pool, size) = (self.kv.pool(), self.config.block_size);
        self.decoding
            .iter()
            .chain(&self.prefilling)
            .map(|&id| &self.sequences[id])
            .filter(|sequence| {
                sequence.table.blocks().last().is_some_and(|&block| !pool.is_shared(block))
            })
            .map(|sequence| (sequence.table.len() * size).saturating_sub(sequence.computed))
            .sum()
    }

    /// Forget every cached block that no sequence holds; how many.
    pub fn reset_prefix_cache(&mut self) -> usize {
        self.kv.forget_free()
    }

    pub(crate) fn request(&self, place: u32) -> &Request {
        self.requests[place as usize].as_ref().expect("a sequence's request lives as long as it")
    }

    pub(crate) fn request_mut(&mut self, place: u32) -> &mut Request {
        self.requests[place as usize].as_mut().expect("a sequence's request lives as long as it")
    }

    /// A sequence of a request, without a place in any queue.
    pub(crate) fn add_sequence(
        &mut self,
        place: u32,
        sample_index: u32,
        prompt: Vec<u32>,
    ) -> SequenceId {
        let id = self.sequences.add();
        let request = self.requests[place as usize].as_mut().expect("just added");
        let spec = &request.spec;
        request.sequences.push(id);
        let sequence = &mut self.sequences[id];
        sequence.request = place;
        sequence.sample_index = sample_index;
        sequence.tokens = prompt;
        sequence.token_limit = request.token_limit;
        sequence.min_len = request.num_prompt.saturating_add(spec.min_tokens);
        sequence.order = QueueKey {
            key: request.key,
            not_preempted: true,
            arrival: request.arrival,
            sample_index,
        };
        sequence.text = self
            .token_table
            .is_some()
            .then(|| TextStream::new(spec.stop.clone(), spec.include_stop, spec.skip_special));
        id
    }

    /// End a sequence, wherever it stands. The running lists are cleaned by `drop_stopped`.
    pub(crate) fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        self.leave(id);
        let sequence = &mut self.sequences[id];
        sequence.state = State::Finished;
        let place = sequence.request;
        if sequence.open_rows == 0 {
            self.sequences.remove(id);
        }
        match reason {
            FinishReason::Stop(_) => self.stats.finished_stop += 1,
            FinishReason::Length => self.stats.finished_length += 1,
            FinishReason::Abort => self.stats.finished_abort += 1,
        }
        let request = self.request_mut(place);
        request.sequences.retain(|&other| other != id);
        if request.sequences.is_empty() {
            let (request_id, root) = (request.spec.request_id, request.root);
            self.requests[place as usize] = None;
            self.vacant_requests.push(place);
            self.by_id.remove(&request_id);
            self.kv.release_root(root);
        }
    }

    /// Take back a running sequence's blocks and slot; it is computed again later, at the head of its class.
    pub(crate) fn preempt(&mut self, id: SequenceId) {
        self.leave(id);
        let sequence = &mut self.sequences[id];
        sequence.state = State::Waiting;
        sequence.order.not_preempted = false;
        self.queue.push(sequence.order, id);
        self.stats.preemptions += 1;
    }

    /// Drop sequences that no longer run from the running lists.
    pub(crate) fn drop_stopped(&mut self) {
        let sequences = &self.sequences;
        self.decoding.retain(|&id| sequences[id].state == State::Decode);
        self.prefilling.retain(|&id| sequences[id].state == State::Prefill);
    }

    /// Take a sequence out of its queue, or give back what it holds while running.
    fn leave(&mut self, id: SequenceId) {
        let sequence = &mut self.sequences[id];
        match sequence.state {
            State::Waiting => self.queue.remove(sequence.order),
            State::Deferred => {
                if let Some((awaited, blocks)) = sequence.awaits.take() {
                    self.queue.remove_deferred(sequence.order, awaited, blocks);
                }
            }
            State::Prefill | State::Decode => {
                let (slot, place) = (sequence.slot, sequence.request);
                sequence.table.clear_into(&mut self.scratch);
                sequence.computed = 0;
                sequence.committed = 0;
                sequence.indexed = 0;
                self.kv.release_table(&self.scratch);
                self.scratch.clear();
                self.slots.release(slot);
                let sequence_is_lead = self.sequences[id].sample_index == 0;
                if sequence_is_lead {
                    let reserved = std::mem::take(&mut self.request_mut(place).reserved);
                    for slot in reserved {
                        self.slots.release(slot);
                    }
                }
                self.withdraw_promise(id);
            }
            State::Vacant | State::Finished => {}
        }
    }

    /// Promise the next block a sequence will index to those that need the same, and wake those it was for.
    pub(crate) fn renew_promise(&mut self, id: SequenceId) {
        let sequence = &self.sequences[id];
        let (indexed, block_size) = (sequence.indexed, self.config.block_size);
        if let Some(hash) = sequence.promise {
            self.promises.remove(hash, id);
            self.sequences[id].promise = None;
            self.wake(id, indexed);
        }
        let sequence = &self.sequences[id];
        let range = indexed * block_size..(indexed + 1) * block_size;
        if range.end > sequence.prefill_len {
            self.wake(id, usize::MAX);
            return;
        }
        let (node, tokens) = (sequence.node, &sequence.tokens[range]);
        let hash = self.kv.prefix().hash(node, tokens);
        let sequences = &self.sequences;
        let same = |other: SequenceId| sequences[other].promises(block_size) == (node, tokens);
        if self.promises.insert(hash, id, same) {
            self.sequences[id].promise = Some(hash);
        } else {
            self.wake(id, usize::MAX);
        }
    }

    fn withdraw_promise(&mut self, id: SequenceId) {
        if let Some(hash) = self.sequences[id].promise.take() {
            self.promises.remove(hash, id);
        }
        self.wake(id, usize::MAX);
    }

    fn wake(&mut self, id: SequenceId, blocks: usize) {
        while let Some(woken) = self.queue.wake(id, blocks) {
            let sequence = &mut self.sequences[woken];
            sequence.state = State::Waiting;
            sequence.awaits = None;
        }
    }
}
