//! `TokenTable`.

use pyo3::prelude::*;

/// Add this file's classes and functions to the module.
pub(crate) fn register(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
