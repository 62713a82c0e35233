//! Grammars: `Vocabulary`, `Grammar` and `Constraints`.
#![allow(unsafe_code, reason = "masks are written to memory that Python owns")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use octavo_cpu::pool::parallel_for;
use octavo_grammar::{BadWords, Error, Kind, Rules};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::errors::{octavo_error, request_error};
use crate::pointers::slice_mut;
use crate::step::StepOutput;
use crate::text::TokenTable;

/// A request's field that specifications come from, where the caller knows no better one.
const FIELD: &str = "structured_outputs";

fn python_error(error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Specification(_) => request_error("InvalidRequest", FIELD, &message),
        Error::Busy(_) => octavo_error("Overloaded", &message),
        Error::Vocabulary(_) => octavo_error("UnsupportedModel", &format!("tokenizer: {message}")),
    }
}

/// Run something that may panic, without the GIL.
fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| catch_unwind(AssertUnwindSafe(work)))
        .map_err(|_| PyRuntimeError::new_err("grammars: an internal error; please report this"))
}

/// The tokens of one model, and the grammars compiled for them.
#[pyclass(frozen, module = "octavo._core")]
struct Vocabulary {
    inner: Arc<octavo_grammar::Vocabulary>,
}

#[pymethods]
impl Vocabulary {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python hands over")]
    fn new(
        py: Python<'_>,
        token_table: PyRef<'_, TokenTable>,
        eos_token_ids: Vec<u32>,
        vocab_size: usize,
    ) -> PyResult<Self> {
        let table = token_table.inner.clone();
        let made = detached(py, move || {
            let words = (0..vocab_size).map(|id| table.bytes(id as u32).to_vec()).collect();
            let special = |id| table.is_special(id);
            let drops = table.drops_leading_space();
            octavo_grammar::Vocabulary::new(words, special, &eos_token_ids, drops)
        })?;
        Ok(Self { inner: Arc::new(made.map_err(|error| python_error(&error))?) })
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn compile(&self, py: Python<'_>, kind: &str, spec: &str) -> PyResult<Grammar> {
        let Some(kind) = Kind::named(kind) else {
            return Err(PyValueError::new_err(format!(
                "kind is {kind:?}; use \"json\", \"json_object\", \"regex\", \"choice\" or \"grammar\""
            )));
        };
        let inner = detached(py, || self.inner.compile(kind, spec))?;
        Ok(Grammar { inner: inner.map_err(|error| python_error(&error))? })
    }
}

/// A specification compiled for one vocabulary.
#[pyclass(frozen, module = "octavo._core")]
struct Grammar {
    inner: Arc<octavo_grammar::Grammar>,
}

/// The constraints of all requests that run.
#[pyclass(frozen, module = "octavo._core")]
struct Constraints {
    inner: Mutex<octavo_grammar::Constraints>,
}

impl Constraints {
    fn lock(&self) -> MutexGuard<'_, octavo_grammar::Constraints> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Constraints {
    #[new]
    fn new(vocabulary: &Vocabulary) -> Self {
        let inner = octavo_grammar::Constraints::new(vocabulary.inner.clone());
        Self { inner: Mutex::new(inner) }
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().len())
    }

    fn __contains__(&self, py: Python<'_>, request_id: i64) -> bool {
        py.detach(|| self.lock().contains(request_id))
    }

    #[pyo3(signature = (request_id, n, grammar = None, allowed_token_ids = None, bad_words = None))]
    fn add(
        &self,
        py: Python<'_>,
        request_id: i64,
        n: usize,
        grammar: Option<PyRef<'_, Grammar>>,
        allowed_token_ids: Option<Vec<u32>>,
        bad_words: Option<Vec<Vec<u32>>>,
    ) -> PyResult<()> {
        let rules = Rules {
            grammar: grammar.map(|grammar| grammar.inner.clone()),
            allowed: allowed_token_ids,
            bad_words: BadWords::new(&bad_words.unwrap_or_default()),
        };
        let added = detached(py, || self.lock().add(request_id, n, rules))?;
        added.map_err(|error| python_error(&error))
    }

    fn remove(&self, py: Python<'_>, request_id: i64) {
        py.detach(|| self.lock().remove(request_id));
    }

    fn fill(
        &self,
        py: Python<'_>,
        keys: &[u8],
        address: usize,
        row_words: usize,
    ) -> PyResult<Vec<(usize, String)>> {
        let (keys, rest) = keys.as_chunks::<16>();
        if !rest.is_empty() {
            let message = "keys: give two int64, request id and sample index, for each row";
            return Err(PyValueError::new_err(message));
        }
        let keys: Vec<(i64, usize)> = keys
            .iter()
            .map(|key| {
                let (request, sample) = key.split_at(8);
                (int64(request), usize::try_from(int64(sample)).unwrap_or(usize::MAX))
            })
            .collect();
        let needed = py.detach(|| self.lock().row_words());
        if row_words < needed {
            return Err(PyValueError::new_err(format!(
                "row_words is {row_words}; the vocabulary needs {needed}"
            )));
        }
        let len = keys.len().saturating_mul(row_words);
        // SAFETY: the caller keeps the rows there, and neither reads nor writes them during the call.
        let rows = unsafe { slice_mut::<u32>(address, len) }?;
        detached(py, || {
            self.lock().fill(&keys, rows, row_words, |items, body| parallel_for(items, body))
        })
    }

    fn advance(&self, py: Python<'_>, frame: &StepOutput) -> PyResult<Vec<(usize, String)>> {
        let events = frame.events(py);
        detached(py, || self.lock().advance(events))
    }
}

fn int64(bytes: &[u8]) -> i64 {
    bytes.try_into().map_or(0, i64::from_le_bytes)
}

/// Add this file's classes and functions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Vocabulary>()?;
    module.add_class::<Grammar>()?;
    module.add_class::<Constraints>()
}
