//! Token id to bytes.

use super::TextStream;

const SPECIAL: u8 = 1;

/// The bytes each token id stands for, packed; one table serves every sequence of an engine.
#[derive(Clone, Debug)]
pub struct TokenTable {
    bytes: Box<[u8]>,
    /// `starts[id]..starts[id + 1]` are the bytes of `id`.
    starts: Box<[usize]>,
    flags: Box<[u8]>,
    drop_leading_space: bool,
}

impl TokenTable {
    /// A table of tokens in the order of their ids; `flags` has a byte a token, bit 0 of which marks a special
    /// (control) token.
    ///
    /// `drop_leading_space`: an answer's very first space is dropped, as `SentencePiece` decoders do.
    pub fn new(
        tokens: impl IntoIterator<Item = impl AsRef<[u8]>>,
        flags: &[u8],
        drop_leading_space: bool,
    ) -> Self {
        let mut bytes = Vec::new();
        let mut starts = vec![0];
        for token in tokens {
            bytes.extend_from_slice(token.as_ref());
            starts.push(bytes.len());
        }
        Self { bytes: bytes.into(), starts: starts.into(), flags: flags.into(), drop_leading_space }
    }

    /// Number of ids.
    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// True when the table is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of a token; empty for an id past the end, which a model's padded vocabulary can produce.
    #[must_use]
    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match self.starts.get(id..).and_then(|starts| starts.get(..2)) {
            Some(&[start, end]) => &self.bytes[start..end],
            _ => &[],
        }
    }

    /// True of a special (control) token.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.flags.get(id as usize).is_some_and(|flags| flags & SPECIAL != 0)
    }

    /// True when an answer's very first space is dropped.
    #[must_use]
    pub fn drops_leading_space(&self) -> bool {
        self.drop_leading_space
    }

    /// True when any of the tokens stands for text.
    #[must_use]
    pub fn has_text(&self, tokens: &[u32], skip_special: bool) -> bool {
        let skipped = |token| skip_special && self.is_special(token);
        tokens.iter().any(|&token| !skipped(token) && !self.bytes(token).is_empty())
    }

    /// The UTF-8 text of a whole answer without stop texts.
    #[must_use]
    pub fn decode(&self, tokens: impl IntoIterator<Item = u32>, skip_special: bool) -> Vec<u8> {
        let mut stream = TextStream::new(Vec::new(), false, skip_special);
        let mut text = Vec::new();
        for token in tokens {
            stream.push(self, token, false, &mut text);
        }
        stream.finish(&mut text);
        text
    }
}
