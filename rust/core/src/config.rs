//! The settings of one core.

use crate::error::{Error, Result};

/// The order in which waiting requests are admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// By arrival.
    #[default]
    Fcfs,
    /// By `arrival_us + priority * aging_interval_us`, fixed at arrival: lower priorities first. A request gains one
    /// priority on newcomers with every interval it waits, so that none starves. An urgent request takes the place of
    /// a less urgent running sequence when slots or blocks are full.
    Priority,
}

/// The settings of one core.
#[derive(Clone, Debug)]
pub struct Config {
    /// Tokens a block.
    pub block_size: usize,
    /// Blocks of the KV cache, the null block included.
    pub num_blocks: usize,
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Tokens of one step, at most.
    pub max_num_batched_tokens: usize,
    /// The window of each cache group, in tokens; 0 for full attention.
    pub windows: Vec<usize>,
    /// Tokens of prompt and output together.
    pub max_model_len: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Order of admission.
    pub policy: Policy,
    /// The wait that makes up for one priority, in microseconds.
    pub aging_interval_us: u64,
    /// Reuse the blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Seed of the prefix cache's hash; it moves entries within the table and never changes a decision.
    pub hash_seed: u64,
    /// Decode rows that share at least so many first blocks are grouped; 0 never groups.
    pub group_min_blocks: usize,
    /// Table entries that one step may change, where the least that keeps every row moving is not more. Many rows that
    /// find a long prefix cached can then start in one step.
    pub max_table_updates: usize,
    /// Single logits that one step may change, where what one row may ask for is not more.
    pub max_biases: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_blocks: 1025,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            windows: vec![0],
            max_model_len: 4096,
            vocab_size: 32_000,
            eos_token_ids: Vec::new(),
            policy: Policy::Fcfs,
            aging_interval_us: 10_000_000,
            enable_prefix_caching: true,
            hash_seed: 0,
            group_min_blocks: 0,
            max_table_updates: 1 << 17,
            max_biases: 1 << 17,
        }
    }
}

/// Cache groups of one model, at most.
pub const MAX_CACHE_GROUPS: usize = 64;
/// Stop token ids one request may name.
pub const MAX_STOP_TOKEN_IDS: usize = 128;
/// Tokens whose logits one request may change.
pub const MAX_LOGIT_BIAS: usize = 1024;

impl Config {
    /// Refuse what cannot work.
    ///
    /// # Errors
    /// `Error::Config` names the setting, its value and the remedy.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, message| Err(Error::Config { field, message });
        for (field, value, low) in [
            ("block_size", self.block_size, 1),
            ("num_blocks", self.num_blocks, 2),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1),
            ("max_model_len", self.max_model_len, 2),
            ("vocab_size", self.vocab_size, 1),
        ] {
            if value < low {
                return refuse(field, format!("{value} is too small; use {low} or more"));
            }
            if value > i32::MAX as usize / 4 {
                return refuse(
                    field,
                    format!("{value} is too large; plan arrays hold 32-bit integers"),
                );
            }
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return refuse(
                "max_num_batched_tokens",
                format!(
                    "{} is less than max_num_seqs ({}); raise max_num_batched_tokens or lower max_num_seqs",
                    self.max_num_batched_tokens, self.max_num_seqs
                ),
            );
        }
        if self.windows.is_empty() || self.windows.len() > MAX_CACHE_GROUPS {
            return refuse(
                "windows",
                format!(
                    "{} cache groups are not between 1 and {MAX_CACHE_GROUPS}",
                    self.windows.len()
                ),
            );
        }
        if let Some(window) = self.windows.iter().find(|&&window| window > i32::MAX as usize / 4) {
            return refuse("windows", format!("{window} is too large; use 0 for full attention"));
        }
        if self.num_blocks.checked_mul(self.block_size).is_none_or(|n| n > i32::MAX as usize) {
            return refuse(
                "num_blocks",
                format!(
                    "{} blocks of {} tokens pass 2^31 cache slots; use fewer",
                    self.num_blocks, self.block_size
                ),
            );
        }
        if let Some(id) = self.eos_token_ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            return refuse(
                "eos_token_ids",
                format!("{id} is outside the vocabulary of {}", self.vocab_size),
            );
        }
        if self.eos_token_ids.len() > MAX_STOP_TOKEN_IDS {
            return refuse(
                "eos_token_ids",
                format!(
                    "{} are too many; use {MAX_STOP_TOKEN_IDS} or fewer",
                    self.eos_token_ids.len()
                ),
            );
        }
        Ok(())
    }

    /// Blocks that sequences can hold.
    #[must_use]
    pub fn usable_blocks(&self) -> usize {
        self.num_blocks - 1
    }

    /// Entries of the longest block table of one cache group.
    #[must_use]
    pub fn max_blocks_per_seq(&self) -> usize {
        self.max_model_len.div_ceil(self.block_size)
    }

    /// Blocks that admission leaves free while sequences run, so that they do not have to preempt each other soon.
    #[must_use]
    pub fn watermark(&self) -> usize {
        (self.usable_blocks() / 100).max(1)
    }

    /// Entries of the table updates of one step. A sequence waits for the next step when its updates no longer fit, so
    /// one longest table and two updates of every row are enough for all sequences to proceed.
    #[must_use]
    pub fn table_update_capacity(&self) -> usize {
        let least = self.max_blocks_per_seq()
            + 2 * self.max_num_seqs
            + self.max_num_batched_tokens.div_ceil(self.block_size);
        let all = self.max_num_seqs.saturating_mul(self.max_blocks_per_seq());
        least.max(all.min(self.max_table_updates)) * self.windows.len()
    }

    /// Entries of the biases of one step; rows whose biases no longer fit wait for the next step. What one row may ask for
    /// always fits, beside the model's end tokens for every other.
    #[must_use]
    pub fn bias_capacity(&self) -> usize {
        let row = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + self.eos_token_ids.len();
        let least = row + self.max_num_seqs * self.eos_token_ids.len();
        let all = self.max_num_seqs.saturating_mul(row);
        least.max(all.min(self.max_biases))
    }
}
