//! The trie of a vocabulary.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{
    ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};

use crate::error::{Error, cleaned};

/// The trie's nodes count their depth in 10 bits. A longer token is never allowed: shorter ones write the same text.
const MAX_TOKEN_BYTES: usize = 1000;
/// Ids and nodes have 24 and 22 bits in the trie.
const MAX_TOKENS: usize = 1 << 20;

/// Lexer states of one answer, some 300 bytes each.
const MAX_LEXER_STATES: usize = 100_000;

/// What all grammars of a vocabulary share.
pub(crate) struct Tokens {
    pub(crate) factory: ParserFactory,
    pub(crate) computer: Arc<SlicedBiasComputer>,
    env: TokEnv,
    eos: Box<[u32]>,
    /// Tokens that begin with a space, where an answer's very first space is not part of its text.
    dropped_space: Option<SimpleVob>,
}

impl Tokens {
    pub(crate) fn new(
        mut words: Vec<Vec<u8>>,
        special: impl Fn(u32) -> bool,
        eos: &[u32],
        drop_leading_space: bool,
    ) -> Result<Self, Error> {
        let vocabulary = |message: String| Err(Error::Vocabulary(message));
        let Some(&first) = eos.first() else {
            return vocabulary(
                "the model names no end token, so an answer that follows a grammar could not end"
                    .to_owned(),
            );
        };
        if words.is_empty() || words.len() > MAX_TOKENS {
            return vocabulary(format!(
                "the model has {} tokens; grammars are followed with 1 to {MAX_TOKENS}",
                words.len()
            ));
        }
        if let Some(outside) = eos.iter().find(|&&id| id as usize >= words.len()) {
            return vocabulary(format!(
                "the end token {outside} lies outside the vocabulary of {} tokens",
                words.len()
            ));
        }
        for (id, word) in words.iter_mut().enumerate() {
            let id = id as u32;
            let no_text = special(id) || eos.contains(&id);
            if no_text && word.starts_with(b"<") && word.ends_with(b">") {
                // What Lark grammars name special tokens by; no text contains the marker.
                word.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            } else if no_text || word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                word.clear();
            }
            if word.len() > MAX_TOKEN_BYTES {
                word.clear();
            }
        }
        let info = TokRxInfo::new(words.len() as u32, first);
        let built = catch_unwind(AssertUnwindSafe(|| {
            let trie = TokTrie::from(&info, &words).with_eos_tokens(eos);
            let dropped_space = drop_leading_space.then(|| {
                let mut spaced = trie.alloc_token_set();
                for (id, word) in words.iter().enumerate() {
                    if word.first() == Some(&b' ') {
                        spaced.allow_token(id as u32);
                    }
                }
                spaced
            });
            // Never canonical: what is forced is still left to the model's choice of tokens.
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory = ParserFactory::new(
                &env,
                InferenceCapabilities::default(),
                &SlicedBiasComputer::general_slices(),
            )?;
            factory.quiet();
            let limits = factory.limits_mut();
            limits.verbose_errors = false;
            limits.max_lexer_states = MAX_LEXER_STATES;
            let computer = factory.slicer();
            Ok(Self { factory, computer, env, eos: eos.into(), dropped_space })
        }));
        built.or_else(|error| vocabulary(cleaned(&error.to_string())))
    }

    pub(crate) fn trie(&self) -> &TokTrie {
        self.env.tok_trie()
    }

    pub(crate) fn eos(&self) -> &[u32] {
        &self.eos
    }

    pub(crate) fn dropped_space(&self) -> Option<&SimpleVob> {
        self.dropped_space.as_ref()
    }
}
