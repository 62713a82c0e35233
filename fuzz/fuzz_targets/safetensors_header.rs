//! Any bytes as a safetensors file: a header that the format's own library accepts too, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octavo_formats::safetensors;

fuzz_target!(|bytes: &[u8]| {
    let file_len = bytes.len() as u64;
    let _ = safetensors::read(bytes, u64::MAX);
    let Ok(header) = safetensors::read(bytes, file_len) else { return };
    let mut end = file_len - header.tensors.iter().map(|t| t.num_bytes).sum::<u64>();
    for tensor in &header.tensors {
        assert_eq!(tensor.offset, end);
        end += tensor.num_bytes;
    }
    let theirs = ::safetensors::SafeTensors::deserialize(bytes)
        .expect("what we accept, the library accepts");
    assert_eq!(theirs.len(), header.tensors.len());
});
