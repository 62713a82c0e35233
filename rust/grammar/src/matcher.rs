//! One answer's place in a grammar.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::earley::Parser;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::SimpleVob;

use crate::error::{Error, cleaned};
use crate::tokens::Tokens;

const NO_TOKEN: &str = "the model has no token that could come next";

/// Tokens between one new lexer and the next.
const RENEWAL_TOKENS: usize = 256;

/// A compiled grammar, from which matchers are made.
pub struct Grammar {
    /// At the beginning, the first mask known.
    start: Arc<Mutex<Parser>>,
    tokens: Arc<Tokens>,
}

impl Grammar {
    pub(crate) fn compile(tokens: &Arc<Tokens>, source: TopLevelGrammar) -> Result<Self, Error> {
        let made = tokens.factory.create_parser(source);
        let parser = made.map_err(|error| Error::specification(cleaned(&format!("{error:#}"))))?;
        let start = Arc::new(Mutex::new(parser.parser));
        let mut matcher = Matcher::new(&start, tokens);
        let mut row = vec![0; tokens.trie().vocab_size().div_ceil(32)];
        matcher.mask(&mut row).map_err(|message| {
            Error::specification(if message.ends_with(NO_TOKEN) {
                format!("no text satisfies it, or {NO_TOKEN}")
            } else {
                message
            })
        })?;
        *lock(&start) = matcher.parser;
        Ok(Self { start, tokens: tokens.clone() })
    }

    /// A matcher at the beginning of an answer. It shares nothing that changes with other matchers.
    #[must_use]
    pub fn matcher(&self) -> Matcher {
        Matcher::new(&self.start, &self.tokens)
    }
}

fn lock(parser: &Mutex<Parser>) -> MutexGuard<'_, Parser> {
    parser.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No token has come yet.
    Start,
    Running,
    /// Nothing can follow but an end token.
    Ended,
    Failed,
}

/// The place of one answer in a grammar.
///
/// A clone goes its own way, but shares the lexer's table of states: clones are for answers of one request, and wait for
/// each other when they are asked at once.
#[derive(Clone)]
pub struct Matcher {
    start: Arc<Mutex<Parser>>,
    parser: Parser,
    tokens: Arc<Tokens>,
    state: State,
    drawn: Vec<u32>,
    /// How many were drawn when the lexer was last rebuilt.
    renewed: usize,
}

impl Matcher {
    fn new(start: &Arc<Mutex<Parser>>, tokens: &Arc<Tokens>) -> Self {
        Self {
            parser: lock(start).deep_clone(),
            start: start.clone(),
            tokens: tokens.clone(),
            state: State::Start,
            drawn: Vec::new(),
            renewed: 0,
        }
    }

    /// Write the tokens that may come next; words past the vocabulary's become 0.
    ///
    /// End tokens are allowed where the text so far is accepted, and nothing else once it can only end.
    ///
    /// # Errors
    ///
    /// What limit the grammar met. The row then allows end tokens only, and so do all later ones.
    ///
    /// # Panics
    ///
    /// Where the row is too short for the vocabulary.
    pub fn mask(&mut self, row: &mut [u32]) -> Result<(), String> {
        row.fill(0);
        let mut failure = None;
        if matches!(self.state, State::Start | State::Running) {
            match self.renewing(Self::allowed) {
                Ok(set) => {
                    let words = self.tokens.trie().vocab_size().div_ceil(32);
                    row[..words].copy_from_slice(&set.as_slice()[..words]);
                    return Ok(());
                }
                Err(message) => failure = Some(self.fail(&message)),
            }
        }
        for &id in self.tokens.eos() {
            row[id as usize / 32] |= 1 << (id % 32);
        }
        failure.map_or(Ok(()), Err)
    }

    /// Take the token that was drawn.
    ///
    /// # Errors
    ///
    /// A token that the mask did not allow, or the limit that was met; the answer then can only end.
    pub fn advance(&mut self, token: u32) -> Result<(), String> {
        if matches!(self.state, State::Ended | State::Failed) {
            return Ok(());
        }
        match self.renewing(|matcher| matcher.apply(token)) {
            Ok(state) => {
                self.state = state;
                self.drawn.push(token);
                Ok(())
            }
            Err(message) => Err(self.fail(&message)),
        }
    }

    /// True when nothing but an end token may follow.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.state == State::Ended
    }

    fn fail(&mut self, message: &str) -> String {
        self.state = State::Failed;
        format!("the grammar cannot continue: {}", cleaned(message))
    }

    fn apply(&mut self, token: u32) -> Result<State, String> {
        let end = self.tokens.eos().contains(&token);
        if end && self.parser.is_accepting() {
            return Ok(State::Ended);
        }
        let tokens = self.tokens.clone();
        // An end token has bytes here if it is special: a Lark grammar may name it.
        let mut bytes = tokens.trie().token(token);
        if bytes.is_empty() {
            return Err(if end {
                "an end token came before the text was complete".to_owned()
            } else {
                format!("token {token} stands for no text")
            });
        }
        if self.state == State::Start && tokens.dropped_space().is_some() {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        if !bytes.is_empty() {
            // What it says of backtracking concerns stop texts in Lark grammars: they stay in the answer.
            self.parser.apply_token(bytes, token).map_err(|error| error.to_string())?;
        }
        if let Some(error) = self.parser.get_error() {
            return Err(error.message());
        }
        let ended = self.parser.is_accepting() && !self.parser.can_advance();
        Ok(if ended { State::Ended } else { State::Running })
    }

    /// Do something; once more with a new lexer if the old one has met its limit of states.
    ///
    /// Masks look at many continuations, most of which never come, and the lexer remembers the states of all: four or
    /// five for each character of a string with a `maxLength`. A new lexer has only those that the answer led through.
    fn renewing<T>(&mut self, work: impl Fn(&mut Self) -> Result<T, String>) -> Result<T, String> {
        let result = caught(self, &work);
        let full = result.as_ref().is_err_and(|message| message.contains("too many states"));
        if !full || self.drawn.len() < self.renewed + RENEWAL_TOKENS {
            return result;
        }
        let mut anew = Self::new(&self.start, &self.tokens);
        anew.renewed = self.drawn.len();
        for tokens in self.drawn.chunks(RENEWAL_TOKENS) {
            for &token in tokens {
                anew.state = caught(&mut anew, |matcher| matcher.apply(token))?;
            }
            // What a lexer may do is counted from mask to mask.
            caught(&mut anew, Self::allowed)?;
        }
        anew.drawn = std::mem::take(&mut self.drawn);
        *self = anew;
        caught(self, work)
    }

    fn allowed(&mut self) -> Result<SimpleVob, String> {
        let mut set = self.parser.compute_bias(&*self.tokens.computer, b"");
        if self.state == State::Start
            && let Some(spaced) = self.tokens.dropped_space()
        {
            let mut after_space = self.parser.compute_bias(&*self.tokens.computer, b" ");
            after_space.and(spaced);
            set.sub(spaced);
            set.or(&after_space);
        }
        if let Some(error) = self.parser.get_error() {
            return Err(error.message());
        }
        if self.parser.is_accepting() {
            for &id in self.tokens.eos() {
                set.allow_token(id);
            }
        }
        if set.is_zero() {
            return Err(NO_TOKEN.to_owned());
        }
        Ok(set)
    }
}

/// Do something that may panic.
fn caught<T>(
    matcher: &mut Matcher,
    work: impl Fn(&mut Matcher) -> Result<T, String>,
) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(|| Ok(work(matcher))))
        .map_err(|error| error.to_string())
        .flatten()
}
