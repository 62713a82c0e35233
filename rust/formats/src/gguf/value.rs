//! Metadata values.

use std::io::Read;

use super::source::Source;
use crate::Error;

const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

macro_rules! values {
    ($($id:literal $variant:ident $type:ident;)*) => {
        /// A metadata value.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum Value {
            $($variant($type),)*
            Bool(bool),
            String(String),
            Array(Array),
        }

        /// A metadata array; all elements have one type.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum Array {
            $($variant(Vec<$type>),)*
            Bool(Vec<bool>),
            String(Strings),
        }

        impl Value {
            /// The type's name.
            #[must_use]
            pub fn type_name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => stringify!($type),)*
                    Self::Bool(_) => "bool",
                    Self::String(_) => "a string",
                    Self::Array(_) => "an array",
                }
            }
        }

        fn read_number(source: &mut Source<impl Read>, id: u32) -> Result<Option<Value>, Error> {
            Ok(match id {
                $($id => Some(Value::$variant($type::from_le_bytes(source.array()?))),)*
                _ => None,
            })
        }

        fn read_numbers(source: &mut Source<impl Read>, id: u32, count: u64) -> Result<Option<Array>, Error> {
            Ok(match id {
                $($id => Some(Array::$variant(read_chunks(source, count, $type::from_le_bytes)?)),)*
                _ => None,
            })
        }
    };
}

values! {
    0 U8 u8;
    1 I8 i8;
    2 U16 u16;
    3 I16 i16;
    4 U32 u32;
    5 I32 i32;
    6 F32 f32;
    10 U64 u64;
    11 I64 i64;
    12 F64 f64;
}

/// Many strings in one piece of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    /// Where each ends; a header is far shorter than 4 GiB.
    ends: Vec<u32>,
}

impl Strings {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True when there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The strings in order.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let string = &self.text[start..end as usize];
            start = end as usize;
            string
        })
    }

    fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len() as u32);
    }
}

/// Read a value, its type first.
pub(super) fn read(source: &mut Source<impl Read>) -> Result<Value, Error> {
    let offset = source.position();
    let id = u32::from_le_bytes(source.array()?);
    match id {
        BOOL => Ok(Value::Bool(read_bool(source)?)),
        STRING => {
            let mut bytes = Vec::new();
            Ok(Value::String(read_string(source, &mut bytes)?.to_owned()))
        }
        ARRAY => Ok(Value::Array(read_array(source)?)),
        _ => read_number(source, id)?.ok_or_else(|| unknown(offset, id)),
    }
}

fn unknown(offset: u64, id: u32) -> Error {
    Error::corrupt(offset, format!("the value type {id} does not exist"))
}

fn read_bool(source: &mut Source<impl Read>) -> Result<bool, Error> {
    let offset = source.position();
    match source.array()? {
        [0] => Ok(false),
        [1] => Ok(true),
        [byte] => Err(Error::corrupt(offset, format!("a bool is 0 or 1, not {byte}"))),
    }
}

/// A string, in memory that serves many.
fn read_string<'a>(
    source: &mut Source<impl Read>,
    bytes: &'a mut Vec<u8>,
) -> Result<&'a str, Error> {
    let offset = source.position();
    let len = u64::from_le_bytes(source.array()?);
    bytes.clear();
    source.read_to(len, bytes)?;
    std::str::from_utf8(bytes).map_err(|_| Error::corrupt(offset, "a string that is not UTF-8"))
}

fn read_array(source: &mut Source<impl Read>) -> Result<Array, Error> {
    let offset = source.position();
    let id = u32::from_le_bytes(source.array()?);
    let count = u64::from_le_bytes(source.array()?);
    match id {
        BOOL => {
            source.check(count)?;
            (0..count).map(|_| read_bool(source)).collect::<Result<_, _>>().map(Array::Bool)
        }
        STRING => read_strings(source, count).map(Array::String),
        ARRAY => Err(Error::unsupported(offset, "an array of arrays")),
        _ => read_numbers(source, id, count)?.ok_or_else(|| unknown(offset, id)),
    }
}

fn read_strings(source: &mut Source<impl Read>, count: u64) -> Result<Strings, Error> {
    // Each begins with its length.
    source.check(count.saturating_mul(8))?;
    let mut strings = Strings::default();
    let mut bytes = Vec::new();
    for _ in 0..count {
        strings.push(read_string(source, &mut bytes)?);
    }
    Ok(strings)
}

fn read_chunks<T, const N: usize>(
    source: &mut Source<impl Read>,
    count: u64,
    decode: fn([u8; N]) -> T,
) -> Result<Vec<T>, Error> {
    let mut bytes = Vec::new();
    source.read_to(count.saturating_mul(N as u64), &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().copied().map(decode).collect())
}
