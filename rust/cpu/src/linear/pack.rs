//! From rows to panels.

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use half::bf16;

use super::{Dtype, PANEL, Part};
use crate::pool::parallel_for;

thread_local! {
    /// A row on its way, kept for the next one.
    static ROW: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Call `body(index, chunk)` on every chunk of `len` elements, in parallel.
pub(super) fn for_each_chunk<T: Send>(
    elements: &mut [T],
    len: usize,
    body: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    let chunks: Vec<_> = elements.chunks_mut(len).map(Mutex::new).collect();
    parallel_for(chunks.len(), &|index| {
        // Never contended: an index comes once.
        let mut chunk = chunks[index].lock().unwrap_or_else(PoisonError::into_inner);
        body(index, &mut chunk);
    });
}

/// Pack stacked parts into zeroed panels.
pub(super) fn pack(parts: &[Part<'_>], k: usize, dtype: Dtype, words: &mut [u32]) {
    let steps = k.div_ceil(dtype.per_word());
    let starts: Vec<_> = parts
        .iter()
        .scan(0, |next, part| Some(std::mem::replace(next, *next + part.rows)))
        .collect();
    for_each_chunk(words, PANEL * steps, &|panel, words| {
        ROW.with_borrow_mut(|row| {
            row.resize(k, 0.0);
            for column in 0..PANEL {
                let index = panel * PANEL + column;
                let part = starts.partition_point(|&start| start <= index) - 1;
                let within = index - starts[part];
                if within >= parts[part].rows {
                    break;
                }
                (parts[part].read_row)(within, row);
                pack_row(row, dtype, &mut words[column..]);
            }
            row.shrink_to(1 << 16);
        });
    });
}

/// One row into its column, which begins at the first word.
fn pack_row(row: &[f32], dtype: Dtype, column: &mut [u32]) {
    let words = column.iter_mut().step_by(PANEL);
    match dtype {
        Dtype::F32 => words.zip(row).for_each(|(word, value)| *word = value.to_bits()),
        Dtype::Bf16 => {
            let bits = |value: &f32| u32::from(bf16::from_f32(*value).to_bits());
            for (word, pair) in words.zip(row.chunks(2)) {
                *word = bits(&pair[0]) | pair.get(1).map_or(0, bits) << 16;
            }
        }
    }
}
