//! What a step is and what it gives: `StepPlan` and `StepOutput`.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// One step: how much of each plan array is filled.
#[pyclass(frozen, module = "octavo._core")]
pub(crate) struct StepPlan(pub(crate) octavo_core::StepPlan);

macro_rules! step_plan_getters {
    ($($name:ident: $kind:ty),* $(,)?) => {
        #[pymethods]
        impl StepPlan {
            $(#[getter]
            fn $name(&self) -> $kind {
                self.0.$name
            })*

            fn __repr__(&self) -> String {
                format!("{:?}", self.0)
            }
        }
    };
}

step_plan_getters!(
    step: u64,
    arena: usize,
    num_tokens: usize,
    num_rows: usize,
    num_decode_rows: usize,
    num_logits: usize,
    num_table_updates: usize,
    num_block_copies: usize,
    num_param_updates: usize,
    num_biases: usize,
    num_groups: usize,
    max_seq_len: usize,
    max_query_len: usize,
    num_masks: usize,
);

/// The outputs of one committed step; every array as little-endian bytes.
#[pyclass(frozen, get_all, module = "octavo._core")]
pub(crate) struct StepOutput {
    num_events: usize,
    request_ids: Py<PyBytes>,
    sample_indices: Py<PyBytes>,
    logit_indices: Py<PyBytes>,
    token_ids: Py<PyBytes>,
    text_ends: Py<PyBytes>,
    text: Py<PyBytes>,
    finish_reasons: Py<PyBytes>,
    stop_reasons: Py<PyBytes>,
    cached_tokens: Py<PyBytes>,
    started: Py<PyBytes>,
}

impl StepOutput {
    /// The outputs of a step the core committed.
    pub(crate) fn new(py: Python<'_>, frame: &octavo_core::StepOutput) -> PyResult<Self> {
        let ints = |values: &[i32]| int32_bytes(py, values);
        Ok(Self {
            num_events: frame.len(),
            request_ids: int64_bytes(py, &frame.request_ids)?,
            sample_indices: ints(&frame.sample_indices)?,
            logit_indices: ints(&frame.logit_indices)?,
            token_ids: ints(&frame.token_ids)?,
            text_ends: ints(&frame.text_ends)?,
            text: PyBytes::new(py, &frame.text).unbind(),
            finish_reasons: ints(&frame.finish_reasons)?,
            stop_reasons: ints(&frame.stop_reasons)?,
            cached_tokens: ints(&frame.cached_tokens)?,
            started: int64_bytes(py, &frame.started)?,
        })
    }

    /// Request, answer and token of each event.
    pub(crate) fn events(&self, py: Python<'_>) -> Vec<(i64, usize, u32)> {
        let requests = self.request_ids.as_bytes(py).as_chunks::<8>().0;
        let samples = self.sample_indices.as_bytes(py).as_chunks::<4>().0;
        let tokens = self.token_ids.as_bytes(py).as_chunks::<4>().0;
        let events = requests.iter().zip(samples).zip(tokens);
        events
            .map(|((&request, &sample), &token)| {
                let sample = u32::from_le_bytes(sample) as usize;
                (i64::from_le_bytes(request), sample, u32::from_le_bytes(token))
            })
            .collect()
    }
}

fn int64_bytes(py: Python<'_>, values: &[i64]) -> PyResult<Py<PyBytes>> {
    let bytes = PyBytes::new_with(py, size_of_val(values), |out| {
        for (to, value) in out.as_chunks_mut::<8>().0.iter_mut().zip(values) {
            *to = value.to_le_bytes();
        }
        Ok(())
    })?;
    Ok(bytes.unbind())
}

fn int32_bytes(py: Python<'_>, values: &[i32]) -> PyResult<Py<PyBytes>> {
    let bytes = PyBytes::new_with(py, size_of_val(values), |out| {
        for (to, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
            *to = value.to_le_bytes();
        }
        Ok(())
    })?;
    Ok(bytes.unbind())
}

/// Add this file's classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<StepPlan>()?;
    module.add_class::<StepOutput>()
}
