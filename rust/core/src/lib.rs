//! The core of Octavo: block pool, prefix cache, sequences, scheduler, step plan, stop rules and text.
//!
//! It knows no clock, no randomness, no threads and no input or output: the same calls give the same decisions.
#![forbid(unsafe_code)]

pub mod text;
