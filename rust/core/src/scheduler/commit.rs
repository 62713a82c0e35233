//! Commit: sampled tokens are appended, stop rules applied, written blocks indexed.

use crate::ids::SequenceId;
use crate::scheduler::Scheduler;
use crate::scheduler::requests::Request;
use crate::scheduler::sequence::{Sequence, State};
use crate::step::open_step::OpenStep;
use crate::step::output::{FinishReason, NO_STOP_REASON, StepOutput, StopReason};
use crate::text::TokenTable;

impl Scheduler {
    /// Commit the rows of a step with its samples, in logits order; events go to `output`.
    pub(crate) fn commit(
        &mut self,
        open: &OpenStep,
        sampled: &[i32],
        table: Option<&TokenTable>,
        output: &mut StepOutput,
    ) {
        let mut samples = open.samples.iter().zip(sampled).enumerate();
        let mut stopped = false;
        for row in &open.rows {
            // Blocks are indexed before the row can end, so that the cache keeps what it wrote.
            self.commit_row(row.id, row.end);
            for (place, (&id, &token)) in samples.by_ref().take(row.num_sampled) {
                // The other answers of a prompt hold the row as well.
                let is_fork = id != row.id;
                if is_fork {
                    self.commit_row(id, row.end);
                }
                stopped |= self.commit_sample(id, place, token as u32, table, output);
                if is_fork {
                    self.close_row(id);
                }
            }
            self.close_row(row.id);
        }
        if stopped {
            self.drop_stopped();
        }
    }

    /// A row is computed: index the blocks that it completed.
    fn commit_row(&mut self, id: SequenceId, end: usize) {
        let sequence = &mut self.sequences[id];
        // A sequence preempted since has lost the blocks. It is admitted again only after its rows are committed.
        if !sequence.is_running() {
            return;
        }
        sequence.committed = end;
        if self.config.enable_prefix_caching
            && (sequence.indexed + 1) * self.config.block_size <= end
        {
            self.index_blocks(id, end);
        }
    }

    /// Index the full blocks of a sequence's first `end` tokens.
    pub(super) fn index_blocks(&mut self, id: SequenceId, end: usize) {
        let (block_size, anchor) = (self.config.block_size, self.kv.groups().anchor());
        let sequence = &mut self.sequences[id];
        if (sequence.indexed + 1) * block_size > end {
            return;
        }
        while (sequence.indexed + 1) * block_size <= end {
            let entry = sequence.indexed;
            let block = sequence.tables.group(anchor).blocks()[entry];
            let tokens = &sequence.tokens[entry * block_size..(entry + 1) * block_size];
            let (kept, node) = self.kv.index(block, sequence.node, tokens);
            for (group, table) in sequence.tables.iter_mut().enumerate() {
                let block = table.blocks()[entry];
                let kept =
                    if group == anchor { kept } else { self.kv.index_group(kept, group, block) };
                if kept != block {
                    table.replace(entry, kept);
                    self.row_groups.invalidate();
                }
            }
            sequence.node = node;
            sequence.indexed += 1;
        }
        if sequence.in_flight_prefix.is_some()
            || sequence.indexed * block_size < sequence.prefill_len
        {
            self.renew_in_flight_prefix(id);
        }
    }

    /// Append a token, apply the stop rules and add the event; true when the answer ended.
    fn commit_sample(
        &mut self,
        id: SequenceId,
        place: usize,
        token: u32,
        table: Option<&TokenTable>,
        output: &mut StepOutput,
    ) -> bool {
        let sequence = &mut self.sequences[id];
        sequence.in_flight -= 1;
        if sequence.state == State::Finished {
            return false;
        }
        let request = &self.requests[sequence.request];
        sequence.tokens.push(token);
        self.stats.generated_tokens += 1;
        let reason = finish_reason(sequence, request, token, table, &mut output.text);
        let (finish, stop) = match reason {
            None => (0, NO_STOP_REASON),
            Some(FinishReason::Stop(StopReason::Eos)) => (1, NO_STOP_REASON),
            Some(FinishReason::Stop(StopReason::Token(id))) => (1, id as i32),
            Some(FinishReason::Stop(StopReason::Text(i))) => (1, -1 - i as i32),
            Some(FinishReason::Length | FinishReason::Abort) => (2, NO_STOP_REASON),
        };
        output.request_ids.push(request.spec.request_id);
        output.sample_indices.push(sequence.sample_index as i32);
        output.logit_indices.push(place as i32);
        output.token_ids.push(token as i32);
        output.text_ends.push(output.text.len() as i32);
        output.finish_reasons.push(finish);
        output.stop_reasons.push(stop);
        output.cached_tokens.push(request.cached_tokens.unwrap_or(0) as i32);
        if let Some(reason) = reason {
            self.finish(id, reason);
        }
        reason.is_some()
    }

    /// Count a committed row; a finished sequence is removed with its last row.
    fn close_row(&mut self, id: SequenceId) {
        let sequence = &mut self.sequences[id];
        sequence.open_rows -= 1;
        if sequence.open_rows == 0 && sequence.state == State::Finished {
            self.sequences.remove(id);
        }
    }
}

/// Decode the last token of a sequence to text, and apply the stop rules.
fn finish_reason(
    sequence: &mut Sequence,
    request: &Request,
    token: u32,
    table: Option<&TokenTable>,
    text: &mut Vec<u8>,
) -> Option<FinishReason> {
    let may_stop = sequence.tokens.len() > sequence.min_len;
    let ends = may_stop && request.end_tokens.contains(&token);
    let mut reason = ends.then(|| {
        let own = request.spec.stop_token_ids.contains(&token);
        FinishReason::Stop(if own { StopReason::Token(token) } else { StopReason::Eos })
    });
    let stream = sequence.text.as_mut().zip(table);
    if let Some((stream, table)) = stream
        && (!ends || request.spec.include_stop)
        && (token as usize) < table.len()
    {
        let matched = stream.push(table, token, may_stop && !ends, text);
        reason = reason.or(matched.map(|i| FinishReason::Stop(StopReason::Text(i))));
    }
    if reason.is_none() && sequence.tokens.len() >= sequence.token_limit {
        reason = Some(FinishReason::Length);
    }
    if let Some(stream) = &mut sequence.text
        && reason.is_some()
    {
        stream.finish(text);
    }
    reason
}
