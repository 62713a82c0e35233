//! CPU kernels of a model's layers: norms, activation, rotary positions and cache, attention.
#![allow(unsafe_code, reason = "hands the kernels memory that Python owns")]
#![allow(clippy::too_many_arguments, reason = "the tensors' shapes cross the border one by one")]

use octavo_cpu::activation::{ActAndMul, Activation, act_and_mul};
use octavo_cpu::attention::{Attention, attention};
use octavo_cpu::cache::{CacheShape, MAX_HEAD_DIM, RopeAndCache, rope_and_cache};
use octavo_cpu::math::Dtype;
use octavo_cpu::norm::{RmsNorm, rms_norm};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::pointers::slice;

/// The dtype of that name.
fn dtype_of(name: &str) -> PyResult<Dtype> {
    match name {
        "bfloat16" => Ok(Dtype::Bf16),
        "float32" => Ok(Dtype::F32),
        _ => Err(PyValueError::new_err(format!(
            "dtype is {name:?}; use \"bfloat16\" or \"float32\""
        ))),
    }
}

/// An error unless a condition holds.
pub(crate) fn require(condition: bool, message: &str) -> PyResult<()> {
    if condition { Ok(()) } else { Err(PyValueError::new_err(message.to_owned())) }
}

/// A tensor's memory, after the checks that an address alone allows.
pub(crate) fn tensor(address: usize, dtype: Dtype, name: &str) -> PyResult<*mut u8> {
    let size = match dtype {
        Dtype::Bf16 => 2,
        Dtype::F32 => 4,
    };
    require(address != 0, &format!("{name} is null"))?;
    require(
        address.is_multiple_of(size),
        &format!("{name} ({address:#x}) is not aligned to its elements of {size} bytes"),
    )?;
    Ok(std::ptr::with_exposed_provenance_mut(address))
}

/// The cache's memory: whole 32-bit words whatever its dtype.
fn cache(address: usize) -> PyResult<*mut u8> {
    tensor(address, Dtype::F32, "kv_cache")
}

/// A cache's shape that the kernels can handle.
fn shape_of(
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
) -> PyResult<CacheShape> {
    require(
        num_kv_heads > 0 && num_heads > 0 && num_heads.is_multiple_of(num_kv_heads),
        "num_heads must be a multiple of num_kv_heads, both above 0",
    )?;
    require(
        head_dim > 0 && head_dim.is_multiple_of(16) && head_dim <= MAX_HEAD_DIM,
        "head_dim must be a multiple of 16, at most 256",
    )?;
    require(
        block_size > 0 && block_size.is_multiple_of(16),
        "block_size must be a multiple of 16, above 0",
    )?;
    Ok(CacheShape { num_kv_heads, head_dim, block_size })
}

#[pyfunction]
#[pyo3(signature = (x, weight, out, rows, n, eps, dtype, *, residual = 0))]
fn cpu_rms_norm(
    py: Python<'_>,
    x: usize,
    weight: usize,
    out: usize,
    rows: usize,
    n: usize,
    eps: f32,
    dtype: &str,
    residual: usize,
) -> PyResult<()> {
    if rows == 0 || n == 0 {
        return Ok(());
    }
    let dtype = dtype_of(dtype)?;
    let address = |p, name| tensor(p, dtype, name).map(<*mut u8>::expose_provenance);
    let (x, out) = (address(x, "x")?, address(out, "out")?);
    let residual = if residual == 0 { 0 } else { address(residual, "residual")? };
    let weight = tensor(weight, Dtype::F32, "weight")?.expose_provenance();
    py.detach(|| {
        let norm = RmsNorm {
            dtype,
            x: std::ptr::with_exposed_provenance(x),
            weight: std::ptr::with_exposed_provenance(weight),
            out: std::ptr::with_exposed_provenance_mut(out),
            residual: std::ptr::with_exposed_provenance_mut(residual),
            rows,
            n,
            eps,
        };
        // SAFETY: the caller's tensors have these shapes, as `_core.pyi` says.
        unsafe { rms_norm(&norm) };
    });
    Ok(())
}

#[pyfunction]
fn cpu_act_and_mul(
    py: Python<'_>,
    gate_up: usize,
    out: usize,
    rows: usize,
    n: usize,
    activation: &str,
    dtype: &str,
) -> PyResult<()> {
    let activation = match activation {
        "silu" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_tanh" => Activation::GeluTanh,
        other => {
            return Err(PyValueError::new_err(format!(
                "activation is {other:?}; use \"silu\", \"gelu\" or \"gelu_tanh\""
            )));
        }
    };
    if rows == 0 || n == 0 {
        return Ok(());
    }
    let dtype = dtype_of(dtype)?;
    let gate_up = tensor(gate_up, dtype, "gate_up")?.expose_provenance();
    let out = tensor(out, dtype, "out")?.expose_provenance();
    py.detach(|| {
        let call = ActAndMul {
            dtype,
            activation,
            gate_up: std::ptr::with_exposed_provenance(gate_up),
            out: std::ptr::with_exposed_provenance_mut(out),
            rows,
            n,
        };
        // SAFETY: the caller's tensors have these shapes, as `_core.pyi` says.
        unsafe { act_and_mul(&call) };
    });
    Ok(())
}

#[pyfunction]
#[pyo3(signature = (
    qkv, kv_cache, positions, slot_mapping, cos_sin, tokens, num_heads, num_kv_heads, head_dim, rotary_dim,
    block_size, dtype, *, q_norm = 0, k_norm = 0, eps = 0.0
))]
fn cpu_rope_and_cache(
    py: Python<'_>,
    qkv: usize,
    kv_cache: usize,
    positions: usize,
    slot_mapping: usize,
    cos_sin: usize,
    tokens: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    block_size: usize,
    dtype: &str,
    q_norm: usize,
    k_norm: usize,
    eps: f32,
) -> PyResult<()> {
    let shape = shape_of(num_heads, num_kv_heads, head_dim, block_size)?;
    require(
        rotary_dim <= head_dim && rotary_dim.is_multiple_of(2),
        "rotary_dim must be even, at most head_dim",
    )?;
    if tokens == 0 {
        return Ok(());
    }
    let dtype = dtype_of(dtype)?;
    let qkv = tensor(qkv, dtype, "qkv")?.expose_provenance();
    let kv_cache = cache(kv_cache)?.expose_provenance();
    let cos_sin = match rotary_dim {
        // An empty table may have no memory.
        0 => align_of::<f32>(),
        _ => tensor(cos_sin, Dtype::F32, "cos_sin")?.expose_provenance(),
    };
    // SAFETY: the caller keeps the arrays alive and unchanged for the call.
    let (positions, slot_mapping, q_norm, k_norm) = unsafe {
        let norm = |address| (address != 0).then(|| slice::<f32>(address, head_dim)).transpose();
        (slice(positions, tokens)?, slice(slot_mapping, tokens)?, norm(q_norm)?, norm(k_norm)?)
    };
    require(positions.iter().all(|&p| p >= 0), "a position is below 0")?;
    py.detach(|| {
        let step = RopeAndCache {
            dtype,
            qkv: std::ptr::with_exposed_provenance_mut(qkv),
            kv_cache: std::ptr::with_exposed_provenance_mut(kv_cache),
            shape,
            positions,
            slot_mapping,
            cos_sin: std::ptr::with_exposed_provenance(cos_sin),
            num_heads,
            rotary_dim,
            q_norm,
            k_norm,
            eps,
        };
        // SAFETY: the caller's tensors have these shapes, as `_core.pyi` says.
        unsafe { rope_and_cache(&step) };
    });
    Ok(())
}

#[pyfunction]
#[pyo3(signature = (
    qkv, qkv_stride, out, kv_cache, block_tables, table_stride, rows, query_start, seq_lens, num_rows, num_heads,
    num_kv_heads, head_dim, block_size, scale, dtype, *, window = 0, softcap = 0.0
))]
fn cpu_attention(
    py: Python<'_>,
    qkv: usize,
    qkv_stride: usize,
    out: usize,
    kv_cache: usize,
    block_tables: usize,
    table_stride: usize,
    rows: usize,
    query_start: usize,
    seq_lens: usize,
    num_rows: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    scale: f32,
    dtype: &str,
    window: usize,
    softcap: f32,
) -> PyResult<()> {
    let shape = shape_of(num_heads, num_kv_heads, head_dim, block_size)?;
    require(scale > 0.0 && scale.is_finite(), "scale must be above 0 and finite")?;
    require(softcap >= 0.0 && softcap.is_finite(), "softcap must be 0 or above and finite")?;
    require(qkv_stride >= num_heads * head_dim, "qkv_stride is below num_heads * head_dim")?;
    if num_rows == 0 {
        return Ok(());
    }
    let dtype = dtype_of(dtype)?;
    let qkv = tensor(qkv, dtype, "qkv")?.expose_provenance();
    let out = tensor(out, dtype, "out")?.expose_provenance();
    let kv_cache = cache(kv_cache)?.expose_provenance();
    let tables = tensor(block_tables, Dtype::F32, "block_tables")?.expose_provenance();
    // SAFETY: the caller keeps the arrays alive and unchanged for the call.
    let (rows, query_start, seq_lens) = unsafe {
        (
            slice::<i32>(rows, num_rows)?,
            slice::<i32>(query_start, num_rows + 1)?,
            slice::<i32>(seq_lens, num_rows)?,
        )
    };
    for (row, &length) in seq_lens.iter().enumerate() {
        let queries = query_start[row + 1] - query_start[row];
        require(
            rows[row] >= 0
                && query_start[row] >= 0
                && 0 <= queries
                && queries <= length
                && (length as usize).div_ceil(block_size) <= table_stride,
            "rows, query_start, seq_lens and table_stride do not agree",
        )?;
    }
    py.detach(|| {
        let call = Attention {
            dtype,
            qkv: std::ptr::with_exposed_provenance(qkv),
            qkv_stride,
            out: std::ptr::with_exposed_provenance_mut(out),
            kv_cache: std::ptr::with_exposed_provenance(kv_cache),
            shape,
            block_tables: std::ptr::with_exposed_provenance(tables),
            table_stride,
            rows,
            query_start,
            seq_lens,
            num_heads,
            scale,
            window,
            softcap,
        };
        // SAFETY: the caller's tensors have these shapes and its tables valid blocks, as `_core.pyi` says.
        unsafe { attention(&call) };
    });
    Ok(())
}

/// Add this file's classes and functions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cpu_rms_norm, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_act_and_mul, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_rope_and_cache, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_attention, module)?)
}
