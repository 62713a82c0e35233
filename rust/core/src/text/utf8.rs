//! UTF-8 that arrives in pieces.

const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();

/// Turns pieces of bytes into whole characters, as decoding all of them at once would.
///
/// Each longest piece that could have begun a character but did not become one turns into one U+FFFD: what
/// `String::from_utf8_lossy` and Python's `bytes.decode("utf-8", "replace")` do.
#[derive(Clone, Debug, Default)]
pub(super) struct Decoder {
    /// The first `len` bytes are the begun character.
    begun: [u8; 4],
    len: usize,
}

impl Decoder {
    /// Append the characters that are complete after `bytes` to `out`.
    pub(super) fn push(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while self.len > 0 {
            let Some((&byte, rest)) = bytes.split_first() else { return };
            self.begun[self.len] = byte;
            match std::str::from_utf8(&self.begun[..=self.len]) {
                Ok(character) => {
                    out.extend_from_slice(character.as_bytes());
                    self.len = 0;
                    bytes = rest;
                }
                Err(error) if error.error_len().is_none() => {
                    self.len += 1;
                    bytes = rest;
                }
                // The byte does not belong to the begun character; it may begin the next.
                Err(_) => {
                    out.extend_from_slice(REPLACEMENT);
                    self.len = 0;
                }
            }
        }
        while let Err(error) = std::str::from_utf8(bytes) {
            let (valid, rest) = bytes.split_at(error.valid_up_to());
            out.extend_from_slice(valid);
            let Some(invalid) = error.error_len() else {
                self.begun[..rest.len()].copy_from_slice(rest);
                self.len = rest.len();
                return;
            };
            out.extend_from_slice(REPLACEMENT);
            bytes = &rest[invalid..];
        }
        out.extend_from_slice(bytes);
    }

    /// Nothing more comes: a begun character turns into U+FFFD.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        if self.len > 0 {
            out.extend_from_slice(REPLACEMENT);
            self.len = 0;
        }
    }
}
