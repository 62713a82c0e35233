//! Dense layers: `out[rows, n] = x[rows, k] · weight[n, k]ᵀ + bias`.
//!
//! The weight is packed once into panels of 32 output columns. Within a panel lie, step after step of k, 32 words
//! of 32 bits: a bf16 pair `(k, k + 1)` of each column, or one f32. Every element of the result is one chain of
//! f32 accumulations in ascending order of k, whatever the number of rows, the row's place, the tile it falls in and
//! the number of threads: a row's result depends on that row alone, bit for bit.

mod kernel;
mod memory;
mod pack;

use std::fmt;

use half::bf16;

use crate::isa::{Isa, isa};
use memory::Words;

/// Output columns of a panel.
const PANEL: usize = 32;

/// What a weight is stored in, and the dtype of the activations it multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// 32-bit floating point.
    F32,
}

impl Dtype {
    /// Elements of k in a 32-bit word.
    const fn per_word(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 1,
        }
    }

    /// Bytes of an element.
    const fn bytes(self) -> usize {
        4 / self.per_word()
    }
}

/// Rows of a weight: where they come from is the caller's matter.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// How many.
    pub rows: usize,
    /// Writes one row, by its index within the part, to k floats.
    pub read_row: &'a (dyn Fn(usize, &mut [f32]) + Sync),
}

/// Elements to read.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// 32-bit floating point.
    F32(&'a [f32]),
}

/// Elements to write.
#[derive(Debug)]
pub enum Output<'a> {
    /// bfloat16.
    Bf16(&'a mut [bf16]),
    /// 32-bit floating point.
    F32(&'a mut [f32]),
}

impl Input<'_> {
    fn dtype(&self) -> Dtype {
        match self {
            Self::Bf16(_) => Dtype::Bf16,
            Self::F32(_) => Dtype::F32,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Bf16(elements) => elements.len(),
            Self::F32(elements) => elements.len(),
        }
    }
}

impl Output<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Bf16(elements) => elements.len(),
            Self::F32(elements) => elements.len(),
        }
    }
}

/// Why a dense layer refuses its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinearError {
    /// A weight without rows or columns.
    EmptyWeight,
    /// More bytes than an address can name.
    TooLarge,
    /// As many biases as outputs are needed.
    BiasLength {
        /// Biases given.
        given: usize,
        /// Outputs.
        needed: usize,
    },
    /// The activations are not of the weight's dtype, or the output of neither that nor f32.
    DtypeMismatch,
    /// A row stride shorter than a row.
    Stride {
        /// Which argument.
        argument: &'static str,
        /// The stride, in elements.
        stride: usize,
        /// A row's elements.
        row: usize,
    },
    /// Fewer elements than the rows take.
    TooShort {
        /// Which argument.
        argument: &'static str,
        /// Elements given.
        given: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A token id outside the embedding.
    TokenId {
        /// The id.
        id: i32,
        /// Rows of the embedding.
        rows: usize,
    },
}

impl fmt::Display for LinearError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyWeight => formatter.write_str("the weight has no rows or no columns"),
            Self::TooLarge => formatter.write_str("the weight is larger than the address space"),
            Self::BiasLength { given, needed } => {
                write!(formatter, "bias has {given} elements; the layer has {needed} outputs")
            }
            Self::DtypeMismatch => {
                formatter.write_str("x must have the weight's dtype, and out that dtype or float32")
            }
            Self::Stride { argument, stride, row } => {
                write!(formatter, "{argument}_stride {stride} is less than a row's {row} elements")
            }
            Self::TooShort { argument, given, needed } => {
                write!(formatter, "{argument} has {given} elements; {needed} are needed")
            }
            Self::TokenId { id, rows } => {
                write!(formatter, "token id {id} is outside the embedding's {rows} rows")
            }
        }
    }
}

impl std::error::Error for LinearError {}

/// A weight `[n, k]`, packed.
pub struct Linear {
    n: usize,
    k: usize,
    dtype: Dtype,
    words: Words,
    /// Padded with zeros to whole panels; empty without a bias.
    bias: Vec<f32>,
}

impl fmt::Debug for Linear {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("Linear");
        fields.field("n", &self.n).field("k", &self.k).field("dtype", &self.dtype);
        fields.field("bias", &!self.bias.is_empty()).finish_non_exhaustive()
    }
}

impl Linear {
    /// Pack parts stacked along n; they are read in parallel and not needed afterwards.
    ///
    /// # Errors
    /// Nothing to pack, too much, or a bias of another length than n.
    pub fn new(
        parts: &[Part<'_>],
        k: usize,
        dtype: Dtype,
        bias: Option<&[f32]>,
    ) -> Result<Self, LinearError> {
        let rows = parts.iter().try_fold(0_usize, |rows, part| rows.checked_add(part.rows));
        let n = rows.ok_or(LinearError::TooLarge)?;
        if n == 0 || k == 0 {
            return Err(LinearError::EmptyWeight);
        }
        let padded = n.checked_next_multiple_of(PANEL).ok_or(LinearError::TooLarge)?;
        let len = padded.checked_mul(k.div_ceil(dtype.per_word()));
        let len = len.filter(|&len| len < isize::MAX as usize / 16).ok_or(LinearError::TooLarge)?;
        let bias = match bias {
            Some(bias) if bias.len() != n => {
                return Err(LinearError::BiasLength { given: bias.len(), needed: n });
            }
            Some(bias) => [bias, &vec![0.0; padded - n]].concat(),
            None => Vec::new(),
        };
        let mut words = Words::zeroed(len);
        pack::pack(parts, k, dtype, &mut words);
        Ok(Self { n, k, dtype, words, bias })
    }

    /// Outputs.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Of the weight and the activations.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Memory held.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        (self.words.len() + self.bias.len()) * 4
    }

    /// Words of a panel's column.
    fn steps(&self) -> usize {
        self.k.div_ceil(self.dtype.per_word())
    }

    /// `out[rows, n] = x[rows, k] · weightᵀ + bias`; strides are elements from row to row.
    ///
    /// # Errors
    /// Dtypes, strides or lengths that do not fit.
    pub fn forward(
        &self,
        x: Input<'_>,
        x_stride: usize,
        out: Output<'_>,
        out_stride: usize,
        rows: usize,
    ) -> Result<(), LinearError> {
        self.forward_with(isa(), x, x_stride, out, out_stride, rows)
    }

    fn forward_with(
        &self,
        isa: Isa,
        x: Input<'_>,
        x_stride: usize,
        out: Output<'_>,
        out_stride: usize,
        rows: usize,
    ) -> Result<(), LinearError> {
        let out_fits = matches!(out, Output::F32(_)) || self.dtype == Dtype::Bf16;
        if x.dtype() != self.dtype || !out_fits {
            return Err(LinearError::DtypeMismatch);
        }
        check_rows("x", x.len(), x_stride, self.k, rows)?;
        check_rows("out", out.len(), out_stride, self.n, rows)?;
        if rows == 0 {
            return Ok(());
        }
        match x {
            // A pair must not reach into the next row, whose infinities times the zero beside them would be NaN.
            Input::Bf16(x) if !self.k.is_multiple_of(2) => {
                let padded = pad_rows(x, x_stride, self.k, rows);
                kernel::run(self, isa, Input::Bf16(&padded), self.k + 1, out, out_stride, rows);
            }
            _ => kernel::run(self, isa, x, x_stride, out, out_stride, rows),
        }
        Ok(())
    }

    /// `out[i] = weight[ids[i]]`: the rows of a tied embedding.
    ///
    /// # Errors
    /// An id outside n (nothing is written then), another dtype, or an output of another length.
    pub fn embed(&self, ids: &[i32], out: Output<'_>) -> Result<(), LinearError> {
        let outside = |&&id: &&i32| usize::try_from(id).map_or(true, |id| id >= self.n);
        if let Some(&id) = ids.iter().find(outside) {
            return Err(LinearError::TokenId { id, rows: self.n });
        }
        check_rows("out", out.len(), self.k, self.k, ids.len())?;
        match (self.dtype, out) {
            (Dtype::Bf16, Output::Bf16(out)) => self.gather(ids, out, |word, pair| {
                for (half, element) in pair.iter_mut().enumerate() {
                    *element = bf16::from_bits((word >> (16 * half)) as u16);
                }
            }),
            (Dtype::F32, Output::F32(out)) => {
                self.gather(ids, out, |word, one| one[0] = f32::from_bits(word));
            }
            _ => return Err(LinearError::DtypeMismatch),
        }
        Ok(())
    }

    fn gather<T: Send>(&self, ids: &[i32], out: &mut [T], unpack: impl Fn(u32, &mut [T]) + Sync) {
        let steps = self.steps();
        let copy = |id: i32, row: &mut [T]| {
            let id = id as usize;
            let column = &self.words[id / PANEL * PANEL * steps + id % PANEL..];
            let words = column.iter().step_by(PANEL);
            for (&word, elements) in words.zip(row.chunks_mut(self.dtype.per_word())) {
                unpack(word, elements);
            }
        };
        pack::for_each_chunk(out, self.k, &|index, row| {
            if let Some(&id) = ids.get(index) {
                copy(id, row);
            }
        });
    }
}

/// Whether `rows` rows lie within `given` elements.
fn check_rows(
    argument: &'static str,
    given: usize,
    stride: usize,
    row: usize,
    rows: usize,
) -> Result<(), LinearError> {
    if rows == 0 {
        return Ok(());
    }
    if stride < row {
        return Err(LinearError::Stride { argument, stride, row });
    }
    let needed = (rows - 1).saturating_mul(stride).saturating_add(row);
    if given < needed {
        return Err(LinearError::TooShort { argument, given, needed });
    }
    Ok(())
}

/// The rows, one after another, each with a zero behind it.
fn pad_rows(x: &[bf16], stride: usize, k: usize, rows: usize) -> Vec<bf16> {
    let mut padded = vec![bf16::ZERO; rows * (k + 1)];
    for (to, from) in padded.chunks_mut(k + 1).zip(x.chunks(stride)) {
        to[..k].copy_from_slice(&from[..k]);
    }
    padded
}

#[cfg(test)]
mod tests;
