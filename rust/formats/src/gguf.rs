//! GGUF headers, versions 2 and 3.

mod source;
mod value;

use std::collections::BTreeSet;
use std::io::Read;

pub use value::{Array, Strings, Value};

use crate::tensor::in_file_order;
use crate::{Error, Kind, Tensor};
use source::Source;

const MAGIC: [u8; 4] = *b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u32 = 32;
const LONGEST_NAME: u64 = 65_535;
const MOST_DIMENSIONS: u32 = 4;
/// The fewest bytes a metadata entry can take (key length, type, value) and a tensor's (name length, dimensions,
/// type, offset).
const SMALLEST_ENTRY: u64 = 8 + 4 + 1;
const SMALLEST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// What a GGUF file says about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The metadata in the file's order; keys are unique.
    pub metadata: Vec<(String, Value)>,
    /// The tensors in the file's order.
    pub tensors: Vec<Tensor<Kind>>,
}

impl Header {
    /// The value of a metadata key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find_map(|(name, value)| (name == key).then_some(value))
    }
}

/// Read the header of a GGUF file of `file_len` bytes. Reads are small: give a buffered reader.
///
/// # Errors
///
/// [`Error::Corrupt`] for anything that does not hold together; [`Error::Unsupported`] for another version or byte
/// order, nested arrays, and tensor types that do not exist (any more).
pub fn read(reader: impl Read, file_len: u64) -> Result<Header, Error> {
    let mut source = Source::new(reader, file_len);
    if source.remaining() < 4 || source.array()? != MAGIC {
        return Err(Error::corrupt(0, "not a GGUF file: it does not begin with \"GGUF\""));
    }
    let version = read_version(&mut source)?;
    let num_tensors = read_count(&mut source, SMALLEST_TENSOR, "tensors")?;
    let num_entries = read_count(&mut source, SMALLEST_ENTRY, "metadata entries")?;
    let metadata = read_metadata(&mut source, num_entries)?;
    let alignment = read_alignment(&metadata)?;
    let tensors = read_tensors(&mut source, num_tensors, alignment)?;
    Ok(Header { version, metadata, tensors })
}

fn read_version(source: &mut Source<impl Read>) -> Result<u32, Error> {
    let offset = source.position();
    match u32::from_le_bytes(source.array()?) {
        version @ (2 | 3) => Ok(version),
        version if matches!(version.swap_bytes(), 1..=3) => Err(Error::unsupported(
            offset,
            "a big-endian GGUF file; convert the model to little-endian",
        )),
        version => Err(Error::unsupported(
            offset,
            format!("GGUF version {version}; versions 2 and 3 are read: convert the model again"),
        )),
    }
}

/// A count of things that take at least `smallest` bytes each.
fn read_count(source: &mut Source<impl Read>, smallest: u64, what: &str) -> Result<u64, Error> {
    let offset = source.position();
    let count = u64::from_le_bytes(source.array()?);
    if count > source.remaining() / smallest {
        return Err(Error::corrupt(
            offset,
            format!("{count} {what} do not fit in the {} bytes that follow", source.remaining()),
        ));
    }
    Ok(count)
}

fn read_metadata(
    source: &mut Source<impl Read>,
    count: u64,
) -> Result<Vec<(String, Value)>, Error> {
    let mut metadata = Vec::new();
    let mut keys = BTreeSet::new();
    for _ in 0..count {
        let (offset, key) = read_name(source, "key")?;
        let value = value::read(source).map_err(|error| error.in_metadata(&key))?;
        if !keys.insert(key.clone()) {
            return Err(Error::corrupt(offset, "the key is there twice").in_metadata(&key));
        }
        metadata.push((key, value));
    }
    Ok(metadata)
}

/// A name that is not empty, and where it begins.
fn read_name(source: &mut Source<impl Read>, what: &str) -> Result<(u64, String), Error> {
    let offset = source.position();
    let len = u64::from_le_bytes(source.array()?);
    if len == 0 || len > LONGEST_NAME {
        return Err(Error::corrupt(
            offset,
            format!("a {what} of {len} bytes; the length must be 1 to {LONGEST_NAME}"),
        ));
    }
    let mut bytes = Vec::new();
    source.read_to(len, &mut bytes)?;
    match String::from_utf8(bytes) {
        Ok(name) => Ok((offset, name)),
        Err(_) => Err(Error::corrupt(offset, format!("a {what} that is not UTF-8"))),
    }
}

fn read_alignment(metadata: &[(String, Value)]) -> Result<u64, Error> {
    let value = metadata.iter().find_map(|(key, value)| (key == ALIGNMENT_KEY).then_some(value));
    match value {
        None => Ok(u64::from(DEFAULT_ALIGNMENT)),
        Some(Value::U32(alignment)) if alignment.is_power_of_two() => Ok(u64::from(*alignment)),
        Some(Value::U32(alignment)) => {
            Err(Error::corrupt(0, format!("{alignment} is not a power of two"))
                .in_metadata(ALIGNMENT_KEY))
        }
        Some(other) => {
            let what = format!("a u32 is needed, not {}", other.type_name());
            Err(Error::corrupt(0, what).in_metadata(ALIGNMENT_KEY))
        }
    }
}

fn read_tensors(
    source: &mut Source<impl Read>,
    count: u64,
    alignment: u64,
) -> Result<Vec<Tensor<Kind>>, Error> {
    let mut tensors = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..count {
        let (offset, name) = read_name(source, "tensor name")?;
        let tensor =
            read_tensor(source, &name, alignment).map_err(|error| error.in_tensor(&name))?;
        if !names.insert(name) {
            return Err(Error::corrupt(offset, "the name is there twice").in_tensor(&tensor.name));
        }
        tensors.push(tensor);
    }
    let file_len = source.file_len();
    let data = source.position().next_multiple_of(alignment);
    for tensor in &mut tensors {
        let end =
            tensor.offset.checked_add(data).and_then(|start| start.checked_add(tensor.num_bytes));
        if end.is_none_or(|end| end > file_len) {
            let what = format!(
                "its {} bytes at {} after the header's end at {data} lie outside the file of {file_len} bytes",
                tensor.num_bytes, tensor.offset
            );
            return Err(
                Error::corrupt(data.saturating_add(tensor.offset), what).in_tensor(&tensor.name)
            );
        }
        tensor.offset += data;
    }
    in_file_order(&tensors)?;
    Ok(tensors)
}

/// What follows a tensor's name; its offset is still that from the end of the header.
fn read_tensor(
    source: &mut Source<impl Read>,
    name: &str,
    alignment: u64,
) -> Result<Tensor<Kind>, Error> {
    let at = source.position();
    let num_dimensions = u32::from_le_bytes(source.array()?);
    if num_dimensions > MOST_DIMENSIONS {
        let what = format!("{num_dimensions} dimensions; the limit is {MOST_DIMENSIONS}");
        return Err(Error::corrupt(at, what));
    }
    let mut shape = Vec::new();
    for _ in 0..num_dimensions {
        shape.push(u64::from_le_bytes(source.array()?));
    }
    let row_len = shape.first().copied().unwrap_or(1);
    shape.reverse();
    let elements = shape.iter().try_fold(1u64, |product, &n| product.checked_mul(n));
    let Some(elements @ 1..) = elements else {
        return Err(Error::corrupt(at, format!("the shape {shape:?} has no or too many elements")));
    };
    let at = source.position();
    let id = u32::from_le_bytes(source.array()?);
    let Some(dtype) = Kind::from_id(id) else {
        return Err(Error::unsupported(
            at,
            format!("the tensor type {id} is not known (or was withdrawn)"),
        ));
    };
    let Some(num_bytes) = dtype.num_bytes(elements, row_len) else {
        let what = if row_len.is_multiple_of(dtype.block_len() as u64) {
            format!("{elements} elements of {} have no size in bytes", dtype.name())
        } else {
            format!(
                "rows of {row_len} are not whole blocks of {} {}",
                dtype.block_len(),
                dtype.name()
            )
        };
        return Err(Error::corrupt(at, what));
    };
    let at = source.position();
    let offset = u64::from_le_bytes(source.array()?);
    if !offset.is_multiple_of(alignment) {
        return Err(Error::corrupt(
            at,
            format!("the offset {offset} is not a multiple of {alignment}"),
        ));
    }
    Ok(Tensor { name: name.to_owned(), dtype, shape, offset, num_bytes })
}
