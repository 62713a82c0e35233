//! `PackedLinear` and the settings of the CPU kernels.
#![allow(unsafe_code, reason = "slices of the caller's memory")]

use half::bf16;
use octavo_cpu::isa::{self, Isa};
use octavo_cpu::linear::{Dtype, Input, Linear, Output, Part};
use octavo_cpu::{physical_cores, pool};
use octavo_formats::{Kind, dequantize_row};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::octavo_error;
use crate::pointers;

#[allow(clippy::needless_pass_by_value, reason = "as `map_err` hands it over")]
fn value_error(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Elements of `rows` rows.
fn elements(rows: usize, row: usize) -> PyResult<usize> {
    rows.checked_mul(row)
        .ok_or_else(|| value_error(format!("{rows} rows of {row} elements overflow")))
}

/// The memory of one part, checked against its rows.
struct Source<'a> {
    kind: Kind,
    bytes: &'a [u8],
    rows: usize,
    row_bytes: usize,
}

impl Source<'_> {
    fn new(
        (address, num_bytes, kind, rows): &(usize, usize, String, usize),
        k: usize,
    ) -> PyResult<Self> {
        let Some(kind) = Kind::from_name(kind).filter(|kind| kind.can_dequantize()) else {
            return Err(octavo_error(
                "UnsupportedModel",
                &format!("the tensor type {kind:?} cannot be packed"),
            ));
        };
        let row_bytes = kind.num_bytes(k as u64, k as u64).ok_or_else(|| {
            value_error(format!("rows of {k} elements are not whole blocks of {}", kind.name()))
        })?;
        if row_bytes.checked_mul(*rows as u64) != Some(*num_bytes as u64) {
            return Err(value_error(format!(
                "{num_bytes} bytes of {} are not {rows} rows of {k} elements",
                kind.name()
            )));
        }
        // SAFETY: the caller keeps the memory alive and unchanged for the call (see the stub file).
        let bytes = unsafe { pointers::slice::<u8>(*address, *num_bytes) }?;
        Ok(Self { kind, bytes, rows: *rows, row_bytes: row_bytes as usize })
    }

    fn read_row(&self, index: usize, row: &mut [f32]) {
        let bytes = &self.bytes[index * self.row_bytes..][..self.row_bytes];
        let read = dequantize_row(self.kind, bytes, row);
        debug_assert!(read.is_ok(), "kind and lengths were checked");
    }
}

/// A dense layer's weight, packed for the CPU kernels.
#[pyclass(frozen, module = "octavo._core")]
struct PackedLinear(Linear);

#[pymethods]
impl PackedLinear {
    #[new]
    #[pyo3(signature = (parts, k, dtype, *, bias = 0))]
    #[allow(clippy::needless_pass_by_value, reason = "PyO3 makes an owned list")]
    fn new(
        py: Python<'_>,
        parts: Vec<(usize, usize, String, usize)>,
        k: usize,
        dtype: &str,
        bias: usize,
    ) -> PyResult<Self> {
        let dtype = match dtype {
            "bfloat16" => Dtype::Bf16,
            "float32" => Dtype::F32,
            _ => {
                let message = format!("dtype is {dtype:?}; give \"bfloat16\" or \"float32\"");
                return Err(value_error(message));
            }
        };
        let sources =
            parts.iter().map(|part| Source::new(part, k)).collect::<PyResult<Vec<_>>>()?;
        let n = sources.iter().fold(0, |n: usize, source| n.saturating_add(source.rows));
        let bias = match bias {
            0 => None,
            // SAFETY: as for the parts.
            address => Some(unsafe { pointers::slice::<f32>(address, n) }?),
        };
        py.detach(|| {
            let readers: Vec<_> = sources
                .iter()
                .map(|source| |index: usize, row: &mut [f32]| source.read_row(index, row))
                .collect();
            let parts: Vec<_> = sources
                .iter()
                .zip(&readers)
                .map(|(source, read_row)| Part { rows: source.rows, read_row })
                .collect();
            Linear::new(&parts, k, dtype, bias)
        })
        .map(Self)
        .map_err(value_error)
    }

    #[getter]
    fn n(&self) -> usize {
        self.0.n()
    }

    #[getter]
    fn k(&self) -> usize {
        self.0.k()
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.0.num_bytes()
    }

    #[pyo3(signature = (x, out, rows, *, out_float32 = false))]
    fn forward(
        &self,
        py: Python<'_>,
        x: usize,
        out: usize,
        rows: usize,
        out_float32: bool,
    ) -> PyResult<()> {
        let linear = &self.0;
        let (k, n) = (linear.k(), linear.n());
        let x_len = elements(rows, k)?;
        // SAFETY: the caller keeps the memory alive and unchanged for the call (see the stub file).
        let x = unsafe {
            match linear.dtype() {
                Dtype::Bf16 => Input::Bf16(pointers::slice::<bf16>(x, x_len)?),
                Dtype::F32 => Input::F32(pointers::slice::<f32>(x, x_len)?),
            }
        };
        let out_dtype = if out_float32 { Dtype::F32 } else { linear.dtype() };
        // SAFETY: as above; nothing else uses `out` during the call.
        let out = unsafe { output(out, elements(rows, n)?, out_dtype) }?;
        py.detach(|| linear.forward(x, k, out, n, rows)).map_err(value_error)
    }

    fn embed(&self, py: Python<'_>, token_ids: usize, out: usize, rows: usize) -> PyResult<()> {
        let linear = &self.0;
        // SAFETY: the caller keeps the memory alive and unchanged for the call (see the stub file).
        let ids = unsafe { pointers::slice::<i32>(token_ids, rows) }?;
        let len = elements(rows, linear.k())?;
        // SAFETY: as above; nothing else uses `out` during the call.
        let out = unsafe { output(out, len, linear.dtype()) }?;
        py.detach(|| linear.embed(ids, out)).map_err(value_error)
    }
}

/// Memory to write, of either dtype.
///
/// # Safety
///
/// As for `pointers::slice_mut`.
unsafe fn output<'a>(address: usize, len: usize, dtype: Dtype) -> PyResult<Output<'a>> {
    // SAFETY: the caller's promise.
    unsafe {
        Ok(match dtype {
            Dtype::Bf16 => Output::Bf16(pointers::slice_mut::<bf16>(address, len)?),
            Dtype::F32 => Output::F32(pointers::slice_mut::<f32>(address, len)?),
        })
    }
}

/// What the CPU kernels run on.
#[pyfunction]
fn cpu_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("isa", isa::isa().name())?;
    let usable: Vec<_> = isa::usable().into_iter().map(Isa::name).collect();
    info.set_item("isas", usable)?;
    info.set_item("bf16_native", isa::isa() == Isa::Avx512Bf16)?;
    info.set_item("num_threads", pool::num_threads())?;
    info.set_item("physical_cores", physical_cores())?;
    Ok(info)
}

/// Threads of every CPU kernel.
#[pyfunction]
fn cpu_set_num_threads(num_threads: usize) -> PyResult<()> {
    if num_threads == 0 {
        return Err(octavo_error("ConfigError", "num_threads is 0; give 1 or more"));
    }
    pool::set_num_threads(num_threads);
    Ok(())
}

/// Force another instruction set.
#[pyfunction]
fn cpu_set_isa(isa: &str) -> PyResult<()> {
    let Some(isa) = Isa::from_name(isa) else {
        let names = Isa::ALL.map(Isa::name).join(", ");
        let message = format!("isa is {isa:?}; give one of {names}");
        return Err(octavo_error("ConfigError", &message));
    };
    isa::set_isa(isa).map_err(|error| octavo_error("ConfigError", &error.to_string()))
}

/// Add this file's classes and functions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PackedLinear>()?;
    module.add_function(wrap_pyfunction!(cpu_info, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_set_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_set_isa, module)?)
}
