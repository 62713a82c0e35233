//! SIMD kernels for machines without a GPU, chosen at run time; every result is independent of the batch and
//! of the number of threads.

pub mod isa;
pub mod pool;
mod topology;

pub use topology::physical_cores;
