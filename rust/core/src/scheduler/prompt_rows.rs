//! Prompt rows: the next tokens of prompts in progress, and the fork of a finished prompt into its answers.

use crate::ids::SequenceId;
use crate::kv_cache::block_table::BlockTable;
use crate::scheduler::Scheduler;
use crate::scheduler::sequence::State;
use crate::step::open_step::{OpenRow, OpenStep};
use crate::step::writer::PlanWriter;

/// What is left of a step's capacities.
struct Budget {
    tokens: usize,
    tables: usize,
    biases: usize,
}

impl Scheduler {
    /// Fill `prompt_rows` with sequences and their tokens; admit from the queue if allowed.
    pub(super) fn choose_prompt_rows(&mut self, writer: &PlanWriter<'_>, admit: bool) {
        self.prompt_rows.clear();
        self.is_stalled = false;
        let mut budget = Budget {
            tokens: self.config.max_num_batched_tokens - writer.plan().num_tokens,
            tables: writer.tables_left(),
            biases: writer.biases_left(),
        };
        for i in 0..self.prefilling.len() {
            if budget.tokens == 0 {
                break;
            }
            let others = i + 1 < self.prefilling.len() || admit && self.could_admit();
            self.choose_chunk(self.prefilling[i], others, &mut budget);
        }
        while admit && budget.tokens > 0 && !self.is_stalled {
            let Some(id) = self.admit_first(budget.tables) else { break };
            let others = self.could_admit();
            self.choose_chunk(id, others, &mut budget);
        }
        for i in 0..self.prompt_rows.len() {
            self.lengthen_chunk(i, &mut budget);
        }
    }

    /// Samples drawn when the prompt of a sequence is complete.
    pub(super) fn num_samples(&self, id: SequenceId) -> usize {
        let request = &self.requests[self.sequences[id].request];
        if request.forked { 1 } else { request.spec.n }
    }

    /// Choose the next tokens of a prompt, or leave it for a later step.
    fn choose_chunk(&mut self, id: SequenceId, others: bool, budget: &mut Budget) {
        let sequence = &self.sequences[id];
        let left = sequence.prefill_len - sequence.computed;
        let cap = if others {
            budget.tokens.div_ceil(2).max(self.config.block_size).min(budget.tokens)
        } else {
            budget.tokens
        };
        let count = self.make_room_for_chunk(id, left.min(cap), budget.tables);
        let unsynced = self.sequences[id].tables.num_unsynced();
        if count == 0 || unsynced > budget.tables {
            return;
        }
        if count == left {
            let needed = self.biases(id).len() * self.num_samples(id);
            if needed > budget.biases {
                return;
            }
            budget.biases -= needed;
        }
        budget.tokens -= count;
        budget.tables -= unsynced;
        self.prompt_rows.push((id, count));
    }

    /// Give a chosen prompt what is left of the budget.
    fn lengthen_chunk(&mut self, row: usize, budget: &mut Budget) {
        let (id, count) = self.prompt_rows[row];
        let left = self.sequences[id].prefill_len - self.sequences[id].computed - count;
        let mut more = left.min(budget.tokens);
        if more > 0 && self.kv.groups().has_windows() {
            let before = self.sequences[id].tables.num_unsynced();
            let room = self.make_room_for_chunk(id, count + more, before + budget.tables);
            more = room.saturating_sub(count);
            budget.tables -= self.sequences[id].tables.num_unsynced() - before;
        }
        let needed = self.biases(id).len() * self.num_samples(id);
        if more > 0 && (more < left || needed <= budget.biases) {
            self.prompt_rows[row].1 += more;
            budget.tokens -= more;
            budget.biases -= if more == left { needed } else { 0 };
        }
    }

    /// See that the next `count` tokens of a prompt have their blocks in every group; how many have. Only sliding
    /// windows ever lack some: they release the blocks that the prompt has passed and take as many for its next tokens.
    /// At most `max_unsynced` table entries may be unsynced.
    fn make_room_for_chunk(
        &mut self,
        id: SequenceId,
        mut count: usize,
        max_unsynced: usize,
    ) -> usize {
        if !self.kv.groups().has_windows() {
            return count;
        }
        let block_size = self.config.block_size;
        let start = self.sequences[id].computed;
        if self.config.enable_prefix_caching {
            // Earlier steps write these blocks before any later step reads them, so they can be indexed before they
            // leave the window.
            self.index_blocks(id, start);
        }
        for group in 0..self.kv.groups().len() {
            let mut freed = self.release_passed(id, group);
            let sequence = &mut self.sequences[id];
            let total = sequence.prefill_len.div_ceil(block_size);
            let needed = (start + count).div_ceil(block_size);
            // The prompt keeps as many blocks as it took at admission.
            while sequence.tables.num_unsynced() < max_unsynced {
                let len = sequence.tables.group(group).len();
                if len >= needed && (freed == 0 || len >= total) {
                    break;
                }
                let Some(block) = self.kv.take() else { break };
                sequence.tables.group_mut(group).push(block);
                freed = freed.saturating_sub(1);
            }
            let room = sequence.tables.group(group).len() * block_size;
            count = count.min(room.saturating_sub(start));
        }
        self.is_stalled |= count == 0;
        count
    }

    pub(super) fn write_prompt_rows(&mut self, writer: &mut PlanWriter<'_>, open: &mut OpenStep) {
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
        for row in &open.rows[writer.plan().num_decode_rows..] {
            if row.num_sampled == 0 {
                continue;
            }
            let place = self.sequences[row.id].request;
            for i in 0..row.num_sampled {
                let id = if i == 0 { row.id } else { self.requests[place].sequences[i] };
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
        let place = sequence.request;
        if std::mem::take(&mut sequence.params_due) {
            let values = self.requests[place].param_values(sequence.sample_index);
            writer.params(slot, values);
        }
        writer.row(slot, end, count, num_sampled);
        let at = writer.plan().num_tokens;
        for (group, table) in sequence.tables.iter_mut().enumerate() {
            let (first, blocks) = table.sync();
            writer.table(group * self.config.max_num_seqs + slot.index(), first, blocks);
            let blocks = table.blocks();
            for (i, position) in (start..end).enumerate() {
                let block = blocks[position / block_size];
                let cache_slot = block.index() * block_size + position % block_size;
                if group == 0 {
                    writer.token(sequence.tokens[position] as i32, position, cache_slot);
                } else {
                    writer.group_slot(group, at + i, cache_slot);
                }
            }
        }
        sequence.computed = end;
        sequence.open_rows += 1;
        sequence.chosen_in = open.step;
        open.rows.push(OpenRow { id, end, num_sampled });
        if !last {
            return;
        }
        self.fork(id, num_sampled, writer);
        for i in 0..num_sampled {
            let id = if i == 0 { id } else { self.requests[place].sequences[i] };
            self.write_sample(id, writer, open);
        }
    }

    /// Make the other answers of a request whose prompt is complete with this step. They share its blocks.
    fn fork(&mut self, lead: SequenceId, samples: usize, writer: &mut PlanWriter<'_>) {
        let place = self.sequences[lead].request;
        let request = &mut self.requests[place];
        request.forked = true;
        let slots = std::mem::take(&mut request.reserved);
        debug_assert_eq!(slots.len() + 1, samples, "admission reserved the slots");
        for (sample, slot) in (1..).zip(slots) {
            let prompt = self.sequences[lead].tokens.clone();
            let id = self.add_sequence(place, sample, prompt);
            self.slots.assign(slot, id);
            writer.params(slot, self.requests[place].param_values(sample));
            let parent = &self.sequences[lead];
            let tables = parent.tables.fork();
            let (computed, committed) = (parent.computed, parent.committed);
            let (prefill_len, chosen_in) = (parent.prefill_len, parent.chosen_in);
            let (indexed, node) = (parent.indexed, parent.node);
            for block in tables.iter().flat_map(BlockTable::held) {
                self.kv.acquire(*block);
            }
            let sequence = &mut self.sequences[id];
            sequence.slot = slot;
            sequence.state = State::Prefill;
            sequence.tables = tables;
            (sequence.computed, sequence.committed) = (computed, committed);
            (sequence.prefill_len, sequence.chosen_in) = (prefill_len, chosen_in);
            (sequence.indexed, sequence.node) = (indexed, node);
            sequence.open_rows = 1;
        }
    }
}
