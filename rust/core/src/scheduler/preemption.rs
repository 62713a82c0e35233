//! Preemption: which running sequence gives its blocks and slot to another. It is computed again later.

use crate::config::Policy;
use crate::ids::SequenceId;
use crate::kv_cache::block_table::BlockTable;
use crate::scheduler::Scheduler;
use crate::scheduler::sequence::State;

impl Scheduler {
    /// Release a running sequence's blocks and slot; it waits at the head of its class and is computed again.
    pub(super) fn preempt(&mut self, id: SequenceId) {
        self.leave(id);
        let sequence = &mut self.sequences[id];
        sequence.state = State::Waiting;
        sequence.order.not_preempted = false;
        self.queue.push(sequence.order, id);
        self.stats.preemptions += 1;
    }

    /// The running sequence, not chosen for `step`, that loses least by being preempted.
    pub(super) fn loses_least(&self, step: u64) -> Option<SequenceId> {
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

    /// Preempt a prompt that waits for blocks so that an older one can proceed; false when only one runs.
    pub(super) fn preempt_stalled(&mut self, step: u64) -> bool {
        let oldest = self.prefilling.first().copied();
        let victim = self.loses_least(step).filter(|&id| Some(id) != oldest);
        let Some(victim) = victim.or_else(|| self.prefilling.get(1..)?.last().copied()) else {
            return false;
        };
        self.preempt(victim);
        self.drop_stopped();
        true
    }

    /// Under the priority policy: preempt less urgent running sequences when the first waiting ones find no slot or too
    /// few blocks.
    ///
    /// A sequence gives way only to a request of a more urgent priority that is also before it in the order with aging,
    /// so it never takes its place back from that request, and a long wait protects it.
    pub(super) fn displace_for_urgent(&mut self) {
        if self.config.policy != Policy::Priority {
            return;
        }
        let mut slots = self.slots.num_free();
        let mut displaced = false;
        let mut blocks = self.kv.pool().num_free().saturating_sub(self.config.watermark());
        let mut after = None;
        while let Some(id) = self.queue.next(after) {
            let Some((samples, needed)) = self.admission_needs(id) else { break };
            while samples > slots || needed > blocks {
                if !self.can_displace(id, samples.saturating_sub(slots), needed, blocks) {
                    break;
                }
                let Some(victim) = self.least_urgent_below(id) else { break };
                let (free_slots, free_blocks) = (self.slots.num_free(), self.kv.pool().num_free());
                self.preempt(victim);
                displaced = true;
                slots += self.slots.num_free() - free_slots;
                blocks += self.kv.pool().num_free() - free_blocks;
            }
            if samples > slots || needed > blocks {
                break;
            }
            (slots, blocks) = (slots - samples, blocks - needed);
            after = Some(self.sequences[id].order);
        }
        if displaced {
            self.drop_stopped();
        }
    }

    /// Whether the sequences that would give way to a waiting one have enough slots and blocks.
    fn can_displace(&self, id: SequenceId, slots: usize, needed: usize, blocks: usize) -> bool {
        let pool = self.kv.pool();
        let (mut found_slots, mut found_blocks) = (0, blocks);
        for &other in self.decoding.iter().chain(&self.prefilling) {
            if self.gives_way(other, id) {
                found_slots += 1;
                let tables = self.sequences[other].tables.iter();
                let held = tables.flat_map(BlockTable::held);
                found_blocks += held.filter(|&&block| !pool.is_shared(block)).count();
                if found_slots >= slots && found_blocks >= needed {
                    return true;
                }
            }
        }
        false
    }

    fn least_urgent_below(&self, id: SequenceId) -> Option<SequenceId> {
        let running = self.decoding.iter().chain(&self.prefilling).copied();
        running.filter(|&other| self.gives_way(other, id)).max_by_key(|&other| {
            let sequence = &self.sequences[other];
            (sequence.is_at_limit(), sequence.order.running())
        })
    }

    /// Whether a running sequence gives way to a waiting one.
    fn gives_way(&self, running: SequenceId, waiting: SequenceId) -> bool {
        let (running, waiting) = (&self.sequences[running], &self.sequences[waiting]);
        let priority = |place| self.requests[place].spec.priority;
        running.is_running()
            && waiting.order.key < running.order.key
            && priority(waiting.request) < priority(running.request)
    }
}
