//! Admission: which waiting sequences begin to run, and which step aside for a prefix in progress.

use crate::ids::{BlockId, NodeUid, SequenceId};
use crate::scheduler::Scheduler;
use crate::scheduler::sequence::State;

/// What a waiting sequence takes when it is admitted.
struct Needs {
    /// The last node of the prefix found in the cache.
    node: NodeUid,
    /// Table entries of all groups.
    entries: usize,
    /// Blocks that leave the free list.
    blocks: usize,
}

impl Scheduler {
    pub(super) fn could_admit(&self) -> bool {
        self.queue.num_waiting() > 0 && self.slots.num_free() > 0
    }

    /// Admit the first waiting sequence that need not wait for another's prefix, if it fits.
    pub(super) fn admit_first(&mut self, tables_left: usize) -> Option<SequenceId> {
        loop {
            // The first check, so that full slots cost the same however many wait.
            if self.slots.num_free() == 0 {
                return None;
            }
            let id = self.queue.first()?;
            let sequence = &self.sequences[id];
            let order = sequence.order;
            // Nothing came free since it last found too few blocks.
            let is_hopeless = self.blocked == Some((order, self.kv.frees()));
            // One step looks at no more deferred sequences than could run.
            let is_crowded = self.queue.num_deferred() >= self.config.max_num_seqs;
            // A sequence with open rows has a token in flight that is not known yet.
            let is_open = sequence.open_rows > 0;
            if self.num_samples(id) > self.slots.num_free() || is_open || is_hopeless || is_crowded
            {
                return None;
            }
            let mut hits = std::mem::take(&mut self.scratch);
            let needs = self.find_hits(id, &mut hits);
            if self.defer(id, needs.node, hits.len()) {
                hits.clear();
                self.scratch = hits;
                continue;
            }
            let watermark = if self.is_idle() { 0 } else { self.config.watermark() };
            let fits = needs.blocks + watermark <= self.kv.pool().num_free();
            if !fits {
                self.blocked = Some((order, self.kv.frees()));
            }
            let is_admitted = fits && needs.entries <= tables_left;
            if is_admitted {
                self.admit(id, &hits, needs.node);
            }
            hits.clear();
            self.scratch = hits;
            return is_admitted.then_some(id);
        }
    }

    /// Slots and blocks that a waiting sequence takes when it is admitted; `None` when it cannot be admitted now.
    pub(super) fn admission_needs(&mut self, id: SequenceId) -> Option<(usize, usize)> {
        if self.sequences[id].open_rows > 0 {
            return None;
        }
        let mut hits = std::mem::take(&mut self.scratch);
        let needs = self.find_hits(id, &mut hits);
        let is_deferred = self.find_awaited(id, needs.node, hits.len()).is_some();
        hits.clear();
        self.scratch = hits;
        (!is_deferred).then(|| (self.num_samples(id), needs.blocks))
    }

    /// Find the cached prefix of a waiting sequence, its blocks into `hits`. At least its last token is left to compute.
    fn find_hits(&self, id: SequenceId, hits: &mut Vec<BlockId>) -> Needs {
        let sequence = &self.sequences[id];
        let mut node = self.requests[sequence.request].root;
        if self.config.enable_prefix_caching {
            node = self.kv.find_prefix(node, &sequence.tokens, self.max_hits(id), hits);
        }
        let total = sequence.tokens.len().div_ceil(self.config.block_size);
        let groups = self.kv.groups();
        let taken = |group| groups.blocks_to_take(group, hits.len(), total);
        let taken: usize = (0..groups.len()).map(taken).sum();
        let held = |group| hits.len() - groups.first_hit(group, hits.len());
        let held: usize = (0..groups.len()).map(held).sum();
        Needs { node, entries: taken + held, blocks: taken + self.kv.count_free(hits) }
    }

    fn max_hits(&self, id: SequenceId) -> usize {
        (self.sequences[id].tokens.len() - 1) / self.config.block_size
    }

    /// The running sequence that will compute the node a waiting one needs next, and how many blocks that one will have
    /// indexed when all they have in common is there.
    fn find_awaited(
        &self,
        id: SequenceId,
        node: NodeUid,
        hits: usize,
    ) -> Option<(SequenceId, usize)> {
        let block_size = self.config.block_size;
        let max_hits = self.max_hits(id);
        if hits >= max_hits || self.in_flight_prefixes.len() == 0 {
            return None;
        }
        let tokens = &self.sequences[id].tokens[hits * block_size..max_hits * block_size];
        let wanted = (node, &tokens[..block_size]);
        let hash = self.kv.prefix().hash(wanted.0, wanted.1);
        let sequences = &self.sequences;
        let same = |other: SequenceId| sequences[other].next_node(block_size) == wanted;
        let awaited = self.in_flight_prefixes.find(hash, same)?;
        let other = &sequences[awaited];
        let start = other.indexed * block_size;
        let coming = other.tokens[start..other.prefill_len].chunks_exact(block_size);
        let common =
            coming.zip(tokens.chunks_exact(block_size)).take_while(|(a, b)| a == b).count();
        Some((awaited, other.indexed + common))
    }

    /// Set a waiting sequence aside when a running one will compute the node it needs next.
    fn defer(&mut self, id: SequenceId, node: NodeUid, hits: usize) -> bool {
        let Some((awaited, blocks)) = self.find_awaited(id, node, hits) else { return false };
        let sequence = &mut self.sequences[id];
        sequence.state = State::Deferred;
        sequence.awaits = Some((awaited, blocks));
        self.queue.defer(sequence.order, awaited, blocks);
        true
    }

    /// Give a waiting sequence its slots and the blocks of its tokens.
    fn admit(&mut self, id: SequenceId, hits: &[BlockId], node: NodeUid) {
        let place = self.sequences[id].request;
        let order = self.sequences[id].order;
        self.queue.remove(order);
        let slot = self.slots.take().expect("admission counted the slots");
        self.slots.assign(slot, id);
        for _ in 1..self.num_samples(id) {
            let slot = self.slots.take().expect("admission counted the slots");
            self.requests[place].reserved.push(slot);
        }
        let cached = hits.len() * self.config.block_size;
        let sequence = &mut self.sequences[id];
        sequence.state = State::Prefill;
        sequence.slot = slot;
        sequence.prefill_len = sequence.tokens.len();
        (sequence.computed, sequence.committed) = (cached, cached);
        (sequence.indexed, sequence.node) = (hits.len(), node);
        sequence.params_due = true;
        // Room for a while, so that a step of running answers allocates nothing.
        let growth = (sequence.token_limit - sequence.tokens.len()).min(1024);
        sequence.tokens.reserve(growth);
        self.fill_tables(id, hits, growth.div_ceil(self.config.block_size));
        let tokens = self.sequences[id].tokens.len() as u64;
        let running = order.running();
        let at = self
            .prefilling
            .partition_point(|&other| self.sequences[other].order.running() < running);
        self.prefilling.insert(at, id);
        if self.config.enable_prefix_caching {
            self.stats.prefix_query_tokens += tokens;
            self.stats.prefix_hit_tokens += cached as u64;
            self.renew_in_flight_prefix(id);
        }
        let request = &mut self.requests[place];
        if request.cached_tokens.is_none() {
            request.cached_tokens = Some(cached as u32);
            let (request_id, prompt) = (request.spec.request_id, request.num_prompt as u64);
            self.started.push(request_id);
            self.stats.prompt_tokens += prompt;
            self.stats.cached_prompt_tokens += cached as u64;
        }
    }

    /// Put hits and new blocks into the empty tables of a sequence, with room for `growth` more entries.
    fn fill_tables(&mut self, id: SequenceId, hits: &[BlockId], growth: usize) {
        let sequence = &mut self.sequences[id];
        let total = sequence.tokens.len().div_ceil(self.config.block_size);
        // Hits first, so that no new block takes the place of one.
        for (group, table) in sequence.tables.iter_mut().enumerate() {
            table.reserve(total + growth);
            table.skip(self.kv.groups().first_hit(group, hits.len()));
            for &anchor in &hits[table.len()..] {
                let block = self.kv.prefix().group_block(anchor, group);
                self.kv.acquire(block);
                table.push(block);
            }
        }
        for (group, table) in sequence.tables.iter_mut().enumerate() {
            for _ in 0..self.kv.groups().blocks_to_take(group, hits.len(), total) {
                table.push(self.kv.take().expect("admission counted the blocks"));
            }
        }
    }
}
