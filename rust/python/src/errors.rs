//! The one place where errors become Python exceptions: the classes of `octavo.errors`.

use pyo3::prelude::*;
use pyo3::types::PyType;

/// An instance of a class of `octavo.errors`, or the import error that kept it from being made.
fn raise(py: Python<'_>, class: &str, message: &str, field: Option<&str>) -> PyErr {
    let build = || -> PyResult<PyErr> {
        let class = py.import("octavo.errors")?.getattr(class)?.cast_into::<PyType>()?;
        let value = match field {
            Some(field) => class.call1((message, field))?,
            None => class.call1((message,))?,
        };
        Ok(PyErr::from_value(value))
    };
    build().unwrap_or_else(|error| error)
}

/// An `octavo.errors` exception of the named class.
pub(crate) fn octavo_error(class: &str, message: &str) -> PyErr {
    Python::attach(|py| raise(py, class, message, None))
}

/// An `InvalidRequest` (or a subclass) that names the field at fault.
pub(crate) fn request_error(class: &str, field: &str, message: &str) -> PyErr {
    Python::attach(|py| raise(py, class, message, Some(field)))
}
