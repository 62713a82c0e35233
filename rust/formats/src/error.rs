//! What can be wrong with a model file.

use std::{fmt, io};

/// Why a header was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file contradicts itself, is cut short, or is no file of this format.
    #[error("{0}")]
    Corrupt(Fault),
    /// The file is of a version or uses a feature that is not read here.
    #[error("{0}")]
    Unsupported(Fault),
    /// The file could not be read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Where in a file what is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The part of the file.
    pub place: Place,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// What is wrong there.
    pub what: String,
}

/// A part of a model file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The header as a whole.
    Header,
    /// A metadata entry, by key.
    Metadata(String),
    /// A tensor, by name.
    Tensor(String),
}

impl Error {
    pub(crate) fn corrupt(offset: u64, what: impl Into<String>) -> Self {
        Self::Corrupt(Fault { place: Place::Header, offset, what: what.into() })
    }

    pub(crate) fn unsupported(offset: u64, what: impl Into<String>) -> Self {
        Self::Unsupported(Fault { place: Place::Header, offset, what: what.into() })
    }

    pub(crate) fn in_metadata(self, key: &str) -> Self {
        self.placed(|| Place::Metadata(key.to_owned()))
    }

    pub(crate) fn in_tensor(self, name: &str) -> Self {
        self.placed(|| Place::Tensor(name.to_owned()))
    }

    fn placed(mut self, place: impl FnOnce() -> Place) -> Self {
        if let Self::Corrupt(fault) | Self::Unsupported(fault) = &mut self {
            fault.place = place();
        }
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (byte {}): {}", self.place, self.offset, self.what)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("header"),
            Self::Metadata(key) => write!(f, "metadata {}", Quoted(key)),
            Self::Tensor(name) => write!(f, "tensor {}", Quoted(name)),
        }
    }
}

/// A name from an untrusted file: escaped, and cut where it is long.
pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 120;
        match self.0.char_indices().nth(LONGEST) {
            Some((end, _)) => write!(f, "{:?}...", &self.0[..end]),
            None => write!(f, "{:?}", self.0),
        }
    }
}
