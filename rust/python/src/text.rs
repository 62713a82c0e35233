//! `TokenTable`.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

/// Token id to bytes, shared by every sequence of an engine.
#[pyclass(frozen, module = "octavo._core")]
pub(crate) struct TokenTable {
    pub(crate) inner: Arc<octavo_core::text::TokenTable>,
}

#[pymethods]
impl TokenTable {
    #[new]
    #[pyo3(signature = (token_bytes, flags, *, drop_leading_space = false))]
    fn new(
        token_bytes: &Bound<'_, PyList>,
        flags: &[u8],
        drop_leading_space: bool,
    ) -> PyResult<Self> {
        if token_bytes.len() != flags.len() {
            return Err(PyValueError::new_err(format!(
                "{} tokens but {} flags: one byte an id is needed",
                token_bytes.len(),
                flags.len()
            )));
        }
        let tokens: Vec<Bound<'_, PyBytes>> = token_bytes.extract()?;
        let tokens = tokens.iter().map(PyBytesMethods::as_bytes);
        Ok(Self {
            inner: Arc::new(octavo_core::text::TokenTable::new(tokens, flags, drop_leading_space)),
        })
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    #[pyo3(signature = (token_ids, *, skip_special_tokens = true))]
    fn decode<'py>(
        &self,
        py: Python<'py>,
        token_ids: &[u8],
        skip_special_tokens: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (ids, rest) = token_ids.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(PyValueError::new_err(format!(
                "{} bytes are no int32 ids: give a multiple of 4 bytes",
                token_ids.len()
            )));
        }
        let ids = ids.iter().map(|id| u32::from_ne_bytes(*id));
        Ok(PyBytes::new(py, &self.inner.decode(ids, skip_special_tokens)))
    }
}

/// Add this file's classes and functions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<TokenTable>()
}
