//! The tokens of one model, and the grammars compiled for them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::cache::Cache;
use crate::error::Error;
use crate::matcher::Grammar;
use crate::source::{Kind, source};
use crate::tokens::Tokens;

/// Stack of the thread that compiles, which follows a specification's nesting and references. Only what is touched
/// takes memory.
const STACK_BYTES: usize = 256 << 20;

/// How long a specification may take to compile. Ordinary ones take milliseconds.
const TIME: Duration = Duration::from_secs(10);

/// Specifications that may be compiled at a time. A thread cannot be ended: one that takes too long is no longer waited
/// for, but counts until it is through.
const MAX_COMPILING: usize = 8;

/// The tokens of one model.
pub struct Vocabulary {
    tokens: Arc<Tokens>,
    cache: Mutex<Cache>,
    compiling: Arc<AtomicUsize>,
}

/// Counts as one of those that compile while it lives.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Vocabulary {
    /// A vocabulary of `words`, the bytes each id stands for.
    ///
    /// A token is never allowed by its bytes if it is special, one of the end tokens `eos`, empty, or longer than 1,000
    /// bytes. `drop_leading_space`: an answer's very first space is not part of its text.
    ///
    /// # Errors
    ///
    /// No end token, one that is no token, or more than 2^20 tokens.
    pub fn new(
        words: Vec<Vec<u8>>,
        special: impl Fn(u32) -> bool,
        eos: &[u32],
        drop_leading_space: bool,
    ) -> Result<Self, Error> {
        let tokens = Arc::new(Tokens::new(words, special, eos, drop_leading_space)?);
        Ok(Self { tokens, cache: Mutex::default(), compiling: Arc::default() })
    }

    /// How many tokens there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.trie().vocab_size()
    }

    /// Never: a vocabulary has an end token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The end tokens.
    #[must_use]
    pub fn eos(&self) -> &[u32] {
        self.tokens.eos()
    }

    /// Grammars that were compiled and are kept.
    #[must_use]
    pub fn cached(&self) -> usize {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Compile a specification, or find it among those used last.
    ///
    /// # Errors
    ///
    /// What is wrong with it, and where; or that too much is being compiled.
    pub fn compile(&self, kind: Kind, spec: &str) -> Result<Arc<Grammar>, Error> {
        let cache = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(grammar) = cache().get(kind, spec) {
            return Ok(grammar);
        }
        let grammar = Arc::new(self.compile_in_time(kind, spec)?);
        cache().insert(kind, spec, grammar.clone());
        Ok(grammar)
    }

    fn compile_in_time(&self, kind: Kind, spec: &str) -> Result<Grammar, Error> {
        let compiling = self.compiling.fetch_add(1, Ordering::Relaxed);
        let place = Place(self.compiling.clone());
        if compiling >= MAX_COMPILING {
            return Err(Error::Busy(format!(
                "{MAX_COMPILING} other specifications are being compiled; ask again in a moment"
            )));
        }
        let (sender, receiver) = channel();
        let (tokens, spec) = (self.tokens.clone(), spec.to_owned());
        thread::Builder::new()
            .name("octavo-grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let grammar = source(kind, &spec).and_then(|it| Grammar::compile(&tokens, it));
                drop(place);
                // Nobody listens when it took too long.
                let _ = sender.send(grammar);
            })
            .map_err(|error| Error::Busy(format!("there is no thread to compile in: {error}")))?;
        receiver.recv_timeout(TIME).unwrap_or_else(|error| {
            Err(Error::specification(match error {
                RecvTimeoutError::Timeout => {
                    format!("it takes more than {} seconds to compile; simplify it", TIME.as_secs())
                }
                RecvTimeoutError::Disconnected => {
                    "it cannot be compiled; please report this".to_owned()
                }
            }))
        })
    }
}
