//! Where a tensor lies.

use crate::Error;
use crate::error::Quoted;

/// A tensor of a file whose element types are `T`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor<T> {
    /// Its name, unique in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: T,
    /// Its shape, slowest dimension first.
    pub shape: Vec<u64>,
    /// Where its data begins in the file.
    pub offset: u64,
    /// The length of its data in bytes.
    pub num_bytes: u64,
}

/// The places of the tensors in the order of their data, after checking that none share bytes.
pub(crate) fn in_file_order<T>(tensors: &[Tensor<T>]) -> Result<Vec<&Tensor<T>>, Error> {
    let mut ordered: Vec<_> = tensors.iter().collect();
    ordered.sort_by_key(|tensor| (tensor.offset, tensor.num_bytes));
    for pair in ordered.windows(2) {
        let (before, after) = (pair[0], pair[1]);
        // Both ends lie inside the file, so the sum cannot overflow.
        if before.offset + before.num_bytes > after.offset {
            let what = format!("its data overlaps that of tensor {}", Quoted(&before.name));
            return Err(Error::corrupt(after.offset, what).in_tensor(&after.name));
        }
    }
    Ok(ordered)
}
