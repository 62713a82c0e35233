//! Model file headers (GGUF, safetensors), checked before any tensor is touched, and dequantization.
#![forbid(unsafe_code)]
