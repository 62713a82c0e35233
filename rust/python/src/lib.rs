//! Python bindings of Octavo: convert, validate, map errors. No policy lives here.

mod arenas;
mod engine;
mod errors;
mod formats;
mod grammar;
mod kernels;
mod linear;
mod pointers;
mod sample;
mod step;
mod text;

use std::collections::BTreeMap;

use pyo3::{pyfunction, pymodule};

/// Version, profile and target of the extension, for bug reports.
#[pyfunction]
fn build_info() -> BTreeMap<&'static str, String> {
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let target = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    BTreeMap::from([
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("profile", profile.to_owned()),
        ("target", target),
    ])
}

/// The extension module `octavo._core`.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::build_info;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        super::engine::register(module)?;
        super::text::register(module)?;
        super::formats::register(module)?;
        super::grammar::register(module)?;
        super::linear::register(module)?;
        super::kernels::register(module)?;
        super::sample::register(module)?;
        super::step::register(module)
    }
}
