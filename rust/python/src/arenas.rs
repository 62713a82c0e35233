//! Plan arenas and result buffers: memory that Python owns (numpy arrays, torch tensors) and the core reads and writes.
//!
//! These are the only raw pointers of the core's binding. They are checked once, when they are attached.
#![allow(unsafe_code)]

use octavo_core::step::layout::NUM_ARENAS;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Int32 memory outside of Rust.
struct Region {
    pointer: *mut i32,
    len: usize,
}

/// The ring of arenas and the result buffer of each.
pub(crate) struct Arenas {
    plans: Vec<Region>,
    results: Vec<Region>,
    /// Keeps the memory alive.
    _owner: Py<PyAny>,
}

// SAFETY: the regions are plain memory that outlives this value (`_owner` holds it), and they are touched only through
// `&mut Arenas`, which one caller at a time can have.
unsafe impl Send for Arenas {}

impl Arenas {
    /// Check and keep (address, int32 elements) of each arena and result buffer.
    pub(crate) fn new(
        arenas: &[(usize, usize)],
        results: &[(usize, usize)],
        arena_len: usize,
        result_len: usize,
        owner: Py<PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            plans: regions("arenas", arenas, arena_len)?,
            results: regions("results", results, result_len)?,
            _owner: owner,
        })
    }

    /// An arena, to write.
    pub(crate) fn arena(&mut self, index: usize) -> &mut [i32] {
        let region = &self.plans[index];
        // SAFETY: `regions` checked that the address is not null, aligned to 4 bytes and that the region does not wrap;
        // `attach` documents that it is `len` int32 elements of live memory, which `_owner` keeps so. Every bit pattern
        // is an i32. The caller runs nothing that writes the arena while a plan is made (the ring is there for that),
        // and `&mut self` keeps a second slice from existing.
        unsafe { std::slice::from_raw_parts_mut(region.pointer, region.len) }
    }

    /// A result buffer, to read.
    pub(crate) fn result(&mut self, index: usize) -> &[i32] {
        let region = &self.results[index];
        // SAFETY: as in `arena`; the device has left its result before `commit` is called, so nothing writes meanwhile.
        unsafe { std::slice::from_raw_parts(region.pointer, region.len) }
    }
}

fn regions(name: &str, given: &[(usize, usize)], needed: usize) -> PyResult<Vec<Region>> {
    let refuse = |message: String| Err(PyValueError::new_err(format!("{name}: {message}")));
    if given.len() != NUM_ARENAS {
        return refuse(format!("{} given, but {NUM_ARENAS} are needed", given.len()));
    }
    for (i, &(address, len)) in given.iter().enumerate() {
        if len < needed {
            return refuse(format!("number {i} has {len} int32 elements, but {needed} are needed"));
        }
        if address == 0 || address % align_of::<i32>() != 0 {
            return refuse(format!("number {i} is not aligned to 4 bytes"));
        }
        let bytes =
            len.checked_mul(size_of::<i32>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        if bytes.and_then(|bytes| address.checked_add(bytes)).is_none() {
            return refuse(format!("number {i} ends past the address space"));
        }
    }
    Ok(given
        .iter()
        .map(|&(address, len)| Region {
            pointer: std::ptr::with_exposed_provenance_mut(address),
            len,
        })
        .collect())
}
