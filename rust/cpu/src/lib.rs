//! SIMD kernels for machines without a GPU, chosen at run time; every result is independent of the batch and
//! of the number of threads.

pub mod activation;
pub mod attention;
pub mod cache;
pub mod isa;
pub mod linear;
pub mod math;
pub mod norm;
pub mod pool;
pub mod sample;
mod shared;
mod topology;

pub use topology::physical_cores;
