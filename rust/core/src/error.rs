//! The one error type of the core.

/// Everything a call of the core can refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A setting that cannot work.
    #[error("{field}: {message}")]
    Config {
        /// The setting.
        field: &'static str,
        /// Its value and the remedy.
        message: String,
    },
    /// A request that cannot be served as it stands.
    #[error("{field}: {message}")]
    InvalidRequest {
        /// The request's field.
        field: &'static str,
        /// Its value and the remedy.
        message: String,
    },
    /// The prompt and one more token are longer than the context.
    #[error(
        "prompt: {prompt} tokens and at least one of output exceed the context of {max_model_len} tokens; shorten the \
         prompt or raise max_model_len"
    )]
    ContextLengthExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// The limit.
        max_model_len: usize,
    },
    /// The request needs more blocks than the pool has, even alone.
    #[error(
        "max_tokens: a sequence of {tokens} tokens needs {needed} blocks and the whole KV cache has {blocks}; lower \
         max_tokens, shorten the prompt or give the KV cache more memory"
    )]
    CapacityExceeded {
        /// Tokens of prompt and output together.
        tokens: usize,
        /// Blocks they need.
        needed: usize,
        /// Blocks there are.
        blocks: usize,
    },
    /// Two steps are open already.
    #[error("plan: two steps are open; commit the older one first")]
    TooManyOpenSteps,
    /// Steps are committed in the order they were planned.
    #[error("step: {step} is not the oldest open step")]
    NotOldestStep {
        /// What was asked for.
        step: u64,
    },
    /// A buffer handed to the core is too short.
    #[error("{name}: {len} elements are fewer than the {needed} needed")]
    ShortBuffer {
        /// Which buffer.
        name: &'static str,
        /// Its elements.
        len: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A sampled id is not a token.
    #[error("sampled: {token} at place {place} is outside the vocabulary of {vocab_size}")]
    InvalidSample {
        /// The id.
        token: i32,
        /// Its place in the result buffer.
        place: usize,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
}

/// A result with the core's error.
pub type Result<T> = std::result::Result<T, Error>;
