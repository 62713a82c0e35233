//! Python bindings of Octavo: convert, validate, map errors. No policy lives here.

mod arenas;
mod engine;
mod errors;
mod formats;
mod kernels;
mod linear;
mod pointers;
mod text;

use pyo3::pymodule;

/// The extension module `octavo._core`.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        super::engine::register(module)?;
        super::text::register(module)?;
        super::formats::register(module)?;
        super::linear::register(module)?;
        super::kernels::register(module)
    }
}
