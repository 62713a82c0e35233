//! The scheduler: which rows make up the next step.
//!
//! 1. Under the priority policy, an urgent waiting request takes the place of less urgent running sequences when slots
//!    or blocks are full ([`preemption`]).
//! 2. Every running answer past its prompt gets one token ([`decode_rows`]). A constrained one waits until its last
//!    token is committed, as its set of tokens depends on it. An answer that finds no free block preempts the running
//!    sequence that loses least and is not chosen yet: first sequences whose last token is in flight (they lose
//!    nothing), then under the priority policy the least urgent, then the fewest computed tokens, then the youngest.
//! 3. Prompts in progress share the rest of the token budget, oldest first ([`prompt_rows`]). While others could use it
//!    too, one prompt takes at most half of what is left (a block at least).
//! 4. Waiting requests are admitted in order while slots, blocks (down to the watermark) and table updates last, unless
//!    this step preempted a sequence and others still run ([`admission`]). A request steps aside while a running prompt
//!    computes its next block. A prompt takes its blocks at admission, so it does not preempt.
//! 5. Prompts that were cut short share what is left of the budget.

mod admission;
mod commit;
mod decode_rows;
mod in_flight_prefixes;
mod invariants;
mod preemption;
mod prefix_waits;
mod prompt_rows;
mod queue;
mod requests;
mod row_groups;
mod sequence;
mod slots;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::ids::{BlockId, SequenceId, Slot};
use crate::kv_cache::KvCache;
use crate::kv_cache::cache_groups::CacheGroups;
use crate::request::RequestSpec;
use crate::scheduler::in_flight_prefixes::InFlightPrefixes;
use crate::scheduler::queue::{Queue, QueueKey};
use crate::scheduler::requests::{Request, Requests};
use crate::scheduler::row_groups::RowGroups;
use crate::scheduler::sequence::{Sequences, State};
use crate::scheduler::slots::Slots;
use crate::stats::Stats;
use crate::step::open_step::OpenStep;
use crate::step::output::FinishReason;
use crate::step::writer::PlanWriter;
use crate::text::TextStream;

/// Requests, sequences, slots and blocks of one engine, and the decisions about them.
#[derive(Clone, Debug)]
pub(crate) struct Scheduler {
    config: Config,
    kv: KvCache,
    slots: Slots,
    sequences: Sequences,
    requests: Requests,
    queue: Queue,
    in_flight_prefixes: InFlightPrefixes,
    /// Running sequences past their prompt, in order of their keys.
    decoding: Vec<SequenceId>,
    /// Running sequences within their prompt, in order of their keys.
    prefilling: Vec<SequenceId>,
    row_groups: RowGroups,
    /// Request and answer of each masked sample of the step planned last.
    masked: Vec<(i64, u32)>,
    /// Requests admitted for the first time since the step planned last.
    started: Vec<i64>,
    stats: Stats,
    with_text: bool,
    arrivals: u64,
    /// The head of the queue that found too few blocks, and the count of freed blocks at that time.
    blocked: Option<(QueueKey, u64)>,
    /// A prompt in progress found too few blocks in this step.
    is_stalled: bool,
    /// Rows of prompts in this step: sequences and their tokens.
    prompt_rows: Vec<(SequenceId, usize)>,
    /// Scratch space, empty between calls.
    scratch: Vec<BlockId>,
    set_aside: Vec<BlockId>,
    gathered: Vec<BlockId>,
    needs: Vec<(usize, Option<BlockId>)>,
}

impl Scheduler {
    /// A scheduler without requests. `with_text` says whether answers are decoded to text.
    pub(crate) fn new(config: Config, with_text: bool) -> Self {
        let rows = config.max_num_seqs;
        let groups =
            CacheGroups::new(&config.windows, config.block_size, config.max_num_batched_tokens);
        Self {
            kv: KvCache::new(config.num_blocks, config.block_size, config.hash_seed, groups),
            slots: Slots::new(rows),
            sequences: Sequences::default(),
            requests: Requests::new(config.hash_seed),
            queue: Queue::default(),
            in_flight_prefixes: InFlightPrefixes::default(),
            decoding: Vec::with_capacity(rows),
            prefilling: Vec::with_capacity(rows),
            row_groups: RowGroups::default(),
            masked: Vec::with_capacity(rows),
            started: Vec::with_capacity(rows),
            stats: Stats { blocks_total: config.usable_blocks() as u64, ..Stats::default() },
            with_text,
            arrivals: 0,
            blocked: None,
            is_stalled: false,
            prompt_rows: Vec::with_capacity(rows),
            scratch: Vec::with_capacity(config.max_blocks_per_seq()),
            set_aside: Vec::new(),
            gathered: Vec::with_capacity(config.windows.len()),
            needs: Vec::with_capacity(config.windows.len()),
            config,
        }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn masked(&self) -> &[(i64, u32)] {
        &self.masked
    }

    /// Whether a request is waiting or running.
    pub(crate) fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Prompt and committed output of the sequence in a slot.
    pub(crate) fn history(&self, slot: Slot) -> Option<&[u32]> {
        self.slots.holder(slot).map(|id| self.sequences[id].tokens.as_slice())
    }

    /// Forget every cached block that no sequence holds; how many.
    pub(crate) fn reset_prefix_cache(&mut self) -> usize {
        self.kv.forget_free()
    }

    /// Fill a step. `is_alone` says that no other step is open.
    pub(crate) fn plan(
        &mut self,
        writer: &mut PlanWriter<'_>,
        open: &mut OpenStep,
        is_alone: bool,
    ) {
        self.masked.clear();
        self.displace_for_urgent();
        let preemptions = self.stats.preemptions;
        self.choose_decode_rows(writer, open);
        let preempted = self.stats.preemptions > preemptions;
        if preempted {
            self.drop_stopped();
        }
        let admit = !preempted || self.is_idle();
        let (min_blocks, block_size) = (self.config.group_min_blocks, self.config.block_size);
        self.row_groups.write(
            min_blocks,
            block_size,
            self.kv.groups(),
            &self.sequences,
            writer,
            open,
        );
        self.choose_prompt_rows(writer, admit);
        while self.prompt_rows.is_empty() && is_alone && open.rows.is_empty() && self.is_stalled {
            // Only prompts run, and each waits for blocks that another holds.
            if !self.preempt_stalled(open.step) {
                break;
            }
            self.choose_prompt_rows(writer, false);
        }
        self.write_prompt_rows(writer, open);
        if !open.rows.is_empty() {
            std::mem::swap(&mut open.started, &mut self.started);
            self.stats.steps += 1;
        }
    }

    /// Queue a request that passed its checks.
    ///
    /// # Errors
    /// When the request cannot run, or its number is in use.
    pub(crate) fn submit(&mut self, mut spec: RequestSpec) -> Result<()> {
        spec.validate(&self.config, self.kv.groups(), self.with_text)?;
        if self.requests.find(spec.request_id).is_some() {
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
        let place = self.requests.add(request);
        let id = self.add_sequence(place, 0, prompt);
        self.queue.push(self.sequences[id].order, id);
        self.stats.requests += 1;
        Ok(())
    }

    /// End a request; false when it is not known.
    pub(crate) fn abort(&mut self, request_id: i64) -> bool {
        let Some(place) = self.requests.find(request_id) else { return false };
        while let Some(&id) = self.requests.get(place).and_then(|it| it.sequences.last()) {
            self.finish(id, FinishReason::Abort);
        }
        self.drop_stopped();
        true
    }

    /// Gauges and counters.
    pub(crate) fn stats(&self) -> Stats {
        let free = self.kv.pool().num_free();
        let used = self.kv.pool().usable() - free;
        Stats {
            waiting: self.queue.num_waiting() as u64,
            deferred: self.queue.num_deferred() as u64,
            running: (self.decoding.len() + self.prefilling.len()) as u64,
            blocks_free: free as u64,
            blocks_cached: self.kv.prefix().len() as u64,
            blocks_used: used as u64,
            blocks_free_cached: self.kv.free_cached() as u64,
            slots_held: (used * self.config.block_size) as u64,
            slots_unfilled: self.num_unfilled_slots() as u64,
            evictions: self.kv.evictions(),
            allocations: self.kv.allocations(),
            frees: self.kv.frees(),
            ..self.stats
        }
    }

    /// Token slots at the ends of running sequences that hold no token yet. A block that several answers share is not
    /// counted, as the first to write takes one of its own.
    fn num_unfilled_slots(&self) -> usize {
        let (pool, size) = (self.kv.pool(), self.config.block_size);
        let running = self.decoding.iter().chain(&self.prefilling).map(|&id| &self.sequences[id]);
        let tables = running.flat_map(|it| it.tables.iter().map(|table| (table, it.computed)));
        tables
            .filter(|(table, _)| table.held().last().is_some_and(|&last| !pool.is_shared(last)))
            .map(|(table, computed)| (table.len() * size).saturating_sub(computed))
            .sum()
    }

    /// Whether nothing runs.
    fn is_idle(&self) -> bool {
        self.decoding.is_empty() && self.prefilling.is_empty()
    }

    /// A sequence of a request, in no queue yet.
    fn add_sequence(&mut self, place: u32, sample_index: u32, prompt: Vec<u32>) -> SequenceId {
        let id = self.sequences.add(self.kv.groups().len());
        let request = &mut self.requests[place];
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
        sequence.text = self.with_text.then(|| {
            let stream = TextStream::new(spec.stop.clone(), spec.include_stop, spec.skip_special);
            if spec.begins_text { stream } else { stream.continuing() }
        });
        id
    }

    /// End a sequence in any state. `drop_stopped` removes it from the running lists.
    fn finish(&mut self, id: SequenceId, reason: FinishReason) {
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
        let request = &mut self.requests[place];
        request.sequences.retain(|&other| other != id);
        if request.sequences.is_empty() {
            let root = request.root;
            self.requests.remove(place);
            self.kv.release_root(root);
        }
    }

    /// Drop sequences that no longer run from the running lists.
    pub(crate) fn drop_stopped(&mut self) {
        let sequences = &self.sequences;
        self.decoding.retain(|&id| sequences[id].state == State::Decode);
        self.prefilling.retain(|&id| sequences[id].state == State::Prefill);
    }

    /// Take a sequence out of its queue, or release its blocks and slots.
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
                let is_lead = sequence.sample_index == 0;
                (sequence.computed, sequence.committed, sequence.indexed) = (0, 0, 0);
                let kv = &mut self.kv;
                sequence.tables.clear(&mut self.scratch, |table| {
                    kv.release_table(table);
                });
                self.slots.release(slot);
                if is_lead {
                    for slot in std::mem::take(&mut self.requests[place].reserved) {
                        self.slots.release(slot);
                    }
                }
                self.withdraw_in_flight_prefix(id);
            }
            State::Vacant | State::Finished => {}
        }
    }
}
