//! A step: its plan arrays, its record until it is committed, and its outputs.

pub mod layout;
pub(crate) mod open_step;
pub mod output;
pub mod plan;
pub(crate) mod writer;
