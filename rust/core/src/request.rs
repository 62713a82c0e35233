//! A request as the caller submits it, and the checks it must pass.

use crate::config::{Config, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, Policy};
use crate::error::{Error, Result};
use crate::kv_cache::cache_groups::CacheGroups;

/// How the tokens of a request are drawn. The core passes it to the device and does not read it.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probability reaches this.
    pub top_p: f32,
    /// Keep the k likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep tokens at least this share as likely as the likeliest.
    pub min_p: f32,
    /// Above 1 makes tokens seen before less likely.
    pub repetition_penalty: f32,
    /// Taken off the logit of each token already in the output.
    pub presence_penalty: f32,
    /// Taken off the logit for each time the token is in the output.
    pub frequency_penalty: f32,
    /// Seed of the sampling noise.
    pub seed: u64,
    /// Likeliest tokens to report log probabilities of; `None` reports none, not even the chosen token's.
    pub logprobs: Option<u32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            logprobs: None,
        }
    }
}

/// One request.
#[derive(Clone, Debug, Default, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "a request's independent switches")]
pub struct RequestSpec {
    /// The caller's number for it, unique among those that run.
    pub request_id: i64,
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// When it arrived, on the caller's clock.
    pub arrival_us: u64,
    /// Answers to the one prompt.
    pub n: usize,
    /// Output tokens of an answer, at most.
    pub max_tokens: usize,
    /// No stop before this many output tokens.
    pub min_tokens: usize,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Tokens that end an answer, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Texts that end an answer.
    pub stop: Vec<Vec<u8>>,
    /// Go on after the model's end tokens.
    pub ignore_eos: bool,
    /// Leave the stop text, or the stop token's text, in the answer.
    pub include_stop: bool,
    /// Leave special tokens out of the text.
    pub skip_special: bool,
    /// The answer begins a text: the first space is dropped where the tokenizer drops it. Otherwise the answer
    /// continues the prompt's text.
    pub begins_text: bool,
    /// Lower is sooner, under the priority policy.
    pub priority: i32,
    /// Requests share cached prefixes only with those of the same salt.
    pub cache_salt: Vec<u8>,
    /// Adapter of the model; 0 for none.
    pub adapter: u32,
    /// Added to the logits of single tokens, each named once; minus infinity bans a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Every sample is constrained to a set of tokens, which the caller makes when the sample is planned.
    pub constrained: bool,
}

impl RequestSpec {
    /// Refuse what cannot be served, or could never fit.
    ///
    /// # Errors
    /// Names the field, its value and the remedy.
    pub(crate) fn validate(
        &self,
        config: &Config,
        groups: &CacheGroups,
        has_text: bool,
    ) -> Result<()> {
        let refuse = |field, message| Err(Error::InvalidRequest { field, message });
        if self.prompt.is_empty() {
            return refuse("prompt", "is empty; give at least one token".into());
        }
        if let Some(id) = self.prompt.iter().find(|&&id| id as usize >= config.vocab_size) {
            return refuse(
                "prompt",
                format!("token {id} is outside the vocabulary of {}", config.vocab_size),
            );
        }
        if self.n == 0 || self.n > config.max_num_seqs {
            return refuse(
                "n",
                format!("{} is not between 1 and max_num_seqs ({})", self.n, config.max_num_seqs),
            );
        }
        if self.max_tokens == 0 {
            return refuse("max_tokens", "0 leaves no room for output; use 1 or more".into());
        }
        self.validate_sampling(config)?;
        if let Some(id) = self.stop_token_ids.iter().find(|&&id| id as usize >= config.vocab_size) {
            return refuse(
                "stop_token_ids",
                format!("{id} is outside the vocabulary of {}", config.vocab_size),
            );
        }
        if self.stop_token_ids.len() > MAX_STOP_TOKEN_IDS {
            return refuse(
                "stop_token_ids",
                format!(
                    "{} ids are too many; give {MAX_STOP_TOKEN_IDS} at most",
                    self.stop_token_ids.len()
                ),
            );
        }
        if self.stop.iter().any(Vec::is_empty) {
            return refuse("stop", "an empty text would end every answer; leave it out".into());
        }
        if !self.stop.is_empty() && !has_text {
            return refuse(
                "stop",
                "this engine has no token table and so no text; use stop_token_ids".into(),
            );
        }
        self.validate_biases(config)?;
        if self.prompt.len() >= config.max_model_len {
            return Err(Error::ContextLengthExceeded {
                prompt: self.prompt.len(),
                max_model_len: config.max_model_len,
            });
        }
        // The last token drawn is never written.
        let tokens = self.token_limit(config) - 1;
        let needed = groups.max_blocks_per_sequence(tokens);
        if needed > config.usable_blocks() {
            return Err(Error::CapacityExceeded { tokens, needed, blocks: config.usable_blocks() });
        }
        Ok(())
    }

    /// Tokens of prompt and output together, at most.
    pub(crate) fn token_limit(&self, config: &Config) -> usize {
        self.prompt.len().saturating_add(self.max_tokens).min(config.max_model_len)
    }

    /// Tokens that end an answer of this request.
    pub(crate) fn end_tokens<'a>(&'a self, config: &'a Config) -> impl Iterator<Item = u32> + 'a {
        let eos: &[u32] = if self.ignore_eos { &[] } else { &config.eos_token_ids };
        eos.iter().chain(&self.stop_token_ids).copied()
    }

    /// What is added to the logits of samples below the minimum: end tokens are banned, whatever else was asked of them.
    pub(crate) fn early_biases(&self, config: &Config) -> Vec<(u32, f32)> {
        let mut ends: Vec<u32> = self.end_tokens(config).collect();
        ends.sort_unstable();
        ends.dedup();
        let others = self.logit_bias.iter().filter(|(token, _)| ends.binary_search(token).is_err());
        ends.iter().map(|&token| (token, f32::NEG_INFINITY)).chain(others.copied()).collect()
    }

    /// The place in the queue, fixed at arrival: smaller is sooner.
    pub(crate) fn queue_key(&self, config: &Config) -> i64 {
        match config.policy {
            Policy::Fcfs => 0,
            Policy::Priority => {
                let arrival = i64::try_from(self.arrival_us).unwrap_or(i64::MAX);
                let aging = i64::try_from(config.aging_interval_us).unwrap_or(i64::MAX);
                arrival.saturating_add(aging.saturating_mul(i64::from(self.priority)))
            }
        }
    }

    fn validate_biases(&self, config: &Config) -> Result<()> {
        let refuse = |field, message| Err(Error::InvalidRequest { field, message });
        let count = self.logit_bias.len();
        if count > MAX_LOGIT_BIAS {
            return refuse(
                "logit_bias",
                format!("{count} tokens are too many; give {MAX_LOGIT_BIAS} at most"),
            );
        }
        let mut tokens: Vec<u32> = self.logit_bias.iter().map(|&(token, _)| token).collect();
        tokens.sort_unstable();
        if let Some(id) = tokens.last().filter(|&&id| id as usize >= config.vocab_size) {
            return refuse(
                "logit_bias",
                format!("token {id} is outside the vocabulary of {}", config.vocab_size),
            );
        }
        if let Some([id, ..]) = tokens.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse("logit_bias", format!("token {id} is named twice"));
        }
        let bad = |value: f32| value.is_nan() || value == f32::INFINITY;
        if let Some((id, value)) = self.logit_bias.iter().find(|&&(_, value)| bad(value)) {
            return refuse("logit_bias", format!("{value} of token {id} is not a finite number"));
        }
        let each = if self.min_tokens > 0 { self.early_biases(config).len() } else { count };
        if self.n.saturating_mul(each) > config.bias_capacity() {
            let field = if count > 0 { "logit_bias" } else { "min_tokens" };
            return refuse(
                field,
                format!(
                    "{} answers that each change {each} logits are more than one step can hold; lower n",
                    self.n
                ),
            );
        }
        Ok(())
    }

    fn validate_sampling(&self, config: &Config) -> Result<()> {
        let s = &self.sampling;
        let within = |field, value: f32, range: std::ops::RangeInclusive<f32>, words: &str| {
            if range.contains(&value) {
                return Ok(());
            }
            Err(Error::InvalidRequest { field, message: format!("{value} is not {words}") })
        };
        let (above_zero, finite) = (f32::MIN_POSITIVE, f32::MIN..=f32::MAX);
        within("temperature", s.temperature, 0.0..=f32::MAX, "0 or more")?;
        within("top_p", s.top_p, above_zero..=1.0, "above 0 and at most 1")?;
        within("min_p", s.min_p, 0.0..=1.0, "between 0 and 1")?;
        within("repetition_penalty", s.repetition_penalty, above_zero..=f32::MAX, "above 0")?;
        within("presence_penalty", s.presence_penalty, finite.clone(), "a finite number")?;
        within("frequency_penalty", s.frequency_penalty, finite, "a finite number")?;
        if s.top_k > i32::MAX as u32 {
            return Err(Error::InvalidRequest {
                field: "top_k",
                message: format!("{} is too large", s.top_k),
            });
        }
        if let Some(count) = s.logprobs.filter(|&count| count as usize > config.vocab_size) {
            return Err(Error::InvalidRequest {
                field: "logprobs",
                message: format!(
                    "{count} are more than the vocabulary's {} tokens",
                    config.vocab_size
                ),
            });
        }
        Ok(())
    }
}
