//! Model file headers and dequantization.
#![allow(unsafe_code, reason = "slices of the caller's memory")]
#![allow(clippy::needless_pass_by_value, reason = "PyO3 makes owned paths")]

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use half::bf16;
use octavo_formats::gguf::{Array, Value};
use octavo_formats::{
    DequantizeError, Element, Error, Kind, Tensor, dequantize_row, gguf, safetensors,
};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::octavo_error;
use crate::pointers;

/// A tensor as (name, type, shape, offset, bytes).
type TensorTuple = (String, String, Vec<u64>, u64, u64);

/// Read a header with `read`, which gets the file and its length.
fn read_header<T: Send>(
    py: Python<'_>,
    path: &Path,
    read: impl FnOnce(BufReader<File>, u64) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let shown = path.display();
    py.detach(|| {
        // Before opening: to open a pipe would wait for its other end.
        let file_type = path.metadata()?;
        if !file_type.is_file() {
            return Ok(None);
        }
        let file = File::open(path)?;
        let file_len = file.metadata()?.len();
        read(BufReader::with_capacity(1 << 16, file), file_len).map(Some)
    })
    .map_err(|error| match error {
        Error::Corrupt(fault) => octavo_error("CorruptFile", &format!("{shown}: {fault}")),
        Error::Unsupported(fault) => octavo_error("UnsupportedModel", &format!("{shown}: {fault}")),
        Error::Io(error) if error.kind() == std::io::ErrorKind::NotFound => {
            octavo_error("ModelNotFound", &format!("there is no file {shown}"))
        }
        Error::Io(error) => error.into(),
    })?
    .ok_or_else(|| octavo_error("ModelNotFound", &format!("{shown} is not a file")))
}

fn tensor_tuple<T>(tensor: Tensor<T>, dtype: impl FnOnce(T) -> String) -> TensorTuple {
    (tensor.name, dtype(tensor.dtype), tensor.shape, tensor.offset, tensor.num_bytes)
}

fn value_object<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    match value {
        Value::U8(value) => value.into_bound_py_any(py),
        Value::I8(value) => value.into_bound_py_any(py),
        Value::U16(value) => value.into_bound_py_any(py),
        Value::I16(value) => value.into_bound_py_any(py),
        Value::U32(value) => value.into_bound_py_any(py),
        Value::I32(value) => value.into_bound_py_any(py),
        Value::F32(value) => value.into_bound_py_any(py),
        Value::U64(value) => value.into_bound_py_any(py),
        Value::I64(value) => value.into_bound_py_any(py),
        Value::F64(value) => value.into_bound_py_any(py),
        Value::Bool(value) => value.into_bound_py_any(py),
        Value::String(value) => value.into_bound_py_any(py),
        Value::Array(array) => Ok(array_object(py, array)?.into_any()),
    }
}

fn array_object<'py>(py: Python<'py>, array: &Array) -> PyResult<Bound<'py, PyList>> {
    match array {
        // One by one: PyO3 would make `bytes` of it.
        Array::U8(values) => PyList::new(py, values.iter().map(|&value| u16::from(value))),
        Array::I8(values) => PyList::new(py, values),
        Array::U16(values) => PyList::new(py, values),
        Array::I16(values) => PyList::new(py, values),
        Array::U32(values) => PyList::new(py, values),
        Array::I32(values) => PyList::new(py, values),
        Array::F32(values) => PyList::new(py, values),
        Array::U64(values) => PyList::new(py, values),
        Array::I64(values) => PyList::new(py, values),
        Array::F64(values) => PyList::new(py, values),
        Array::Bool(values) => PyList::new(py, values),
        Array::String(values) => PyList::new(py, values.iter()),
    }
}

/// Check a GGUF file's header against the file's size.
#[pyfunction]
fn read_gguf(py: Python<'_>, path: PathBuf) -> PyResult<(Bound<'_, PyDict>, Vec<TensorTuple>)> {
    let header = read_header(py, &path, gguf::read)?;
    let metadata = PyDict::new(py);
    for (key, value) in &header.metadata {
        metadata.set_item(key, value_object(py, value)?)?;
    }
    let name = |kind: Kind| kind.name().to_owned();
    let tensors = header.tensors.into_iter().map(|tensor| tensor_tuple(tensor, name)).collect();
    Ok((metadata, tensors))
}

/// Check a safetensors file's header against the file's size.
#[pyfunction]
fn read_safetensors(
    py: Python<'_>,
    path: PathBuf,
) -> PyResult<(Bound<'_, PyDict>, Vec<TensorTuple>)> {
    let header = read_header(py, &path, safetensors::read)?;
    let metadata = PyDict::new(py);
    for (key, value) in &header.metadata {
        metadata.set_item(key, value)?;
    }
    let name = |dtype: safetensors::Dtype| dtype.to_string();
    let tensors = header.tensors.into_iter().map(|tensor| tensor_tuple(tensor, name)).collect();
    Ok((metadata, tensors))
}

/// Dequantize GGUF blocks of one type.
#[pyfunction]
fn dequantize(
    py: Python<'_>,
    source: usize,
    num_bytes: usize,
    kind: &str,
    destination: usize,
    num_elements: usize,
    dtype: &str,
) -> PyResult<()> {
    let Some(kind) = Kind::from_name(kind) else {
        return Err(octavo_error(
            "UnsupportedModel",
            &format!("the tensor type {kind:?} is not known"),
        ));
    };
    // SAFETY: the caller keeps the memory alive and unchanged for the call (see the stub file).
    let source = unsafe { pointers::slice::<u8>(source, num_bytes) }?;
    match dtype {
        "float32" => {
            // SAFETY: as above; nothing else uses the destination during the call.
            let out = unsafe { pointers::slice_mut::<f32>(destination, num_elements) }?;
            py.detach(|| dequantize_all(kind, source, out))
        }
        "bfloat16" => {
            // SAFETY: as above.
            let out = unsafe { pointers::slice_mut::<bf16>(destination, num_elements) }?;
            py.detach(|| dequantize_all(kind, source, out))
        }
        _ => Err(PyValueError::new_err(format!(
            "dtype is {dtype:?}; give \"bfloat16\" or \"float32\""
        ))),
    }
}

fn dequantize_all<E: Element + Send>(kind: Kind, source: &[u8], out: &mut [E]) -> PyResult<()> {
    /// Elements of one piece of work; whole blocks of every type.
    const PIECE: usize = 1 << 16;
    let value_error = |error: DequantizeError| PyValueError::new_err(error.to_string());
    if !kind.can_dequantize() {
        let error = DequantizeError::Unsupported(kind);
        return Err(octavo_error("UnsupportedModel", &error.to_string()));
    }
    kind.check_lengths(source.len(), out.len()).map_err(value_error)?;
    let piece_bytes = PIECE / kind.block_len() * kind.block_bytes();
    // The locks are never contended: they hand each piece to the one thread that takes it.
    let pieces: Vec<_> =
        source.chunks(piece_bytes).zip(out.chunks_mut(PIECE)).map(Mutex::new).collect();
    let failure = Mutex::new(None);
    octavo_cpu::pool::parallel_for(pieces.len(), &|i| {
        let mut piece = pieces[i].lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = dequantize_row(kind, piece.0, piece.1) {
            *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    });
    failure
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
        .map_or(Ok(()), |error| Err(value_error(error)))
}

/// Add this file's classes and functions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(read_gguf, module)?)?;
    module.add_function(wrap_pyfunction!(read_safetensors, module)?)?;
    module.add_function(wrap_pyfunction!(dequantize, module)?)
}
