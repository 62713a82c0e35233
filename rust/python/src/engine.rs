//! The core: `Core`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};

use octavo_core::ids::Slot;
use octavo_core::kv_cache::cache_groups::CacheGroups;
use octavo_core::step::layout::{NUM_ARENAS, PARAM_LEN};
use octavo_core::step::plan::{COUNTS, NUM_COUNTS};
use octavo_core::{Config, Error, Policy, RequestSpec, Sampling};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::arenas::Arenas;
use crate::errors::{octavo_error, request_error};
use crate::step::{StepOutput, StepPlan};
use crate::text::TokenTable;

/// The Python exception of a core error.
fn python_error(error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Config { .. } => octavo_error("ConfigError", &message),
        Error::InvalidRequest { field, .. } => request_error("InvalidRequest", field, &message),
        Error::ContextLengthExceeded { .. } => {
            request_error("ContextLengthExceeded", "prompt", &message)
        }
        Error::CapacityExceeded { .. } => request_error("CapacityExceeded", "max_tokens", &message),
        Error::TooManyOpenSteps
        | Error::NotOldestStep { .. }
        | Error::ShortBuffer { .. }
        | Error::InvalidSample { .. } => PyValueError::new_err(message),
    }
}

/// The core, its memory, and whether it panicked.
struct Inner {
    core: octavo_core::Core,
    arenas: Option<Arenas>,
    failed: bool,
}

impl Inner {
    fn arenas(&mut self) -> PyResult<(&mut octavo_core::Core, &mut Arenas)> {
        let Some(arenas) = &mut self.arenas else {
            return Err(PyValueError::new_err("the core has no arenas; call attach first"));
        };
        Ok((&mut self.core, arenas))
    }
}

/// Block pool, prefix cache, scheduler and sequences of one engine.
#[pyclass(frozen, module = "octavo._core")]
struct Core {
    inner: Mutex<Inner>,
}

impl Core {
    fn lock(&self) -> PyResult<MutexGuard<'_, Inner>> {
        // One thread calls the core. It never waits for the lock: a wait with the GIL held could block forever.
        self.inner
            .try_lock()
            .map_err(|_| PyRuntimeError::new_err("the core is in use by another thread"))
    }

    /// Run `work` on the core. It must not run Python code, which could call the core again; errors are converted
    /// afterwards. A panic is a bug in the core, which then refuses all further work.
    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> PyResult<T>) -> PyResult<T> {
        let mut inner = self.lock()?;
        if inner.failed {
            return Err(PyRuntimeError::new_err(
                "the core failed earlier and refuses further work; restart the engine",
            ));
        }
        catch_unwind(AssertUnwindSafe(|| work(&mut inner))).unwrap_or_else(|panic| {
            inner.failed = true;
            let message = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("unknown panic");
            Err(PyRuntimeError::new_err(format!(
                "the core failed: {message}; restart the engine and report this"
            )))
        })
    }
}

#[pymethods]
impl Core {
    #[new]
    #[pyo3(signature = (
        *, block_size, num_blocks, max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size, eos_token_ids,
        policy = "fcfs", aging_interval_us = 10_000_000, enable_prefix_caching = true, hash_seed = 0,
        group_min_blocks = 0, windows = vec![0], token_table = None,
    ), text_signature = "(*, block_size, num_blocks, max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size, eos_token_ids, policy='fcfs', aging_interval_us=10000000, enable_prefix_caching=True, hash_seed=0, group_min_blocks=0, windows=[0], token_table=None)")]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python class")]
    fn new(
        block_size: usize,
        num_blocks: usize,
        max_num_seqs: usize,
        max_num_batched_tokens: usize,
        max_model_len: usize,
        vocab_size: usize,
        eos_token_ids: Vec<u32>,
        policy: &str,
        aging_interval_us: u64,
        enable_prefix_caching: bool,
        hash_seed: u64,
        group_min_blocks: usize,
        windows: Vec<usize>,
        token_table: Option<PyRef<'_, TokenTable>>,
    ) -> PyResult<Self> {
        let policy = match policy {
            "fcfs" => Policy::Fcfs,
            "priority" => Policy::Priority,
            other => {
                let message = format!("policy: {other:?} is unknown; use \"fcfs\" or \"priority\"");
                return Err(octavo_error("ConfigError", &message));
            }
        };
        let config = Config {
            block_size,
            num_blocks,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            vocab_size,
            eos_token_ids,
            policy,
            aging_interval_us,
            enable_prefix_caching,
            hash_seed,
            group_min_blocks,
            windows,
            ..octavo_core::Config::default()
        };
        let table = token_table.map(|table| table.inner.clone());
        let core = octavo_core::Core::new(config, table).map_err(|error| python_error(&error))?;
        Ok(Self { inner: Mutex::new(Inner { core, arenas: None, failed: false }) })
    }

    fn layout(&self) -> PyResult<Vec<(&'static str, usize, usize)>> {
        let inner = self.lock()?;
        Ok(inner.core.layout().arrays().iter().map(|a| (a.name, a.offset, a.capacity)).collect())
    }

    fn arena_len(&self) -> PyResult<usize> {
        Ok(self.lock()?.core.layout().arena_len())
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python passes owned values")]
    fn attach(
        &self,
        arenas: Vec<(usize, usize)>,
        results: Vec<(usize, usize)>,
        owner: Py<PyAny>,
    ) -> PyResult<()> {
        let replaced = self.with(|inner| {
            let (arena_len, result_len) =
                (inner.core.layout().arena_len(), inner.core.config().max_num_seqs);
            let new = Arenas::new(&arenas, &results, arena_len, result_len, owner)?;
            Ok(inner.arenas.replace(new))
        })?;
        // Dropping the old owner may run Python code, so it happens outside.
        drop(replaced);
        Ok(())
    }

    #[pyo3(
        signature = (
            request_id, prompt_token_ids, *, arrival_us, n = 1, max_tokens, min_tokens = 0,
            temperature = 1.0, top_p = 1.0, top_k = 0, min_p = 0.0, repetition_penalty = 1.0,
            presence_penalty = 0.0, frequency_penalty = 0.0, seed = 0, logprobs = -1,
            stop_token_ids = Vec::new(), stop = Vec::new(), ignore_eos = false,
            include_stop_str_in_output = false, skip_special_tokens = true, begins_text = false,
            priority = 0, cache_salt = None, adapter = 0, logit_bias = Vec::new(), constrained = false,
        ),
        text_signature = "($self, request_id, prompt_token_ids, *, arrival_us, n=1, max_tokens, min_tokens=0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, seed=0, logprobs=-1, stop_token_ids=..., stop=..., ignore_eos=False, include_stop_str_in_output=False, skip_special_tokens=True, begins_text=False, priority=0, cache_salt=b'', adapter=0, logit_bias=..., constrained=False)"
    )]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "keyword arguments of the Python method"
    )]
    fn submit(
        &self,
        request_id: i64,
        prompt_token_ids: &[u8],
        arrival_us: u64,
        n: usize,
        max_tokens: i64,
        min_tokens: i64,
        temperature: f32,
        top_p: f32,
        top_k: i64,
        min_p: f32,
        repetition_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        seed: i128,
        logprobs: i64,
        stop_token_ids: Vec<u32>,
        stop: Vec<Vec<u8>>,
        ignore_eos: bool,
        include_stop_str_in_output: bool,
        skip_special_tokens: bool,
        begins_text: bool,
        priority: i32,
        cache_salt: Option<&[u8]>,
        adapter: u32,
        logit_bias: Vec<(u32, f32)>,
        constrained: bool,
    ) -> PyResult<()> {
        let not_negative = |field: &'static str, value: i64| {
            usize::try_from(value).map_err(|_| {
                request_error("InvalidRequest", field, &format!("{field}: {value} is negative"))
            })
        };
        let (ids, rest) = prompt_token_ids.as_chunks::<4>();
        if !rest.is_empty() {
            let message = format!(
                "prompt: {} bytes are not a multiple of 4, the size of an int32 id",
                prompt_token_ids.len()
            );
            return Err(request_error("InvalidRequest", "prompt", &message));
        }
        let logprobs = match logprobs {
            -1 => None,
            count => Some(u32::try_from(not_negative("logprobs", count)?).unwrap_or(u32::MAX)),
        };
        let top_k = match top_k {
            -1 => 0,
            count => u32::try_from(not_negative("top_k", count)?).unwrap_or(u32::MAX),
        };
        let spec = RequestSpec {
            request_id,
            // A negative id becomes a number outside every vocabulary, so it is refused.
            prompt: ids.iter().map(|id| u32::from_le_bytes(*id)).collect(),
            arrival_us,
            n,
            max_tokens: not_negative("max_tokens", max_tokens)?,
            min_tokens: not_negative("min_tokens", min_tokens)?,
            sampling: Sampling {
                temperature,
                top_p,
                top_k,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                seed: seed as u64,
                logprobs,
            },
            stop_token_ids,
            stop,
            ignore_eos,
            include_stop: include_stop_str_in_output,
            skip_special: skip_special_tokens,
            begins_text,
            priority,
            cache_salt: cache_salt.unwrap_or_default().to_vec(),
            adapter,
            logit_bias,
            constrained,
        };
        self.with(|inner| Ok(inner.core.submit(spec)))?.map_err(|error| python_error(&error))
    }

    fn plan(&self) -> PyResult<Option<StepPlan>> {
        let plan = self.with(|inner| {
            let (core, arenas) = inner.arenas()?;
            Ok(core.plan(arenas.arena(core.next_arena())))
        })?;
        Ok(plan.map_err(|error| python_error(&error))?.map(StepPlan))
    }

    fn commit(&self, py: Python<'_>, step: u64) -> PyResult<StepOutput> {
        let frame = self.with(|inner| {
            let (core, arenas) = inner.arenas()?;
            let sampled = match core.oldest_open() {
                Some((_, arena, samples)) => &arenas.result(arena)[..samples],
                None => &[],
            };
            match core.commit(step, sampled) {
                Ok(frame) => StepOutput::new(py, frame).map(Ok),
                Err(error) => Ok(Err(error)),
            }
        })?;
        frame.map_err(|error| python_error(&error))
    }

    fn abort(&self, request_id: i64) -> PyResult<bool> {
        self.with(|inner| Ok(inner.core.abort(request_id)))
    }

    fn masked<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.with(|inner| {
            let masked = inner.core.masked();
            PyBytes::new_with(py, masked.len() * 16, |out| {
                for (to, &(request, sample)) in out.as_chunks_mut::<16>().0.iter_mut().zip(masked) {
                    to[..8].copy_from_slice(&request.to_le_bytes());
                    to[8..].copy_from_slice(&i64::from(sample).to_le_bytes());
                }
                Ok(())
            })
        })
    }

    fn history<'py>(&self, py: Python<'py>, slot: u32) -> PyResult<Bound<'py, PyBytes>> {
        self.with(|inner| {
            let Some(tokens) = inner.core.history(Slot(slot)) else {
                return Err(PyValueError::new_err(format!(
                    "slot: no sequence runs in slot {slot}"
                )));
            };
            PyBytes::new_with(py, size_of_val(tokens), |out| {
                for (to, token) in out.as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
                    *to = token.to_le_bytes();
                }
                Ok(())
            })
        })
    }

    fn has_work(&self) -> PyResult<bool> {
        self.with(|inner| Ok(inner.core.has_work()))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(|inner| Ok(inner.core.stats()))?;
        let dict = PyDict::new(py);
        for (name, value) in stats.entries() {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn reset_prefix_cache(&self) -> PyResult<usize> {
        self.with(|inner| Ok(inner.core.reset_prefix_cache()))
    }

    fn check_invariants(&self) -> PyResult<()> {
        self.with(|inner| inner.core.check_invariants().map_err(PyRuntimeError::new_err))
    }
}

/// Blocks that one sequence holds at once, at most, in all cache groups together.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "Python passes owned values")]
fn max_blocks_per_sequence(
    num_tokens: usize,
    block_size: usize,
    windows: Vec<usize>,
    max_num_batched_tokens: usize,
) -> PyResult<usize> {
    if windows.is_empty() || block_size == 0 {
        return Err(PyValueError::new_err("windows is empty or block_size is 0"));
    }
    let groups = CacheGroups::new(&windows, block_size, max_num_batched_tokens);
    Ok(groups.max_blocks_per_sequence(num_tokens))
}

/// Add this file's classes and functions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("NUM_ARENAS", NUM_ARENAS)?;
    module.add("PARAM_LEN", PARAM_LEN)?;
    module.add("NUM_COUNTS", NUM_COUNTS)?;
    module.add("COUNTS", PyTuple::new(module.py(), COUNTS)?)?;
    module.add_function(wrap_pyfunction!(max_blocks_per_sequence, module)?)?;
    module.add_class::<Core>()
}
