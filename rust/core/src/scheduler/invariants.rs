//! What must hold between any two calls.

use std::collections::VecDeque;

use crate::ids::{BlockId, NodeUid, SequenceId};
use crate::kv_cache::block_pool::BlockState;
use crate::kv_cache::block_table::BlockTable;
use crate::scheduler::Scheduler;
use crate::scheduler::sequence::{Sequence, State};
use crate::step::open_step::OpenStep;

impl Scheduler {
    /// Check that the core does not contradict itself.
    ///
    /// # Errors
    /// Says what contradicts what.
    pub(crate) fn check_invariants(&self, open: &VecDeque<OpenStep>) -> Result<(), String> {
        self.kv.pool().check()?;
        self.kv.prefix().check()?;
        self.check_blocks()?;
        self.check_queues()?;
        for (id, sequence) in self.sequences.iter() {
            self.check_sequence(id, sequence).map_err(|error| format!("{id:?}: {error}"))?;
        }
        self.check_slots()?;
        self.check_open_steps(open)
    }

    /// Reference counts equal table entries, and free and used blocks are all there are.
    fn check_blocks(&self) -> Result<(), String> {
        let mut counts = vec![0_u32; self.config.num_blocks];
        for (_, sequence) in self.sequences.iter() {
            for block in sequence.tables.iter().flat_map(BlockTable::held) {
                counts[block.index()] += 1;
            }
        }
        if counts[0] > 0 {
            return Err("the null block is in a table".into());
        }
        let mut used = 0;
        for (i, &count) in counts.iter().enumerate().skip(1) {
            let state = self.kv.pool().state(BlockId(i as u32));
            let expected =
                if count == 0 { BlockState::Free } else { BlockState::Referenced(count) };
            if state != expected {
                return Err(format!("block {i}: {state:?}, and in {count} tables"));
            }
            used += usize::from(count > 0);
        }
        let pool = self.kv.pool();
        if pool.num_free() + used != pool.usable() {
            return Err(format!(
                "{} free and {used} used blocks are not {}",
                pool.num_free(),
                pool.usable()
            ));
        }
        let cached = pool.free_blocks().filter(|&block| self.kv.prefix().contains(block)).count();
        let stats = self.stats();
        if stats.blocks_free_cached != cached as u64 {
            return Err(format!(
                "{cached} free blocks are cached, not {}",
                stats.blocks_free_cached
            ));
        }
        if stats.slots_unfilled > stats.slots_held {
            return Err(format!(
                "{} of {} slots are unfilled",
                stats.slots_unfilled, stats.slots_held
            ));
        }
        Ok(())
    }

    /// Every unfinished sequence is in exactly the list its state names.
    fn check_queues(&self) -> Result<(), String> {
        let mut seen: Vec<(SequenceId, State)> =
            self.queue.waiting().map(|(_, id)| (id, State::Waiting)).collect();
        seen.extend(self.queue.deferred().map(|(.., id)| (id, State::Deferred)));
        seen.extend(self.prefilling.iter().map(|&id| (id, State::Prefill)));
        seen.extend(self.decoding.iter().map(|&id| (id, State::Decode)));
        seen.sort_unstable_by_key(|entry| entry.0);
        let states = self.sequences.iter().map(|(id, sequence)| (id, sequence.state));
        let expected: Vec<_> = states.filter(|(_, state)| *state != State::Finished).collect();
        if seen != expected {
            return Err(format!("lists hold {seen:?}, sequences are {expected:?}"));
        }
        for list in [&self.decoding, &self.prefilling] {
            if !list.is_sorted_by_key(|&id| self.sequences[id].order.running()) {
                return Err(format!("running sequences are out of order: {list:?}"));
            }
        }
        for (awaited, blocks, id) in self.queue.deferred() {
            let other = &self.sequences[awaited];
            if !other.is_running() || other.in_flight_prefix.is_none() || blocks <= other.indexed {
                return Err(format!("{id:?} waits for {awaited:?}, which will not wake it"));
            }
        }
        Ok(())
    }

    fn check_sequence(&self, id: SequenceId, sequence: &Sequence) -> Result<(), String> {
        let Sequence { computed, committed, indexed, .. } = *sequence;
        let block_size = self.config.block_size;
        let lengths = || sequence.tables.iter().map(|table| table.len() * block_size);
        let (holds, room) = (lengths().max().unwrap_or(0), lengths().min().unwrap_or(0));
        if !sequence.is_running()
            && (holds > 0 || computed > 0 || sequence.in_flight_prefix.is_some())
        {
            return Err(format!("{:?} and holds blocks or computes a prefix", sequence.state));
        }
        // With windows, the blocks of a prompt are indexed when its next row is planned.
        let written = if self.kv.groups().has_windows() { computed } else { committed };
        if committed > computed || indexed * block_size > written || computed > room {
            return Err(format!(
                "{indexed} blocks indexed, {committed} of {computed} tokens committed, room for {room}"
            ));
        }
        for (group, table) in sequence.tables.iter().enumerate() {
            let first = self.kv.groups().first_block(group, computed.saturating_sub(1));
            if table.num_released() > first.max(self.kv.groups().first_block(group, computed)) {
                return Err(format!("group {group}: a block inside the window is released"));
            }
            if table.held().contains(&BlockId::NULL) {
                return Err(format!("group {group}: the null block is in the table"));
            }
        }
        if sequence.len() > sequence.token_limit && sequence.state != State::Finished {
            return Err(format!(
                "{} tokens pass the limit of {}",
                sequence.len(),
                sequence.token_limit
            ));
        }
        if sequence.state == State::Decode && computed + 1 != sequence.len() {
            return Err(format!("{computed} tokens computed of {} while decoding", sequence.len()));
        }
        if sequence.state != State::Finished
            && sequence.in_flight > 1
            && self.requests[sequence.request].spec.constrained
        {
            return Err(format!("{} masked samples in flight", sequence.in_flight));
        }
        if sequence.state == State::Finished {
            return if sequence.open_rows > 0 { Ok(()) } else { Err("ended and kept".into()) };
        }
        let request = self.requests.get(sequence.request);
        if request.is_none_or(|request| !request.sequences.contains(&id)) {
            return Err("its request does not know it".into());
        }
        self.check_prefix(sequence)
    }

    /// The indexed blocks of a sequence are those of its prefix in every group.
    fn check_prefix(&self, sequence: &Sequence) -> Result<(), String> {
        let groups = self.kv.groups();
        if groups.is_sliding(groups.anchor()) {
            return Ok(());
        }
        let mut node = self.requests[sequence.request].root;
        let anchors = sequence.tables.group(groups.anchor()).blocks();
        let chunks = sequence.tokens.chunks_exact(self.config.block_size);
        for (entry, (&anchor, tokens)) in
            anchors.iter().zip(chunks).take(sequence.indexed).enumerate()
        {
            let found = self.kv.prefix().find(node, tokens);
            if found.is_none_or(|(canonical, _)| canonical != anchor) {
                return Err(format!("{anchor:?} of its table is not the block of its prefix"));
            }
            for (group, table) in sequence.tables.iter().enumerate() {
                let canonical = self.kv.prefix().group_block(anchor, group);
                if entry >= table.num_released() && table.blocks()[entry] != canonical {
                    return Err(format!("group {group}: entry {entry} is not {canonical:?}"));
                }
            }
            node = found.map_or(NodeUid::NONE, |found| found.1);
        }
        Ok(())
    }

    /// Slots, holders and reservations agree.
    fn check_slots(&self) -> Result<(), String> {
        let mut held = 0;
        for (slot, id) in self.slots.holders() {
            if self.sequences[id].slot != slot || !self.sequences[id].is_running() {
                return Err(format!("{slot:?} is held by {id:?}, which is elsewhere"));
            }
            held += 1;
        }
        if held != self.decoding.len() + self.prefilling.len() {
            return Err(format!(
                "{held} slots held by {} sequences",
                self.decoding.len() + self.prefilling.len()
            ));
        }
        let reserved: usize = self.requests.iter().map(|request| request.reserved.len()).sum();
        if held + reserved + self.slots.num_free() != self.config.max_num_seqs {
            return Err(format!(
                "{held} held, {reserved} reserved, {} free slots",
                self.slots.num_free()
            ));
        }
        Ok(())
    }

    /// Open steps keep to the budget, and their rows and samples are counted by their sequences.
    fn check_open_steps(&self, steps: &VecDeque<OpenStep>) -> Result<(), String> {
        for (id, sequence) in self.sequences.iter() {
            let samples =
                steps.iter().flat_map(|open| &open.samples).filter(|&&sample| sample == id).count();
            let leads = steps.iter().flat_map(|open| &open.rows).filter(|row| row.id == id).count();
            if samples != sequence.in_flight
                || sequence.open_rows < leads
                || sequence.open_rows > leads + samples
            {
                return Err(format!("{id:?}: {samples} samples and {leads} rows in flight"));
            }
        }
        if steps.len() > 2 {
            return Err(format!("{} steps are open", steps.len()));
        }
        for open in steps {
            let sampled: usize = open.rows.iter().map(|row| row.num_sampled).sum();
            if sampled != open.samples.len() || open.rows.len() > self.config.max_num_seqs {
                return Err(format!(
                    "step {}: {sampled} samples, {} rows",
                    open.step,
                    open.rows.len()
                ));
            }
        }
        Ok(())
    }
}
