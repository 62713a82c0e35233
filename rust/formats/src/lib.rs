//! Model file headers (GGUF, safetensors), checked before any tensor is touched, and dequantization.
//!
//! A header is read from any [`Read`](std::io::Read) and the file's length. Whatever the bytes are, the answer is a
//! header that holds together (every tensor inside the file, none overlapping, every size what its type and shape
//! say) or an [`Error`] that names the place; memory stays within a small multiple of the header's own length.
#![forbid(unsafe_code)]

mod dequantize;
mod error;
pub mod gguf;
mod kind;
pub mod safetensors;
mod tensor;

pub use dequantize::{DequantizeError, Element, dequantize_row};
pub use error::{Error, Fault, Place};
pub use kind::Kind;
pub use tensor::Tensor;
