//! Bytes of a header, counted, and never more asked for than the file has.

use std::io::{ErrorKind, Read};

use crate::Error;

/// The longest header there can be: many times that of any real model, and short enough to be read in a moment.
const LONGEST_HEADER: u64 = 128 << 20;
/// A length found in the file is believed this many bytes at a time.
const STEP: u64 = 1 << 16;

pub(super) struct Source<R> {
    reader: R,
    position: u64,
    file_len: u64,
}

impl<R: Read> Source<R> {
    pub(super) fn new(reader: R, file_len: u64) -> Self {
        Self { reader, position: 0, file_len }
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    pub(super) fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Bytes that a header may still take.
    pub(super) fn remaining(&self) -> u64 {
        self.file_len.min(LONGEST_HEADER).saturating_sub(self.position)
    }

    /// Fails where `len` bytes cannot follow.
    pub(super) fn check(&self, len: u64) -> Result<(), Error> {
        if len <= self.remaining() {
            return Ok(());
        }
        let left = self.file_len.saturating_sub(self.position);
        let what = if len > left {
            format!(
                "{len} bytes are needed here, but the file ends after {left}; it may be cut short"
            )
        } else {
            format!("the header is longer than {} MiB", LONGEST_HEADER >> 20)
        };
        Err(Error::corrupt(self.position, what))
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        self.check(N as u64)?;
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Append the next `len` bytes to `out`.
    pub(super) fn read_to(&mut self, len: u64, out: &mut Vec<u8>) -> Result<(), Error> {
        self.check(len)?;
        let mut left = len;
        while left > 0 {
            let step = left.min(STEP);
            let start = out.len();
            out.resize(start + step as usize, 0);
            self.fill(&mut out[start..])?;
            left -= step;
        }
        Ok(())
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.reader.read_exact(bytes).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => {
                Error::corrupt(self.position, "the file ended while it was read")
            }
            _ => Error::Io(error),
        })?;
        self.position += bytes.len() as u64;
        Ok(())
    }
}
