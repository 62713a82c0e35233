//! The core of Octavo: block pool, prefix cache, sequences, scheduler, step plan, stop rules and text.
//!
//! It has no clock, randomness, threads, input or output: the same calls give the same decisions.
//!
//! [`Core`] owns every request. A loop calls [`Core::submit`], [`Core::plan`], [`Core::commit`] and [`Core::abort`].
//! It may call `plan` once more before it commits the step before.
#![forbid(unsafe_code)]

pub mod config;
mod core;
pub mod error;
pub mod ids;
pub mod kv_cache;
pub mod request;
mod scheduler;
pub mod stats;
pub mod step;
pub mod text;
pub mod trace;

pub use crate::config::{Config, Policy};
pub use crate::core::Core;
pub use crate::error::{Error, Result};
pub use crate::request::{RequestSpec, Sampling};
pub use crate::stats::Stats;
pub use crate::step::layout::Layout;
pub use crate::step::output::{FinishReason, StepOutput, StopReason};
pub use crate::step::plan::StepPlan;
