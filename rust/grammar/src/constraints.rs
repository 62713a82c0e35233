//! The constraints of all requests that run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::matcher::{Grammar, Matcher};
use crate::vocabulary::Vocabulary;

/// Answers of one request beyond this number share the lexers of the first ones.
const LEXERS: usize = 8;

/// What the masks of a request may take: this, and so much more for each. All requests of a step wait for the slowest.
/// Ordinary ones take a millisecond or less, but answers that share a lexer wait for each other.
const BURST: Duration = Duration::from_secs(1);
const EACH: Duration = Duration::from_millis(25);

/// Token sequences that must not be written.
#[derive(Clone, Debug, Default)]
pub struct BadWords {
    /// The last token of each, banned where the tokens before it were just drawn.
    sequences: Box<[(Box<[u32]>, u32)]>,
    /// The most tokens that come before a last one.
    window: usize,
}

impl BadWords {
    /// Those sequences; empty ones ban nothing.
    #[must_use]
    pub fn new(sequences: &[Vec<u32>]) -> Self {
        let sequences: Box<[(Box<[u32]>, u32)]> = sequences
            .iter()
            .filter_map(|sequence| sequence.split_last())
            .map(|(&last, first)| (first.into(), last))
            .collect();
        let window = sequences.iter().map(|(first, _)| first.len()).max().unwrap_or(0);
        Self { sequences, window }
    }
}

/// The constraints of a request's answers, any of the three together.
#[derive(Clone, Default)]
pub struct Rules {
    /// The text follows it.
    pub grammar: Option<Arc<Grammar>>,
    /// The only tokens that may be drawn; with a grammar, end tokens are allowed too.
    pub allowed: Option<Vec<u32>>,
    /// Sequences that must not be written, unless the grammar leaves nothing else.
    pub bad_words: BadWords,
}

/// What all answers of a request share.
struct Request {
    allowed: Option<Box<[u32]>>,
    bad_words: BadWords,
    answers: Vec<Mutex<Answer>>,
    /// An answer could not continue, which was reported: the caller ends them all.
    failed: AtomicBool,
    effort: Effort,
}

/// How much time a request's grammar has taken.
#[derive(Default)]
struct Effort {
    micros: AtomicU64,
    masks: AtomicU64,
}

impl Effort {
    /// Note a mask, or the token that was drawn from one.
    ///
    /// # Errors
    ///
    /// Too much time for so many masks.
    fn note(&self, began: Instant, masks: u64) -> Result<(), String> {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let taken = micros(began.elapsed());
        let taken = self.micros.fetch_add(taken, Ordering::Relaxed).saturating_add(taken);
        let masks = self.masks.fetch_add(masks, Ordering::Relaxed) + masks;
        if taken <= micros(BURST).saturating_add(micros(EACH).saturating_mul(masks)) {
            return Ok(());
        }
        Err(format!("it takes too long: {} ms for {masks} tokens", taken / 1000))
    }
}

struct Answer {
    matcher: Option<Matcher>,
    /// The tokens drawn last, as many as bad words look at.
    recent: Vec<u32>,
}

/// The constraints of all requests that run.
pub struct Constraints {
    vocabulary: Arc<Vocabulary>,
    requests: BTreeMap<i64, Request>,
}

impl Constraints {
    /// No request yet.
    #[must_use]
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self { vocabulary, requests: BTreeMap::new() }
    }

    /// int32 words of a row.
    #[must_use]
    pub fn row_words(&self) -> usize {
        self.vocabulary.len().div_ceil(32)
    }

    /// Requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// True when there is no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether the request is known.
    #[must_use]
    pub fn contains(&self, request: i64) -> bool {
        self.requests.contains_key(&request)
    }

    /// Hold the `n` answers of a request to rules.
    ///
    /// # Errors
    ///
    /// A token outside the vocabulary, an empty list of allowed tokens, or a request that is known.
    pub fn add(&mut self, request: i64, n: usize, rules: Rules) -> Result<(), Error> {
        let size = self.vocabulary.len();
        let known = |field: &str, id: u32| {
            if (id as usize) < size {
                return Ok(());
            }
            Err(Error::specification(format!(
                "{field}: the token {id} lies outside the vocabulary of {size} tokens"
            )))
        };
        if self.contains(request) {
            return Err(Error::specification(format!("request {request} is constrained already")));
        }
        let Rules { grammar, allowed, bad_words } = rules;
        let allowed = match allowed {
            None => None,
            Some(ids) if ids.is_empty() => {
                return Err(Error::specification("allowed_token_ids: the list is empty"));
            }
            Some(mut ids) => {
                ids.iter().try_for_each(|&id| known("allowed_token_ids", id))?;
                if grammar.is_some() {
                    ids.extend_from_slice(self.vocabulary.eos());
                }
                let mut words = vec![0; self.row_words()];
                allow(&mut words, &ids);
                Some(words.into())
            }
        };
        for (first, last) in &bad_words.sequences {
            first.iter().chain([last]).try_for_each(|&id| known("bad_words", id))?;
        }
        let first = grammar
            .map(|grammar| (0..n.min(LEXERS)).map(|_| grammar.matcher()).collect::<Vec<Matcher>>());
        let answers = (0..n).map(|index| {
            let matcher = first.as_ref().map(|matchers| matchers[index % LEXERS].clone());
            Mutex::new(Answer { matcher, recent: Vec::with_capacity(bad_words.window) })
        });
        let answers = answers.collect();
        self.requests.insert(
            request,
            Request {
                allowed,
                bad_words,
                answers,
                failed: AtomicBool::new(false),
                effort: Effort::default(),
            },
        );
        Ok(())
    }

    /// Forget a request; nothing happens when it is not known.
    pub fn remove(&mut self, request: i64) {
        self.requests.remove(&request);
    }

    /// Write the masks of answers, each (request, answer), into `rows` of `row_words` words each.
    ///
    /// `parallel(items, body)` runs `body(0)` to `body(items - 1)`, on as many threads as it likes.
    /// Returns the index and the reason of rows whose grammar cannot continue: they allow end tokens
    /// only, and are not reported again.
    ///
    /// # Panics
    ///
    /// Where the rows are too short, in words or in number.
    pub fn fill(
        &self,
        keys: &[(i64, usize)],
        rows: &mut [u32],
        row_words: usize,
        parallel: impl Fn(usize, &(dyn Fn(usize) + Sync)),
    ) -> Vec<(usize, String)> {
        assert!(row_words >= self.row_words(), "a row holds the whole vocabulary");
        let rows: Vec<_> = rows.chunks_exact_mut(row_words).map(Mutex::new).collect();
        assert!(rows.len() >= keys.len(), "a row for each answer");
        let failed = Mutex::new(Vec::new());
        parallel(keys.len(), &|index| {
            let (request, answer) = keys[index];
            let mut row = lock(&rows[index]);
            if let Err(message) = self.fill_row(request, answer, &mut row) {
                lock(&failed).push((index, message));
            }
        });
        let mut failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.sort_unstable();
        failed
    }

    fn fill_row(&self, request: i64, answer: usize, row: &mut [u32]) -> Result<(), String> {
        let Some((request, mut answer)) = self.answer(request, answer) else {
            row.fill(0);
            allow(row, self.vocabulary.eos());
            return Err("the answer is not known to the constraints; please report this".to_owned());
        };
        if request.failed.load(Ordering::Relaxed) {
            // The limit that one has met would take as long to meet again.
            row.fill(0);
            allow(row, self.vocabulary.eos());
            return Ok(());
        }
        let began = now();
        let filled = self.fill_known(request, &mut answer, row);
        let filled = filled.and_then(|()| request.effort.note(began, 1));
        if filled.is_err() {
            request.failed.store(true, Ordering::Relaxed);
        }
        filled
    }

    fn fill_known(
        &self,
        request: &Request,
        answer: &mut Answer,
        row: &mut [u32],
    ) -> Result<(), String> {
        let mut filled = Ok(());
        if let Some(matcher) = &mut answer.matcher {
            filled = matcher.mask(row);
        } else {
            all(row, self.vocabulary.len());
        }
        if let Some(allowed) = &request.allowed {
            row.iter_mut().zip(allowed).for_each(|(word, allowed)| *word &= allowed);
            if row.iter().all(|&word| word == 0) {
                allow(row, self.vocabulary.eos());
                let message = "allowed_token_ids holds no token with which the grammar can go on";
                return filled.and(Err(message.to_owned()));
            }
        }
        ban(row, &request.bad_words, &answer.recent);
        filled
    }

    /// Take tokens that were drawn, each (request, answer, token); those of unknown requests are passed over.
    ///
    /// Returns the index and the reason of tokens that end what can be followed of a grammar.
    pub fn advance(
        &self,
        drawn: impl IntoIterator<Item = (i64, usize, u32)>,
    ) -> Vec<(usize, String)> {
        let mut failed = Vec::new();
        for (index, (request, answer, token)) in drawn.into_iter().enumerate() {
            let Some((request, mut answer)) = self.answer(request, answer) else { continue };
            if request.failed.load(Ordering::Relaxed) {
                continue;
            }
            let window = request.bad_words.window;
            if window > 0 {
                if answer.recent.len() == window {
                    answer.recent.remove(0);
                }
                answer.recent.push(token);
            }
            let Some(matcher) = &mut answer.matcher else { continue };
            let began = now();
            let advanced = matcher.advance(token);
            if let Err(message) = advanced.and_then(|()| request.effort.note(began, 0)) {
                request.failed.store(true, Ordering::Relaxed);
                failed.push((index, message));
            }
        }
        failed
    }

    fn answer(&self, request: i64, answer: usize) -> Option<(&Request, MutexGuard<'_, Answer>)> {
        let request = self.requests.get(&request)?;
        Some((request, lock(request.answers.get(answer)?)))
    }
}

#[expect(clippy::disallowed_methods, reason = "nothing is decided by it but when to give up")]
fn now() -> Instant {
    Instant::now()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn allow(row: &mut [u32], ids: &[u32]) {
    for &id in ids {
        row[id as usize / 32] |= 1 << (id % 32);
    }
}

/// Allow the first `size` tokens.
fn all(row: &mut [u32], size: usize) {
    row.fill(0);
    row[..size / 32].fill(u32::MAX);
    if !size.is_multiple_of(32) {
        row[size / 32] = (1 << (size % 32)) - 1;
    }
}

/// Take away the last tokens of bad words whose first tokens are the latest, unless nothing would be left.
fn ban(row: &mut [u32], bad_words: &BadWords, recent: &[u32]) {
    let mut banned = Vec::new();
    for (first, last) in &bad_words.sequences {
        let (word, bit) = (*last as usize / 32, 1 << (last % 32));
        if recent.ends_with(first) && row[word] & bit != 0 {
            row[word] &= !bit;
            banned.push(*last);
        }
    }
    if !banned.is_empty() && row.iter().all(|&word| word == 0) {
        allow(row, &banned);
    }
}
