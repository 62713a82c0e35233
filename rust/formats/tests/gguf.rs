//! GGUF headers: what a valid one says, and that no bytes at all make the reader panic or over-allocate.

use octavo_formats::gguf::{Array, Header, Value, read};
use octavo_formats::{Error, Kind, Place};
use proptest::prelude::*;

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&string(key)[..], &kind.to_le_bytes(), value].concat()
}

fn array(element: u32, count: u64, values: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &count.to_le_bytes(), values].concat()
}

fn tensor(name: &str, dims: &[u64], kind: Kind, offset: u64) -> Vec<u8> {
    let dims_bytes: Vec<u8> = dims.iter().flat_map(|n| n.to_le_bytes()).collect();
    [
        &string(name)[..],
        &(dims.len() as u32).to_le_bytes(),
        &dims_bytes,
        &kind.id().to_le_bytes(),
        &offset.to_le_bytes(),
    ]
    .concat()
}

/// A file with `data` bytes after its padded header.
fn file(version: u32, entries: &[Vec<u8>], tensors: &[Vec<u8>], data: usize) -> Vec<u8> {
    let mut file = b"GGUF".to_vec();
    file.extend(version.to_le_bytes());
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((entries.len() as u64).to_le_bytes());
    file.extend(entries.concat());
    file.extend(tensors.concat());
    file.resize(file.len().next_multiple_of(32) + data, 0);
    file
}

fn read_bytes(bytes: &[u8]) -> Result<Header, Error> {
    read(bytes, bytes.len() as u64)
}

fn small_file() -> Vec<u8> {
    let entries = [
        entry("general.architecture", 8, &string("llama")),
        entry("general.alignment", 4, &32u32.to_le_bytes()),
        entry("u8", 0, &[200]),
        entry("i8", 1, &[200]),
        entry("u16", 2, &60_000u16.to_le_bytes()),
        entry("i16", 3, &(-2i16).to_le_bytes()),
        entry("i32", 5, &(-3i32).to_le_bytes()),
        entry("f32", 6, &1e-5f32.to_le_bytes()),
        entry("bool", 7, &[1]),
        entry("u64", 10, &u64::MAX.to_le_bytes()),
        entry("i64", 11, &i64::MIN.to_le_bytes()),
        entry("f64", 12, &0.1f64.to_le_bytes()),
        entry("tokens", 9, &array(8, 3, &[string("a"), string(""), string("é中")].concat())),
        entry("types", 9, &array(5, 2, &[1i32.to_le_bytes(), (-1i32).to_le_bytes()].concat())),
        entry("flags", 9, &array(7, 2, &[0, 1])),
        entry("none", 9, &array(6, 0, &[])),
    ];
    let tensors = [tensor("a", &[64, 3], Kind::Q8_0, 0), tensor("b", &[5], Kind::F32, 224)];
    file(3, &entries, &tensors, 224 + 20)
}

#[test]
fn a_header_says_what_was_written() {
    let bytes = small_file();
    for version in [2u8, 3] {
        let mut bytes = bytes.clone();
        bytes[4] = version;
        let header = read_bytes(&bytes).unwrap();
        assert_eq!(header.version, u32::from(version));
        assert_eq!(header.get("general.architecture"), Some(&Value::String("llama".into())));
        assert_eq!(header.get("u8"), Some(&Value::U8(200)));
        assert_eq!(header.get("i8"), Some(&Value::I8(-56)));
        assert_eq!(header.get("u16"), Some(&Value::U16(60_000)));
        assert_eq!(header.get("i16"), Some(&Value::I16(-2)));
        assert_eq!(header.get("i32"), Some(&Value::I32(-3)));
        assert_eq!(header.get("f32"), Some(&Value::F32(1e-5)));
        assert_eq!(header.get("bool"), Some(&Value::Bool(true)));
        assert_eq!(header.get("u64"), Some(&Value::U64(u64::MAX)));
        assert_eq!(header.get("i64"), Some(&Value::I64(i64::MIN)));
        assert_eq!(header.get("f64"), Some(&Value::F64(0.1)));
        let Some(Value::Array(Array::String(tokens))) = header.get("tokens") else {
            panic!("no strings")
        };
        assert_eq!(tokens.iter().collect::<Vec<_>>(), ["a", "", "é中"]);
        assert_eq!(header.get("types"), Some(&Value::Array(Array::I32(vec![1, -1]))));
        assert_eq!(header.get("flags"), Some(&Value::Array(Array::Bool(vec![false, true]))));
        assert_eq!(header.get("none"), Some(&Value::Array(Array::F32(vec![]))));
        let [a, b] = &header.tensors[..] else { panic!("two tensors") };
        let data = bytes.len() as u64 - 244;
        assert_eq!((a.name.as_str(), a.dtype, &a.shape[..]), ("a", Kind::Q8_0, &[3, 64][..]));
        assert_eq!((a.offset, a.num_bytes), (data, 3 * 2 * 34));
        assert_eq!((b.offset, b.num_bytes), (data + 224, 20));
    }
}

#[test]
fn an_error_names_the_place_the_byte_and_the_fault() {
    let bytes = file(3, &[], &[tensor("w", &[33], Kind::Q8_0, 0)], 64);
    let Err(Error::Corrupt(fault)) = read_bytes(&bytes) else {
        panic!("rows of 33 are no whole blocks")
    };
    assert_eq!(fault.place, Place::Tensor("w".into()));
    assert_eq!(fault.offset, 24 + 9 + 4 + 8);
    assert_eq!(
        fault.to_string(),
        "tensor \"w\" (byte 45): rows of 33 are not whole blocks of 32 Q8_0"
    );
}

#[test]
fn every_shorter_file_is_refused() {
    let bytes = small_file();
    for len in 0..bytes.len() {
        assert!(matches!(read_bytes(&bytes[..len]), Err(Error::Corrupt(_))), "cut to {len}");
        // A file that shrinks while it is read.
        if len < bytes.len() - 244 - 31 {
            assert!(
                matches!(read(&bytes[..len], bytes.len() as u64), Err(Error::Corrupt(_))),
                "shrunk to {len}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn changed_bytes_give_a_header_that_holds_or_an_error(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = small_file();
        for (index, byte) in changes {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(header) = read_bytes(&bytes) {
            for tensor in header.tensors {
                prop_assert!(tensor.offset + tensor.num_bytes <= bytes.len() as u64);
            }
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(tail in proptest::collection::vec(any::<u8>(), 0..400)) {
        let bytes = [b"GGUF\x03\0\0\0".to_vec(), tail].concat();
        let _ = read(&bytes[..], u64::MAX);
        let _ = read_bytes(&bytes);
    }
}
