//! Commit: sampled tokens are appended, stop rules applied, written blocks indexed.

use crate::block::SequenceId;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::sequence::State;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token, a stop token or a stop text.
    Stop(StopReason),
    /// As many tokens as asked for, or the context's end.
    Length,
    /// The caller's wish.
    Abort,
}

/// What stopped an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// An end token of the model.
    Eos,
    /// A stop token of the request.
    Token(u32),
    /// The i-th stop text of the request.
    Text(u32),
}

/// The frame's stop reason where there is none to tell.
pub const NO_STOP_REASON: i32 = i32::MIN;

/// The outputs of one committed step, an event a sampled token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepOutput {
    /// The request of each event.
    pub request_ids: Vec<i64>,
    /// Which of the request's answers.
    pub sample_indices: Vec<i32>,
    /// The token's place in the step's logits arrays.
    pub logit_indices: Vec<i32>,
    /// The token.
    pub token_ids: Vec<i32>,
    /// Where the event's text ends in `text`; it begins where the one before ends.
    pub text_ends: Vec<i32>,
    /// UTF-8 of all events, in order.
    pub text: Vec<u8>,
    /// 0 runs on, 1 stop, 2 length.
    pub finish_reasons: Vec<i32>,
    /// Of finish reason 1: the stop token's id, -1 - i for the i-th stop text, else `NO_STOP_REASON`.
    pub stop_reasons: Vec<i32>,
    /// Prompt tokens found in the prefix cache at first admission.
    pub cached_tokens: Vec<i32>,
    /// Requests, whether they have an event or not, whose wait ended with this step.
    pub started: Vec<i64>,
}

impl StepOutput {
    pub(crate) fn with_capacity(events: usize) -> Self {
        let ints = || Vec::with_capacity(events);
        Self {
            request_ids: Vec::with_capacity(events),
            sample_indices: ints(),
            logit_indices: ints(),
            token_ids: ints(),
            text_ends: ints(),
            text: Vec::with_capacity(events * 16),
            finish_reasons: ints(),
            stop_reasons: ints(),
            cached_tokens: ints(),
            started: Vec::with_capacity(events),
        }
    }

    /// Events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.request_ids.len()
    }

    /// Whether there is no event.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.request_ids.is_empty()
    }

    fn clear(&mut self) {
        self.request_ids.clear();
        self.sample_indices.clear();
        self.logit_indices.clear();
        self.token_ids.clear();
        self.text_ends.clear();
        self.text.clear();
        self.finish_reasons.clear();
        self.stop_reasons.clear();
        self.cached_tokens.clear();
        self.started.clear();
    }
}

/// A row of a step that is not committed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenRow {
    pub(crate) id: SequenceId,
    /// Tokens of the sequence in the cache after the row.
    pub(crate) end: usize,
    pub(crate) num_sampled: usize,
}

/// A step that is not committed.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenStep {
    pub(crate) step: u64,
    pub(crate) rows: Vec<OpenRow>,
    /// The sequence of each sample, in logits order.
    pub(crate) samples: Vec<SequenceId>,
    /// Requests admitted for the first time.
    pub(crate) started: Vec<i64>,
}

impl OpenStep {
    pub(crate) fn with_capacity(rows: usize) -> Self {
        Self {
            step: 0,
            rows: Vec::with_capacity(rows),
            samples: Vec::with_capacity(rows),
            started: Vec::with_capacity(rows),
        }
    }

    pub(crate) fn clear(&mut self, step: u64) {
        self.step = step;
        self.rows.clear();
        self.samples.clear();
        self.started.clear();
    }
}

impl Core {
    /// Take the sampled ids of the oldest open step, in logits order; further elements are ignored.
    ///
    /// # Errors
    /// When `step` is not the oldest open step, ids are missing, or one of them is outside the vocabulary; nothing has
    /// changed then.
    pub fn commit(&mut self, step: u64, sampled: &[i32]) -> Result<&StepOutput> {
        let mut open = self.take_open(step, sampled)?;
        self.frame.clear();
        std::mem::swap(&mut self.frame.started, &mut open.started);
        let mut samples = open.samples.iter().zip(sampled).enumerate();
        let mut stopped = false;
        for row in &open.rows {
            // Blocks are indexed before the row can end, so that what it wrote outlives it.
            self.commit_row(row.id, row.end);
            for (place, (&id, &token)) in samples.by_ref().take(row.num_sampled) {
                // The other answers of a prompt hold the row as well.
                let is_fork = id != row.id;
                if is_fork {
                    self.commit_row(id, row.end);
                }
                stopped |= self.commit_sample(id, place, token as u32);
                if is_fork {
                    self.close_row(id);
                }
            }
            self.close_row(row.id);
        }
        self.spare.push(open);
        if stopped {
            self.drop_stopped();
        }
        Ok(&self.frame)
    }

    /// The record of the oldest open step, once its samples are known to be good.
    fn take_open(&mut self, step: u64, sampled: &[i32]) -> Result<OpenStep> {
        let Some(open) = self.open.front().filter(|open| open.step == step) else {
            return Err(Error::NotOldestStep { step });
        };
        let (needed, vocab_size) = (open.samples.len(), self.config.vocab_size);
        let is_token = |token: i32| usize::try_from(token).is_ok_and(|token| token < vocab_size);
        let Some(sampled) = sampled.get(..needed) else {
            return Err(Error::ShortBuffer { name: "sampled", len: sampled.len(), needed });
        };
        if let Some(place) = sampled.iter().position(|&token| !is_token(token)) {
            return Err(Error::InvalidSample { token: sampled[place], place, vocab_size });
        }
        self.open.pop_front().ok_or(Error::NotOldestStep { step })
    }

    /// The outputs of the step committed last.
    #[must_use]
    pub fn frame(&self) -> &StepOutput {
        &self.frame
    }

    /// What a row wrote is there: index the blocks it completed.
    fn commit_row(&mut self, id: SequenceId, end: usize) {
        let sequence = &mut self.sequences[id];
        // Preempted since: the blocks written are gone. It is not admitted again before its rows are committed.
        if !sequence.is_running() {
            return;
        }
        sequence.committed = end;
        if self.config.enable_prefix_caching
            && (sequence.indexed + 1) * self.config.block_size <= end
        {
            self.index_blocks(id);
        }
    }

    fn index_blocks(&mut self, id: SequenceId) {
        let block_size = self.config.block_size;
        let sequence = &mut self.sequences[id];
        while (sequence.indexed + 1) * block_size <= sequence.committed {
            let entry = sequence.indexed;
            let block = sequence.table.blocks()[entry];
            let tokens = &sequence.tokens[entry * block_size..(entry + 1) * block_size];
            let (kept, node) = self.kv.index(block, sequence.node, tokens);
            if kept != block {
                sequence.table.replace(entry, kept);
                self.groups.invalidate();
            }
            sequence.node = node;
            sequence.indexed += 1;
        }
        if sequence.promise.is_some() || sequence.indexed * block_size < sequence.prefill_len {
            self.renew_promise(id);
        }
    }

    /// Append a token and apply the stop rules; true when the answer ended.
    fn commit_sample(&mut self, id: SequenceId, place: usize, token: u32) -> bool {
        let sequence = &mut self.sequences[id];
        sequence.in_flight -= 1;
        if sequence.state == State::Finished {
            return false;
        }
        let request = self.requests[sequence.request as usize]
            .as_ref()
            .expect("an unfinished answer has its request");
        sequence.tokens.push(token);
        self.stats.generated_tokens += 1;
        let may_stop = sequence.tokens.len() > sequence.min_len;
        let ends = may_stop && request.end_tokens.contains(&token);
        let mut reason = ends.then(|| {
            let own = request.spec.stop_token_ids.contains(&token);
            FinishReason::Stop(if own { StopReason::Token(token) } else { StopReason::Eos })
        });
        if let (Some(stream), Some(table)) = (&mut sequence.text, self.token_table.as_deref()) {
            if !ends || request.spec.include_stop {
                let matched = if (token as usize) < table.len() {
                    stream.push(table, token, may_stop && !ends, &mut self.frame.text)
                } else {
                    None
                };
                reason = reason.or(matched.map(|i| FinishReason::Stop(StopReason::Text(i))));
            }
            if reason.is_none() && sequence.tokens.len() >= sequence.token_limit {
                reason = Some(FinishReason::Length);
            }
            if reason.is_some() {
                stream.finish(&mut self.frame.text);
            }
        } else if reason.is_none() && sequence.tokens.len() >= sequence.token_limit {
            reason = Some(FinishReason::Length);
        }
        let (finish, stop) = match reason {
            None => (0, NO_STOP_REASON),
            Some(FinishReason::Stop(StopReason::Eos)) => (1, NO_STOP_REASON),
            Some(FinishReason::Stop(StopReason::Token(id))) => (1, id as i32),
            Some(FinishReason::Stop(StopReason::Text(i))) => (1, -1 - i as i32),
            Some(FinishReason::Length | FinishReason::Abort) => (2, NO_STOP_REASON),
        };
        let frame = &mut self.frame;
        frame.request_ids.push(request.spec.request_id);
        frame.sample_indices.push(sequence.sample_index as i32);
        frame.logit_indices.push(place as i32);
        frame.token_ids.push(token as i32);
        frame.text_ends.push(frame.text.len() as i32);
        frame.finish_reasons.push(finish);
        frame.stop_reasons.push(stop);
        frame.cached_tokens.push(request.cached_tokens.unwrap_or(0) as i32);
        if let Some(reason) = reason {
            self.finish(id, reason);
        }
        reason.is_some()
    }

    /// A row of a sequence is committed; an ended one leaves with its last row.
    fn close_row(&mut self, id: SequenceId) {
        let sequence = &mut self.sequences[id];
        sequence.open_rows -= 1;
        if sequence.open_rows == 0 && sequence.state == State::Finished {
            self.sequences.remove(id);
        }
    }
}
