//! Admission: which waiting sequences begin to run, and which step aside for a prefix under way.

use crate::block::{BlockId, NodeUid, SequenceId};
use crate::core::Core;
use crate::sequence::State;

impl Core {
    /// Whether nothing runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.decoding.is_empty() && self.prefilling.is_empty()
    }

    pub(crate) fn could_admit(&self) -> bool {
        self.queue.num_waiting() > 0 && self.slots.num_free() > 0
    }

    /// Admit the first waiting sequence that need not wait for another's prefix, if it fits.
    pub(crate) fn admit_first(&mut self, tables_left: usize) -> Option<SequenceId> {
        loop {
            // First of all, so that full slots cost the same however many wait.
            if self.slots.num_free() == 0 {
                return None;
            }
            let id = self.queue.first()?;
            let sequence = &self.sequences[id];
            let order = sequence.order;
            let request = self.request(sequence.request);
            let samples = if request.forked { 1 } else { request.spec.n };
            // Its token in flight is not known yet; or nothing came free since it last found too few blocks.
            let hopeless = self.blocked == Some((order, self.kv.frees));
            // More sequences than can run wait for prefixes under way: one step looks at no more of them.
            let crowded = self.queue.num_deferred() >= self.config.max_num_seqs;
            if samples > self.slots.num_free() || sequence.open_rows > 0 || hopeless || crowded {
                return None;
            }
            let block_size = self.config.block_size;
            let max_hits = (sequence.tokens.len() - 1) / block_size;
            let mut node = request.root;
            let mut hits = std::mem::take(&mut self.scratch);
            let sequence = &self.sequences[id];
            if self.config.enable_prefix_caching {
                node = self.kv.prefix().walk(node, &sequence.tokens, max_hits, &mut hits);
                if hits.len() < max_hits && self.defer(id, node, hits.len(), max_hits) {
                    hits.clear();
                    self.scratch = hits;
                    continue;
                }
            }
            let sequence = &self.sequences[id];
            let total = sequence.tokens.len().div_ceil(block_size);
            let needed = total - hits.len();
            let leaving = needed + self.kv.count_free(&hits);
            let watermark = if self.is_idle() { 0 } else { self.config.watermark() };
            let fits = leaving + watermark <= self.kv.pool().num_free();
            if !fits {
                self.blocked = Some((order, self.kv.frees));
            }
            let admitted = fits && total <= tables_left;
            if admitted {
                self.admit(id, &hits, needed, node);
            }
            hits.clear();
            self.scratch = hits;
            return admitted.then_some(id);
        }
    }

    /// Set a waiting sequence aside when a running one will compute the node it needs next.
    fn defer(&mut self, id: SequenceId, node: NodeUid, hits: usize, max_hits: usize) -> bool {
        let block_size = self.config.block_size;
        if self.promises.len() == 0 {
            return false;
        }
        let tokens = &self.sequences[id].tokens[hits * block_size..max_hits * block_size];
        let wanted = (node, &tokens[..block_size]);
        let hash = self.kv.prefix().hash(wanted.0, wanted.1);
        let sequences = &self.sequences;
        let Some(awaited) =
            self.promises.find(hash, |other| sequences[other].promises(block_size) == wanted)
        else {
            return false;
        };
        let other = &sequences[awaited];
        let start = other.indexed * block_size;
        let promised = other.tokens[start..other.prefill_len].chunks_exact(block_size);
        let common =
            promised.zip(tokens.chunks_exact(block_size)).take_while(|(a, b)| a == b).count();
        let blocks = other.indexed + common;
        let sequence = &mut self.sequences[id];
        sequence.state = State::Deferred;
        sequence.awaits = Some((awaited, blocks));
        self.queue.defer(sequence.order, awaited, blocks);
        true
    }

    /// Give a waiting sequence its slots and the blocks of its tokens.
    fn admit(&mut self, id: SequenceId, hits: &[BlockId], needed: usize, node: NodeUid) {
        let cached = hits.len() * self.config.block_size;
        for &block in hits {
            self.kv.acquire(block);
        }
        let place = self.sequences[id].request;
        let order = self.sequences[id].order;
        self.queue.remove(order);
        let slot = self.slots.take().expect("admission counted the slots");
        self.slots.assign(slot, id);
        let samples = self.num_samples(id);
        for _ in 1..samples {
            let slot = self.slots.take().expect("admission counted the slots");
            self.request_mut(place).reserved.push(slot);
        }

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
        sequence.table.reserve(hits.len() + needed + growth.div_ceil(self.config.block_size));
        sequence.table.extend(hits);
        for _ in 0..needed {
            sequence.table.push(self.kv.take().expect("admission counted the blocks"));
        }
        let tokens = sequence.tokens.len() as u64;
        let running = order.running();
        let at = self
            .prefilling
            .partition_point(|&other| self.sequences[other].order.running() < running);
        self.prefilling.insert(at, id);
        if self.config.enable_prefix_caching {
            self.stats.prefix_query_tokens += tokens;
            self.stats.prefix_hit_tokens += cached as u64;
            self.renew_promise(id);
        }
        let request = self.request_mut(place);
        if request.cached_tokens.is_none() {
            request.cached_tokens = Some(cached as u32);
            let (request_id, prompt) = (request.spec.request_id, request.num_prompt as u64);
            self.started.push(request_id);
            self.stats.prompt_tokens += prompt;
            self.stats.cached_prompt_tokens += cached as u64;
        }
    }
}
