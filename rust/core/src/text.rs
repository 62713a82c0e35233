//! Text from tokens, a token at a time.
//!
//! Tokens are bytes; characters and stop texts may span tokens. A [`TextStream`] releases text as soon as nothing
//! that may still come can change it: it holds back an incomplete character, and the longest end of the text that
//! could still become a stop text. Whatever the tokens, the released pieces are valid UTF-8 and together equal the
//! text decoded in one go.

mod stop_texts;
mod token_table;
mod utf8;

pub use token_table::TokenTable;

use stop_texts::StopTexts;
use utf8::Decoder;

/// The text of one answer.
///
/// Stop texts are sought in the decoded text. The match that is complete first ends the answer; of several that are
/// complete at the same byte, the longest does. That is decided by the text alone, however it is cut into tokens.
#[derive(Clone, Debug)]
pub struct TextStream {
    decoder: Decoder,
    stops: StopTexts,
    /// Decoded text that may still become a stop text.
    held: Vec<u8>,
    include_stop: bool,
    skip_special: bool,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Progress {
    /// No byte has come yet.
    Start,
    Running,
    Ended,
}

impl TextStream {
    /// A stream that ends at any of `stops`; an empty stop text never matches, and bytes that are no UTF-8 count as
    /// U+FFFD, as they do in the text.
    ///
    /// `include_stop` leaves the stop text in the output. `skip_special` leaves special tokens out.
    #[must_use]
    pub fn new(stops: Vec<Vec<u8>>, include_stop: bool, skip_special: bool) -> Self {
        Self {
            decoder: Decoder::default(),
            stops: StopTexts::new(stops),
            held: Vec::new(),
            include_stop,
            skip_special,
            progress: Progress::Start,
        }
    }

    /// The same stream, for an answer that continues a text: its first space is part of the text.
    #[must_use]
    pub fn continuing(mut self) -> Self {
        self.progress = Progress::Running;
        self
    }

    /// Take one more token and append to `out` what may be released: always whole characters.
    ///
    /// Returns the index of the stop text that ends the answer: the text is then cut off at the match, before it or
    /// after it, and later calls do nothing. Without `check_stops` a stop text that ends in this token is plain text;
    /// one that begins in it can still match later.
    pub fn push(
        &mut self,
        table: &TokenTable,
        token: u32,
        check_stops: bool,
        out: &mut Vec<u8>,
    ) -> Option<u32> {
        if self.progress == Progress::Ended || (self.skip_special && table.is_special(token)) {
            return None;
        }
        let mut bytes = table.bytes(token);
        if self.progress == Progress::Start && !bytes.is_empty() {
            self.progress = Progress::Running;
            if table.drops_leading_space() {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        if self.stops.is_empty() {
            self.decoder.push(bytes, out);
            return None;
        }
        let known = self.held.len();
        self.decoder.push(bytes, &mut self.held);
        if let Some(found) = self.stops.advance(&self.held[known..], check_stops) {
            let end = known + found.end;
            let cut = if self.include_stop { end } else { end - found.len };
            out.extend_from_slice(&self.held[..cut]);
            self.held.clear();
            self.progress = Progress::Ended;
            return Some(found.index);
        }
        let released = self.held.len() - self.stops.pending();
        out.extend_from_slice(&self.held[..released]);
        self.held.drain(..released);
        None
    }

    /// The answer has ended: append what was held back. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        if self.progress == Progress::Ended {
            return;
        }
        self.progress = Progress::Ended;
        out.append(&mut self.held);
        self.decoder.finish(out);
    }
}
