//! The outputs of one committed step.

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token, a stop token or a stop text.
    Stop(StopReason),
    /// As many tokens as asked for, or the context's end.
    Length,
    /// The caller aborted it.
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

/// The stop reason of an event that has none.
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
    /// 0 not finished, 1 stop, 2 length.
    pub finish_reasons: Vec<i32>,
    /// For finish reason 1: the stop token's id, or -1 - i for the i-th stop text; else `NO_STOP_REASON`.
    pub stop_reasons: Vec<i32>,
    /// Prompt tokens found in the prefix cache at first admission.
    pub cached_tokens: Vec<i32>,
    /// Requests admitted for the first time with this step, with or without an event.
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

    pub(crate) fn clear(&mut self) {
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
