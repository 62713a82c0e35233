//! The CPU kernel that samples tokens from logits.
#![allow(unsafe_code, reason = "hands the kernel memory that Python owns")]
#![allow(clippy::too_many_arguments, reason = "the tensors' shapes cross the border one by one")]

use octavo_cpu::math::Dtype;
use octavo_cpu::sample::{Constraints, Sample, sample};
use pyo3::prelude::*;

use crate::kernels::{require, tensor};
use crate::pointers::slice;

#[pyfunction]
#[pyo3(signature = (
    logits, num_logits, vocab_size, stride, params, slots, positions, counts, count_stride, out_ids, out_logprobs,
    out_top_ids, out_top_logprobs, max_logprobs, first_logit = 0, num_masks = 0, mask_logits = 0, masks = 0,
    mask_words = 0, num_biases = 0, bias_logits = 0, bias_tokens = 0, bias_values = 0
))]
fn cpu_sample(
    py: Python<'_>,
    logits: usize,
    num_logits: usize,
    vocab_size: usize,
    stride: usize,
    params: usize,
    slots: usize,
    positions: usize,
    counts: usize,
    count_stride: usize,
    out_ids: usize,
    out_logprobs: usize,
    out_top_ids: usize,
    out_top_logprobs: usize,
    max_logprobs: usize,
    first_logit: usize,
    num_masks: usize,
    mask_logits: usize,
    masks: usize,
    mask_words: usize,
    num_biases: usize,
    bias_logits: usize,
    bias_tokens: usize,
    bias_values: usize,
) -> PyResult<()> {
    require(vocab_size > 0 && vocab_size <= stride, "vocab_size must be above 0, at most stride")?;
    require(counts == 0 || vocab_size <= count_stride, "count_stride is below vocab_size")?;
    require(
        num_masks == 0 || mask_words >= vocab_size.div_ceil(32),
        "mask_words is below vocab_size / 32",
    )?;
    if num_logits == 0 {
        return Ok(());
    }
    let word = |address, name| tensor(address, Dtype::F32, name).map(<*mut u8>::expose_provenance);
    let optional = |address, name| if address == 0 { Ok(0) } else { word(address, name) };
    let (logits, params) = (word(logits, "logits")?, word(params, "params")?);
    let (counts, out_ids) = (optional(counts, "counts")?, word(out_ids, "out_ids")?);
    let out_logprobs = word(out_logprobs, "out_logprobs")?;
    require(
        max_logprobs == 0 || (out_top_ids != 0 && out_top_logprobs != 0),
        "out_top_ids and out_top_logprobs are null but max_logprobs is not 0",
    )?;
    // Without any, the addresses are never used.
    let top_ids = word(if max_logprobs == 0 { out_ids } else { out_top_ids }, "out_top_ids")?;
    let top_logprobs =
        word(if max_logprobs == 0 { out_ids } else { out_top_logprobs }, "out_top_logprobs")?;
    // SAFETY: the caller keeps the arrays alive and unchanged for the call.
    let (slots, positions) =
        unsafe { (slice::<i32>(slots, num_logits)?, slice::<i32>(positions, num_logits)?) };
    require(slots.iter().all(|&slot| slot >= 0), "a slot is below 0")?;
    // SAFETY: as above.
    let constraints = unsafe {
        Constraints {
            first: first_logit,
            mask_logits: slice(mask_logits, num_masks)?,
            masks: slice(masks, num_masks.saturating_mul(mask_words))?,
            mask_words,
            bias_logits: slice(bias_logits, num_biases)?,
            bias_tokens: slice(bias_tokens, num_biases)?,
            bias_values: slice(bias_values, num_biases)?,
        }
    };
    let known = |&token: &i32| usize::try_from(token).is_ok_and(|token| token < vocab_size);
    require(constraints.bias_tokens.iter().all(known), "a bias' token is not in the vocabulary")?;
    py.detach(|| {
        let call = Sample {
            logits: std::ptr::with_exposed_provenance_mut(logits),
            vocab_size,
            stride,
            params: std::ptr::with_exposed_provenance(params),
            slots,
            positions,
            counts: std::ptr::with_exposed_provenance(counts),
            count_stride,
            out_ids: std::ptr::with_exposed_provenance_mut(out_ids),
            out_logprobs: std::ptr::with_exposed_provenance_mut(out_logprobs),
            out_top_ids: std::ptr::with_exposed_provenance_mut(top_ids),
            out_top_logprobs: std::ptr::with_exposed_provenance_mut(top_logprobs),
            max_logprobs,
            constraints,
        };
        // SAFETY: the caller's tensors have these shapes, as `_core.pyi` says.
        unsafe { sample(&call) };
    });
    Ok(())
}

/// Add this file's function to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cpu_sample, module)?)
}
