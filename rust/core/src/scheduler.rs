//! The scheduler: which rows make up the next step.
//!
//! 1. Every running answer past its prompt gets one token; a constrained one waits until its last is committed, for
//!    its set of tokens depends on it. One that finds no free block preempts the running sequence
//!    that loses least and was not chosen yet: first those whose last token is in flight (they lose nothing), then under
//!    the priority policy the least urgent, then the fewest computed tokens, then the youngest.
//! 2. Prompts under way share what is left of the token budget, oldest first. While others could use it too, one prompt
//!    takes at most half of what is left (a block at least).
//! 3. Waiting requests are admitted in order while slots, blocks (down to the watermark) and table updates last, unless
//!    something was preempted in this step and something still runs. A request whose next block a running prompt will compute steps aside until
//!    all they have in common is there. All blocks of a prompt are taken at admission, so a prompt never preempts.
//! 4. What is left of the budget goes to the prompts that were cut short.

use crate::block::SequenceId;
use crate::commit::{OpenRow, OpenStep};
use crate::config::Policy;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::plan::{PlanWriter, StepPlan};
use crate::sequence::State;

impl Core {
    /// Choose the next step and fill `arena`, the one `next_arena` names; `None` when nothing can run now.
    ///
    /// # Errors
    /// When two steps are open, or the arena is shorter than the layout.
    pub fn plan(&mut self, arena: &mut [i32]) -> Result<Option<StepPlan>> {
        if self.open.len() >= 2 {
            return Err(Error::TooManyOpenSteps);
        }
        let index = self.next_arena();
        let step = self.step + 1;
        let mut writer = PlanWriter::new(&self.layout, arena, step, index)?;
        let mut open = self.spare.pop().unwrap_or_default();
        open.clear(step);
        self.masked.clear();

        let preemptions = self.stats.preemptions;
        self.choose_decode_rows(&mut writer, &mut open);
        let preempted = self.stats.preemptions > preemptions;
        if preempted {
            self.drop_stopped();
        }
        let admit = !preempted || self.is_idle();
        self.write_groups(&mut writer, &open);
        self.choose_prompt_rows(&writer, admit);
        self.write_prompt_rows(&mut writer, &mut open);

        if open.rows.is_empty() {
            self.spare.push(open);
            return Ok(None);
        }
        self.step = step;
        std::mem::swap(&mut open.started, &mut self.started);
        self.stats.steps += 1;
        self.open.push_back(open);
        Ok(Some(writer.finish()))
    }

    fn choose_decode_rows(&mut self, writer: &mut PlanWriter<'_>, open: &mut OpenStep) {
        let block_size = self.config.block_size;
        for i in 0..self.decoding.len() {
            let id = self.decoding[i];
            let sequence = &self.sequences[id];
            if sequence.state != State::Decode || sequence.is_at_limit() {
                continue;
            }
            let position = sequence.computed;
            if sequence.in_flight > 0 && self.request(sequence.request).spec.constrained {
                continue;
            }
            if sequence.table.num_unsynced() + 1 > writer.tables_left()
                || self.biases(id).len() > writer.biases_left()
                || !self.make_room(id, open.step, writer)
            {
                continue;
            }
            let sequence = &mut self.sequences[id];
            if sequence.table.num_unsynced() > 0 {
                let (start, blocks) = sequence.table.sync();
                writer.table(sequence.slot, start, blocks);
            }
            let token = if sequence.in_flight > 0 { -1 } else { sequence.tokens[position] as i32 };
            let block = sequence.table.blocks()[position / block_size];
            writer.row(sequence.slot, position + 1, 1, 1);
            writer.token(token, position, block.index() * block_size + position % block_size);
            sequence.computed += 1;
            sequence.open_rows += 1;
            sequence.chosen_in = open.step;
            open.rows.push(OpenRow { id, end: position + 1, num_sampled: 1 });
            self.write_sample(id, writer, open);
        }
        writer.plan.num_decode_rows = writer.plan.num_rows;
        for block in self.set_aside.drain(..) {
            self.kv.release(block);
        }
    }

    /// What is added to the logits of the next sample of a sequence.
    fn biases(&self, id: SequenceId) -> &[(u32, f32)] {
        let sequence = &self.sequences[id];
        self.request(sequence.request).biases(sequence.len() < sequence.min_len)
    }

    /// Draw a sample of a sequence from the last token written.
    fn write_sample(&mut self, id: SequenceId, writer: &mut PlanWriter<'_>, open: &mut OpenStep) {
        let sequence = &self.sequences[id];
        let logit = writer.logit(sequence.slot);
        writer.bias(logit, self.biases(id));
        let spec = &self.request(sequence.request).spec;
        if spec.constrained {
            writer.mask(logit);
            self.masked.push((spec.request_id, sequence.sample_index));
        }
        self.sequences[id].in_flight += 1;
        open.samples.push(id);
    }

    /// See to it that the block of the next token is the sequence's own, preempting others if no block is free; false
    /// when the sequence itself had to give way.
    fn make_room(&mut self, id: SequenceId, step: u64, writer: &mut PlanWriter<'_>) -> bool {
        loop {
            let sequence = &mut self.sequences[id];
            let entry = sequence.computed / self.config.block_size;
            let shared = match sequence.table.blocks().get(entry) {
                Some(&block) if !self.kv.pool().is_shared(block) => return true,
                other => other.copied(),
            };
            if let Some(block) = self.kv.take() {
                let Some(source) = shared else {
                    sequence.table.push(block);
                    return true;
                };
                if writer.is_copy_source(block) {
                    // Copies of a step may run at once: none writes what another reads.
                    self.set_aside.push(block);
                    continue;
                }
                sequence.table.replace(entry, block);
                writer.copy(source, block);
                self.kv.release(source);
                self.groups.invalidate();
                return true;
            }
            let Some(victim) = self.loses_least(step) else { return false };
            self.preempt(victim);
            if victim == id {
                return false;
            }
        }
    }

    /// The running sequence, not chosen for `step`, that loses least by being preempted.
    fn loses_least(&self, step: u64) -> Option<SequenceId> {
        let by_priority = self.config.policy == Policy::Priority;
        let candidates = self.decoding.iter().chain(&self.prefilling).copied();
        candidates
            .filter(|&id| self.sequences[id].is_running() && self.sequences[id].chosen_in != step)
            .min_by_key(|&id| {
                let sequence = &self.sequences[id];
                let key = if by_priority { sequence.order.key } else { 0 };
                let order = sequence.order.running();
                (
                    !sequence.is_at_limit(),
                    std::cmp::Reverse(key),
                    sequence.computed,
                    std::cmp::Reverse(order),
                )
            })
    }

    /// Fill `prompt_rows` with sequences and their tokens; admit from the queue if allowed.
    fn choose_prompt_rows(&mut self, writer: &PlanWriter<'_>, admit: bool) {
        self.prompt_rows.clear();
        let mut budget = self.config.max_num_batched_tokens - writer.plan.num_tokens;
        let mut tables = writer.tables_left();
        let mut biases = writer.biases_left();
        for i in 0..self.prefilling.len() {
            if budget == 0 {
                break;
            }
            let others = i + 1 < self.prefilling.len() || admit && self.could_admit();
            let id = self.prefilling[i];
            let unsynced = self.sequences[id].table.num_unsynced();
            if unsynced <= tables && self.choose_chunk(id, others, &mut budget, &mut biases) {
                tables -= unsynced;
            }
        }
        while admit && budget > 0 {
            let Some(id) = self.admit_first(tables) else { break };
            let others = self.could_admit();
            if self.choose_chunk(id, others, &mut budget, &mut biases) {
                tables -= self.sequences[id].table.num_unsynced();
            }
        }
        for i in 0..self.prompt_rows.len() {
            let (id, count) = self.prompt_rows[i];
            let left = self.sequences[id].prefill_len - self.sequences[id].computed - count;
            let more = left.min(budget);
            let needed = self.biases(id).len() * self.num_samples(id);
            if more > 0 && (more < left || needed <= biases) {
                self.prompt_rows[i].1 += more;
                budget -= more;
                biases -= if more == left { needed } else { 0 };
            }
        }
    }

    /// Samples drawn when the prompt of a sequence is complete.
    pub(crate) fn num_samples(&self, id: SequenceId) -> usize {
        let request = self.request(self.sequences[id].request);
        if request.forked { 1 } else { request.spec.n }
    }

    /// Choose the next tokens of a prompt; false when it has to wait for the next step.
    fn choose_chunk(
        &mut self,
        id: SequenceId,
        others: bool,
        budget: &mut usize,
        biases: &mut usize,
    ) -> bool {
        let sequence = &self.sequences[id];
        let left = sequence.prefill_len - sequence.computed;
        let cap = if others {
            budget.div_ceil(2).max(self.config.block_size).min(*budget)
        } else {
            *budget
        };
        let count = left.min(cap);
        if count == left {
            let needed = self.biases(id).len() * self.num_samples(id);
            if needed > *biases {
                return false;
            }
            *biases -= needed;
        }
        *budget -= count;
        self.prompt_rows.push((id, count));
        true
    }

    fn write_prompt_rows(&mut self, writer: &mut PlanWriter<'_>, open: &mut OpenStep) {
        let mut complete = false;
        let rows = std::mem::take(&mut self.prompt_rows);
        for &(id, count) in &rows {
            let last = self.sequences[id].computed + count == self.sequences[id].prefill_len;
            self.write_prompt_row(id, count, last, writer, open);
            complete |= last;
        }
        self.prompt_rows = rows;
        if !complete {
            return;
        }
        for row in &open.rows[writer.plan.num_decode_rows..] {
            if row.num_sampled == 0 {
                continue;
            }
            let place = self.sequences[row.id].request;
            for i in 0..row.num_sampled {
                let id = if i == 0 { row.id } else { self.request(place).sequences[i] };
                self.sequences[id].state = State::Decode;
                let running = self.sequences[id].order.running();
                let at = self
                    .decoding
                    .partition_point(|&other| self.sequences[other].order.running() < running);
                self.decoding.insert(at, id);
            }
        }
        let sequences = &self.sequences;
        self.prefilling.retain(|&id| sequences[id].state == State::Prefill);
    }

    fn write_prompt_row(
        &mut self,
        id: SequenceId,
        count: usize,
        last: bool,
        writer: &mut PlanWriter<'_>,
        open: &mut OpenStep,
    ) {
        let block_size = self.config.block_size;
        let num_sampled = if last { self.num_samples(id) } else { 0 };
        let sequence = &mut self.sequences[id];
        let (slot, start, end) = (sequence.slot, sequence.computed, sequence.computed + count);
        if std::mem::take(&mut sequence.params_due) {
            let (place, sample) = (sequence.request, sequence.sample_index);
            writer.params(slot, self.request(place).param_values(sample));
        }
        let sequence = &mut self.sequences[id];
        let (first, blocks) = sequence.table.sync();
        writer.table(slot, first, blocks);
        writer.row(slot, end, count, num_sampled);
        let blocks = sequence.table.blocks();
        for (position, &token) in (start..end).zip(&sequence.tokens[start..end]) {
            let block = blocks[position / block_size];
            writer.token(
                token as i32,
                position,
                block.index() * block_size + position % block_size,
            );
        }
        sequence.computed = end;
        sequence.open_rows += 1;
        sequence.chosen_in = open.step;
        let place = sequence.request;
        open.rows.push(OpenRow { id, end, num_sampled });
        if !last {
            return;
        }
        self.fork(id, num_sampled, writer);
        for i in 0..num_sampled {
            let id = if i == 0 { id } else { self.request(place).sequences[i] };
            self.write_sample(id, writer, open);
        }
    }

    /// Make the other answers of a request whose prompt is complete with this step: they share its blocks.
    fn fork(&mut self, lead: SequenceId, samples: usize, writer: &mut PlanWriter<'_>) {
        let place = self.sequences[lead].request;
        let request = self.request_mut(place);
        request.forked = true;
        let slots = std::mem::take(&mut request.reserved);
        debug_assert_eq!(slots.len() + 1, samples, "admission reserved the slots");
        for (sample, slot) in (1..).zip(slots) {
            let prompt = self.sequences[lead].tokens.clone();
            let id = self.add_sequence(place, sample, prompt);
            self.slots.assign(slot, id);
            writer.params(slot, self.request(place).param_values(sample));
            let parent = &self.sequences[lead];
            let (table, computed, prefill_len) =
                (parent.table.blocks().to_vec(), parent.computed, parent.prefill_len);
            let (indexed, node, chosen_in) = (parent.indexed, parent.node, parent.chosen_in);
            let committed = parent.committed;
            for &block in &table {
                self.kv.acquire(block);
            }
            let sequence = &mut self.sequences[id];
            sequence.slot = slot;
            sequence.state = State::Prefill;
            sequence.table.extend(&table);
            (sequence.computed, sequence.committed, sequence.prefill_len) =
                (computed, committed, prefill_len);
            (sequence.indexed, sequence.node, sequence.chosen_in) = (indexed, node, chosen_in);
            sequence.open_rows = 1;
        }
    }
}
