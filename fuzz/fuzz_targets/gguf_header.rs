//! Any bytes as a GGUF file: a header whose tensors lie in the file side by side, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octavo_formats::gguf;

fuzz_target!(|bytes: &[u8]| {
    let file_len = bytes.len() as u64;
    // Lengths found in a file that says it is long must not be believed either.
    let _ = gguf::read(bytes, u64::MAX);
    let Ok(header) = gguf::read(bytes, file_len) else { return };
    let mut ends: Vec<_> =
        header.tensors.iter().map(|t| (t.offset, t.offset + t.num_bytes)).collect();
    ends.sort_unstable();
    assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    assert!(ends.last().is_none_or(|(_, end)| *end <= file_len));
});
