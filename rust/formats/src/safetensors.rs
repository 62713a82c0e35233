//! safetensors headers.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::io::{ErrorKind, Read};

use ::safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::value::{Error as DtypeError, StrDeserializer};
use serde::de::{IntoDeserializer, MapAccess, Visitor};

pub use ::safetensors::Dtype;

use crate::tensor::in_file_order;
use crate::{Error, Tensor};

/// The limit that the format's own library sets.
const LONGEST_HEADER: u64 = 100_000_000;
const LEN_BYTES: u64 = 8;
const METADATA_KEY: &str = "__metadata__";

/// What a safetensors file says about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The free-form metadata in the file's order; keys are unique.
    pub metadata: Vec<(String, String)>,
    /// The tensors in the order of their data, which fills the rest of the file without a gap.
    pub tensors: Vec<Tensor<Dtype>>,
}

/// Read the header of a safetensors file of `file_len` bytes.
///
/// # Errors
///
/// [`Error::Corrupt`] for anything that does not hold together; [`Error::Unsupported`] for a dtype that is not known.
pub fn read(mut reader: impl Read, file_len: u64) -> Result<Header, Error> {
    let data = read_len(&mut reader, file_len)?;
    let mut json = Vec::new();
    // `take` and not a buffer of the announced length: memory grows with what is really there.
    reader.take(data - LEN_BYTES).read_to_end(&mut json)?;
    if (json.len() as u64) < data - LEN_BYTES {
        return Err(Error::corrupt(LEN_BYTES, "the file ended while it was read"));
    }
    let raw: RawHeader =
        serde_json::from_slice(&json).map_err(|error| json_error(&error, &json))?;
    let tensors = raw
        .tensors
        .into_iter()
        .map(|(name, tensor)| {
            tensor.check(&name, data, file_len).map_err(|error| error.in_tensor(&name))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let tensors: Vec<_> = in_file_order(&tensors)?.into_iter().cloned().collect();
    check_gaps(&tensors, data, file_len)?;
    check_with_library(&tensors, data)?;
    Ok(Header { metadata: raw.metadata, tensors })
}

/// Where the data begins.
fn read_len(reader: &mut impl Read, file_len: u64) -> Result<u64, Error> {
    let mut bytes = [0; LEN_BYTES as usize];
    reader.read_exact(&mut bytes).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => {
            Error::corrupt(0, "shorter than the 8 bytes of the header's length")
        }
        _ => Error::Io(error),
    })?;
    let len = u64::from_le_bytes(bytes);
    let room = file_len.saturating_sub(LEN_BYTES);
    if len > room {
        let what = format!(
            "a header of {len} bytes does not fit a file of {file_len}; it may be cut short, or not a safetensors file"
        );
        return Err(Error::corrupt(0, what));
    }
    if len > LONGEST_HEADER {
        return Err(Error::corrupt(
            0,
            format!("a header of {len} bytes is too long; the limit is {LONGEST_HEADER}"),
        ));
    }
    Ok(LEN_BYTES + len)
}

fn json_error(error: &serde_json::Error, json: &[u8]) -> Error {
    let lines = json.split_inclusive(|&byte| byte == b'\n').take(error.line().saturating_sub(1));
    let before: usize = lines.map(<[u8]>::len).sum::<usize>() + error.column().saturating_sub(1);
    let mut what = error.to_string();
    // Our own offset is in the file.
    what.truncate(what.find(" at line ").unwrap_or(what.len()));
    Error::corrupt(LEN_BYTES + before as u64, format!("the JSON of the header: {what}"))
}

fn check_gaps(tensors: &[Tensor<Dtype>], data: u64, file_len: u64) -> Result<(), Error> {
    let mut end = data;
    for tensor in tensors {
        if tensor.offset != end {
            let what = format!("{} bytes before its data belong to no tensor", tensor.offset - end);
            return Err(Error::corrupt(end, what).in_tensor(&tensor.name));
        }
        end += tensor.num_bytes;
    }
    if end == file_len {
        return Ok(());
    }
    Err(Error::corrupt(
        end,
        format!("{} bytes at the file's end belong to no tensor", file_len - end),
    ))
}

/// The last word on what is a valid file has the format's own library.
fn check_with_library(tensors: &[Tensor<Dtype>], data: u64) -> Result<(), Error> {
    let infos = tensors.iter().map(|tensor| {
        let start = (tensor.offset - data) as usize;
        let shape = tensor.shape.iter().map(|&n| n as usize).collect();
        let data_offsets = (start, start + tensor.num_bytes as usize);
        (tensor.name.clone(), TensorInfo { dtype: tensor.dtype, shape, data_offsets })
    });
    match Metadata::new(None, infos.collect()) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::corrupt(LEN_BYTES, error.to_string())),
    }
}

#[derive(Deserialize)]
struct RawTensor<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawTensor<'_> {
    fn check(self, name: &str, data: u64, file_len: u64) -> Result<Tensor<Dtype>, Error> {
        let Self { dtype, shape, data_offsets: (start, end) } = self;
        let name = name.to_owned();
        let deserializer: StrDeserializer<'_, DtypeError> = dtype.as_ref().into_deserializer();
        let Ok(dtype) = Dtype::deserialize(deserializer) else {
            return Err(Error::unsupported(LEN_BYTES, format!("the dtype {dtype:?} is not known")));
        };
        if start > end || end > file_len - data {
            let what = format!(
                "its data_offsets [{start}, {end}] lie outside the {} bytes of data",
                file_len - data
            );
            return Err(Error::corrupt(data.saturating_add(start), what));
        }
        let bits =
            shape.iter().try_fold(dtype.bitsize() as u64, |product, &n| product.checked_mul(n));
        if bits.is_none_or(|bits| bits % 8 != 0 || bits / 8 != end - start) {
            let what = format!(
                "{dtype} {shape:?} does not take the {} bytes of its data_offsets",
                end - start
            );
            return Err(Error::corrupt(data + start, what));
        }
        Ok(Tensor { name, dtype, shape, offset: data + start, num_bytes: end - start })
    }
}

/// The header's JSON in its order, refusing names that are there twice (which a map would hide).
#[derive(Default)]
struct RawHeader<'a> {
    metadata: Vec<(String, String)>,
    tensors: Vec<(String, RawTensor<'a>)>,
}

impl<'de> Deserialize<'de> for RawHeader<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut header = RawHeader::default();
        let mut names = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(twice(&name));
            }
            if name == METADATA_KEY {
                header.metadata = map.next_value::<UniqueStrings>()?.0;
            } else {
                let tensor = map.next_value()?;
                header.tensors.push((name, tensor));
            }
        }
        Ok(header)
    }
}

fn twice<E: serde::de::Error>(name: &str) -> E {
    E::custom(format_args!("{} is there twice", crate::error::Quoted(name)))
}

/// A map of strings, in its order.
struct UniqueStrings(Vec<(String, String)>);

impl<'de> Deserialize<'de> for UniqueStrings {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringsVisitor;

        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = UniqueStrings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut strings = Vec::new();
                let mut keys = BTreeSet::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if !keys.insert(key.clone()) {
                        return Err(twice(&key));
                    }
                    strings.push((key, value));
                }
                Ok(UniqueStrings(strings))
            }
        }

        deserializer.deserialize_map(StringsVisitor)
    }
}
