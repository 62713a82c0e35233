//! safetensors headers, against files that the format's own library writes.

use octavo_formats::safetensors::{Dtype, read};
use octavo_formats::{Error, Place};
use proptest::prelude::*;

fn file(json: &str, data: usize) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

#[allow(clippy::unwrap_used, reason = "what a test is made of")]
fn library_file() -> Vec<u8> {
    let bytes = [7; 96];
    let views = [
        ("w", Dtype::BF16, vec![3, 4], 24),
        ("empty", Dtype::F32, vec![0, 5], 0),
        ("s", Dtype::F64, vec![], 8),
    ];
    let views = views.map(|(name, dtype, shape, len)| {
        (name, safetensors::tensor::TensorView::new(dtype, shape, &bytes[..len]).unwrap())
    });
    let metadata = std::iter::once(("format".to_owned(), "pt".to_owned())).collect();
    safetensors::serialize(views, Some(metadata)).unwrap()
}

#[test]
fn a_header_says_what_the_library_wrote() {
    let bytes = library_file();
    let header = read(&bytes[..], bytes.len() as u64).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(header.metadata, [("format".to_owned(), "pt".to_owned())]);
    assert_eq!(header.tensors.len(), 3);
    for tensor in header.tensors {
        let view = theirs.tensor(&tensor.name).unwrap();
        assert_eq!(tensor.dtype, view.dtype());
        assert_eq!(tensor.shape, view.shape().iter().map(|&n| n as u64).collect::<Vec<_>>());
        let data = &bytes[tensor.offset as usize..][..tensor.num_bytes as usize];
        assert_eq!(data.len(), view.data().len());
        assert!(data.is_empty() || std::ptr::eq(data, view.data()));
    }
}

#[test]
fn an_error_names_the_tensor_and_the_fault() {
    let entry = |name: &str, dtype: &str, offsets: &str| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":[2],"data_offsets":{offsets}}}"#)
    };
    let fault = |json: &str, data: usize| {
        let bytes = file(json, data);
        match read(&bytes[..], bytes.len() as u64) {
            Err(Error::Corrupt(fault) | Error::Unsupported(fault)) => fault,
            other => panic!("{other:?}"),
        }
    };
    let json = format!("{{{},{}}}", entry("a", "F32", "[0,8]"), entry("b", "F32", "[4,12]"));
    let overlap = fault(&json, 12);
    assert_eq!(overlap.place, Place::Tensor("b".into()));
    assert_eq!(overlap.offset, 8 + json.len() as u64 + 4);
    assert_eq!(overlap.what, "its data overlaps that of tensor \"a\"");
    let twice =
        fault(&format!("{{{},{}}}", entry("a", "F32", "[0,8]"), entry("a", "F32", "[8,16]")), 16);
    assert!(twice.what.contains("\"a\" is there twice"), "{twice}");
    let unknown = fault(&format!("{{{}}}", entry("a", "F128", "[0,8]")), 8);
    assert_eq!(unknown.what, "the dtype \"F128\" is not known");
    let hole = fault(&format!("{{{}}}", entry("a", "F32", "[4,12]")), 12);
    assert_eq!(hole.what, "4 bytes before its data belong to no tensor");
    let json = fault("{\"a\":\n [}", 0);
    assert_eq!((json.place, json.offset), (Place::Header, 8 + 8));
}

#[test]
fn every_shorter_file_is_refused() {
    let bytes = library_file();
    for len in 0..bytes.len() {
        assert!(matches!(read(&bytes[..len], len as u64), Err(Error::Corrupt(_))), "cut to {len}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_is_accepted_the_library_accepts(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = library_file();
        for (index, byte) in changes {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(header) = read(&bytes[..], bytes.len() as u64) {
            let theirs = safetensors::SafeTensors::deserialize(&bytes);
            prop_assert_eq!(header.tensors.len(), theirs.unwrap().len());
        }
    }
}
