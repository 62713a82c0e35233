//! Memory that Python hands over as an address: the checks that can be made, and the slices.
#![allow(unsafe_code, reason = "this module is where addresses become memory")]

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Plain numbers: every bit pattern is a value, so memory of them may come from anywhere.
///
/// # Safety
///
/// Only for types without padding and without invalid bit patterns.
pub(crate) unsafe trait Number: Copy {}

// SAFETY: integers and floats of any width have neither padding nor invalid bit patterns.
unsafe impl Number for u8 {}
// SAFETY: as above.
unsafe impl Number for u16 {}
// SAFETY: as above.
unsafe impl Number for i32 {}
// SAFETY: as above.
unsafe impl Number for u32 {}
// SAFETY: as above.
unsafe impl Number for f32 {}
// SAFETY: as above.
unsafe impl Number for half::bf16 {}

/// `len` elements at `address`, after the checks that can be made; an empty slice needs no memory.
fn check<T>(address: usize, len: usize) -> PyResult<*mut T> {
    if len == 0 {
        return Ok(std::ptr::dangling_mut());
    }
    let fault = if address == 0 {
        "is null"
    } else if !address.is_multiple_of(align_of::<T>()) {
        "is not aligned to its elements"
    } else if len
        .checked_mul(size_of::<T>())
        .is_none_or(|bytes| bytes > isize::MAX as usize || address.checked_add(bytes).is_none())
    {
        "and length leave the address space"
    } else {
        return Ok(std::ptr::with_exposed_provenance_mut(address));
    };
    Err(PyValueError::new_err(format!("the pointer {address:#x} of {len} elements {fault}")))
}

/// Read `len` elements at `address`.
///
/// # Safety
///
/// The memory is there, initialized, and neither freed nor written to while the slice lives.
///
/// # Errors
///
/// `ValueError` where the address is null or not aligned, or the length overflows.
pub(crate) unsafe fn slice<'a, T: Number>(address: usize, len: usize) -> PyResult<&'a [T]> {
    let start = check::<T>(address, len)?;
    // SAFETY: not null, aligned and within the address space (checked); the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(start, len) })
}

/// Write `len` elements at `address`.
///
/// # Safety
///
/// The memory is there, initialized, not freed while the slice lives, and nothing else reads or writes it meanwhile.
///
/// # Errors
///
/// `ValueError` where the address is null or not aligned, or the length overflows.
pub(crate) unsafe fn slice_mut<'a, T: Number>(address: usize, len: usize) -> PyResult<&'a mut [T]> {
    let start = check::<T>(address, len)?;
    // SAFETY: not null, aligned and within the address space (checked); the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(start, len) })
}
