//! Arguments with raw pointers that cross into the pool's threads.
#![allow(unsafe_code, reason = "tells the compiler what it cannot know of raw pointers")]

/// What all items of a loop read; each item writes only its own part of what the pointers lead to.
pub(crate) struct Shared<T>(T);

// SAFETY: the kernels' items write disjoint memory, and whoever starts the loop keeps it alive.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(value)
    }

    /// Through a method, so that a closure captures the whole and not the field.
    pub(crate) fn get(&self) -> &T {
        &self.0
    }
}
