//! Memory for packed weights: zeroed words on 64-byte lines, cut from large slabs that ask for huge pages, so that
//! streaming through a model's weights misses few translations and many small weights waste none.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

const HUGE_PAGE: usize = 2 << 20;
const SLAB: usize = 32 << 20;
/// A weight this large has a slab of its own.
const LARGE: usize = 8 << 20;
const LINE: usize = 64;

/// The slab that small weights are cut from, and how much of it is taken.
static CURRENT: Mutex<(Weak<Slab>, usize)> = Mutex::new((Weak::new(), 0));

struct Slab {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the slab itself never reads or writes its memory.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    fn new(bytes: usize) -> Arc<Self> {
        let size = bytes.next_multiple_of(HUGE_PAGE);
        let Ok(layout) = Layout::from_size_align(size, HUGE_PAGE) else {
            panic!("a weight of {bytes} bytes does not fit in the address space")
        };
        // SAFETY: the size is not zero: `Words` asks for at least a line.
        let Some(base) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
        advise_huge_pages(base, size);
        Arc::new(Self { base, layout })
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; every `Words` in it holds the slab, so none is left.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(base: NonNull<u8>, size: usize) {
    use std::ffi::{c_int, c_void};
    unsafe extern "C" {
        fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
    }
    const MADV_HUGEPAGE: c_int = 14;
    // SAFETY: the range was just allocated, whole pages of it; the advice changes no content, and a refusal is no loss.
    unsafe { madvise(base.as_ptr().cast(), size, MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_base: NonNull<u8>, _size: usize) {}

/// Zeroed 32-bit words on a 64-byte line.
pub(super) struct Words {
    start: NonNull<u32>,
    len: usize,
    /// Keeps the memory.
    _slab: Arc<Slab>,
}

// SAFETY: `Words` owns its range of the slab alone, as a vector does.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    pub(super) fn zeroed(len: usize) -> Self {
        let bytes = (len * size_of::<u32>()).next_multiple_of(LINE).max(LINE);
        let (slab, offset) = if bytes >= LARGE { (Slab::new(bytes), 0) } else { cut(bytes) };
        // SAFETY: `offset + bytes` lies within the slab, and no other `Words` has that range.
        let start = unsafe {
            let start = slab.base.add(offset);
            start.write_bytes(0, bytes);
            start.cast()
        };
        Self { start, len, _slab: slab }
    }
}

/// A range of the current slab, or of a new one where it is full.
fn cut(bytes: usize) -> (Arc<Slab>, usize) {
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(slab) = current.0.upgrade()
        && current.1 + bytes <= slab.layout.size()
    {
        let offset = current.1;
        current.1 += bytes;
        return (slab, offset);
    }
    let slab = Slab::new(SLAB);
    *current = (Arc::downgrade(&slab), bytes);
    (slab, 0)
}

impl Deref for Words {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        // SAFETY: `len` initialised words, owned.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Words {
    fn deref_mut(&mut self) -> &mut [u32] {
        // SAFETY: `len` initialised words, owned and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_zeroed_aligned_and_apart() {
        let mut all: Vec<Words> = Vec::new();
        for (index, len) in [1, 15, 16, 17, 1000, 3 << 20, 1 << 20, 7 << 20].into_iter().enumerate()
        {
            let mut words = Words::zeroed(len);
            assert_eq!(words.len(), len);
            assert_eq!(words.as_ptr() as usize % LINE, 0);
            assert!(words.iter().all(|&word| word == 0));
            words.fill(index as u32 + 1);
            all.push(words);
        }
        for (index, words) in all.iter().enumerate() {
            assert!(words.iter().all(|&word| word == index as u32 + 1));
        }
    }

    #[test]
    fn memory_that_is_given_back_comes_zeroed_again() {
        for _ in 0..3 {
            let mut words = Words::zeroed(1 << 16);
            assert!(words.iter().all(|&word| word == 0));
            words.fill(u32::MAX);
        }
    }
}
