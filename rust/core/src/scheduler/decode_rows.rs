//! Decode rows: one token for every running answer past its prompt.

use crate::ids::SequenceId;
use crate::kv_cache::block_table::BlockTable;
use crate::scheduler::Scheduler;
use crate::scheduler::sequence::State;
use crate::step::open_step::{OpenRow, OpenStep};
use crate::step::writer::PlanWriter;

impl Scheduler {
    pub(super) fn choose_decode_rows(&mut self, writer: &mut PlanWriter<'_>, open: &mut OpenStep) {
        let num_groups = self.kv.groups().len();
        let has_windows = self.kv.groups().has_windows();
        for i in 0..self.decoding.len() {
            let id = self.decoding[i];
            let sequence = &self.sequences[id];
            if sequence.state != State::Decode || sequence.is_at_limit() {
                continue;
            }
            if sequence.in_flight > 0 && self.requests[sequence.request].spec.constrained {
                continue;
            }
            if has_windows {
                for group in 0..num_groups {
                    self.release_passed(id, group);
                }
            }
            let sequence = &self.sequences[id];
            if sequence.tables.num_unsynced() + num_groups > writer.tables_left()
                || self.biases(id).len() > writer.biases_left()
                || !self.make_room(id, open.step, writer)
            {
                continue;
            }
            self.write_decode_row(id, writer, open);
        }
        writer.end_decode_rows();
        for block in self.set_aside.drain(..) {
            self.kv.release(block);
        }
    }

    fn write_decode_row(
        &mut self,
        id: SequenceId,
        writer: &mut PlanWriter<'_>,
        open: &mut OpenStep,
    ) {
        let block_size = self.config.block_size;
        let sequence = &mut self.sequences[id];
        let position = sequence.computed;
        let token = if sequence.in_flight > 0 { -1 } else { sequence.tokens[position] as i32 };
        let (entry, within) = (position / block_size, position % block_size);
        let at = writer.plan().num_tokens;
        let slot = sequence.slot;
        let (first, others) = sequence.tables.split_mut();
        write_updates(first, slot.index(), writer);
        writer.row(slot, position + 1, 1, 1);
        writer.token(token, position, first.blocks()[entry].index() * block_size + within);
        for (group, table) in (1..).zip(others) {
            write_updates(table, group * self.config.max_num_seqs + slot.index(), writer);
            writer.group_slot(group, at, table.blocks()[entry].index() * block_size + within);
        }
        sequence.computed += 1;
        sequence.open_rows += 1;
        sequence.chosen_in = open.step;
        open.rows.push(OpenRow { id, end: position + 1, num_sampled: 1 });
        self.write_sample(id, writer, open);
    }

    /// Logit changes of a sequence's next sample.
    pub(super) fn biases(&self, id: SequenceId) -> &[(u32, f32)] {
        let sequence = &self.sequences[id];
        self.requests[sequence.request].biases(sequence.len() < sequence.min_len)
    }

    /// Draw a sample of a sequence from the last token written.
    pub(super) fn write_sample(
        &mut self,
        id: SequenceId,
        writer: &mut PlanWriter<'_>,
        open: &mut OpenStep,
    ) {
        let sequence = &self.sequences[id];
        let logit = writer.logit(sequence.slot);
        writer.bias(logit, self.biases(id));
        let spec = &self.requests[sequence.request].spec;
        if spec.constrained {
            writer.mask(logit);
            self.masked.push((spec.request_id, sequence.sample_index));
        }
        self.sequences[id].in_flight += 1;
        open.samples.push(id);
    }

    /// Release the blocks that left a group's window. Blocks that are not indexed yet wait until they are. Returns how
    /// many came free.
    pub(super) fn release_passed(&mut self, id: SequenceId, group: usize) -> usize {
        let sequence = &mut self.sequences[id];
        let keep = if self.config.enable_prefix_caching { sequence.indexed } else { usize::MAX };
        let first = self.kv.groups().first_block(group, sequence.computed).min(keep);
        let table = sequence.tables.group_mut(group);
        if first <= table.num_released() {
            return 0;
        }
        table.release_before(first, &mut self.scratch);
        let freed = self.kv.release_table(&self.scratch);
        self.scratch.clear();
        freed
    }

    /// Make the blocks of a sequence's next token its own in every group. Preempts others when no block is free; false
    /// when the sequence itself was preempted.
    fn make_room(&mut self, id: SequenceId, step: u64, writer: &mut PlanWriter<'_>) -> bool {
        // Most rows need nothing; their needs are not listed.
        let sequence = &self.sequences[id];
        let entry = sequence.computed / self.config.block_size;
        let pool = self.kv.pool();
        let owns = |table: &BlockTable| {
            table.blocks().get(entry).is_some_and(|&block| !pool.is_shared(block))
        };
        if sequence.tables.iter().all(owns) {
            return true;
        }
        loop {
            self.find_needs(id);
            if self.needs.is_empty() {
                return true;
            }
            while self.gathered.len() < self.needs.len() {
                let Some(block) = self.kv.take() else { break };
                let is_copy = self.needs[self.gathered.len()].1.is_some();
                if is_copy && writer.is_copy_source(block) {
                    // A device may run all copies of a step at once: none writes what another reads.
                    self.set_aside.push(block);
                } else {
                    self.gathered.push(block);
                }
            }
            if self.gathered.len() == self.needs.len() {
                self.take_gathered(id, writer);
                return true;
            }
            self.kv.release_table(&self.gathered);
            self.gathered.clear();
            let Some(victim) = self.loses_least(step) else { return false };
            self.preempt(victim);
            if victim == id {
                return false;
            }
        }
    }

    /// The groups in which a sequence's next token has no block of its own, each with the shared block to copy.
    fn find_needs(&mut self, id: SequenceId) {
        self.needs.clear();
        let sequence = &self.sequences[id];
        let entry = sequence.computed / self.config.block_size;
        for (group, table) in sequence.tables.iter().enumerate() {
            match table.blocks().get(entry) {
                Some(&block) if !self.kv.pool().is_shared(block) => {}
                other => self.needs.push((group, other.copied())),
            }
        }
    }

    fn take_gathered(&mut self, id: SequenceId, writer: &mut PlanWriter<'_>) {
        let sequence = &mut self.sequences[id];
        let entry = sequence.computed / self.config.block_size;
        for (block, (group, shared)) in self.gathered.drain(..).zip(self.needs.drain(..)) {
            let table = sequence.tables.group_mut(group);
            let Some(source) = shared else {
                table.push(block);
                continue;
            };
            table.replace(entry, block);
            writer.copy(source, block);
            self.kv.release(source);
            self.row_groups.invalidate();
        }
    }
}

/// Write the entries of a table that the device does not know yet.
#[inline]
fn write_updates(table: &mut BlockTable, row: usize, writer: &mut PlanWriter<'_>) {
    if table.num_unsynced() > 0 {
        let (start, blocks) = table.sync();
        writer.table(row, start, blocks);
    }
}
