//! The core of Octavo: block pool, prefix cache, sequences, scheduler, step plan, stop rules and text.
//!
//! It knows no clock, no randomness, no threads and no input or output: the same calls give the same decisions.
//!
//! [`Core`] owns every request. A loop calls [`Core::submit`], [`Core::plan`], [`Core::commit`] and [`Core::abort`];
//! `plan` may be called once more before the last step is committed.
#![forbid(unsafe_code)]

mod admission;
pub mod block;
pub mod cache;
pub mod commit;
pub mod config;
mod core;
pub mod error;
mod groups;
mod invariants;
pub mod plan;
pub mod pool;
pub mod prefix;
mod queue;
pub mod request;
mod scheduler;
mod sequence;
mod slots;
pub mod stats;
pub mod text;
pub mod trace;

pub use crate::commit::{FinishReason, StepOutput, StopReason};
pub use crate::config::{Config, Policy};
pub use crate::core::Core;
pub use crate::error::{Error, Result};
pub use crate::plan::{Layout, StepPlan};
pub use crate::request::{RequestSpec, Sampling};
pub use crate::stats::Stats;
