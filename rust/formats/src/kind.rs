//! The block types of ggml.

macro_rules! kinds {
    ($($id:literal $variant:ident $len:literal $bytes:expr;)*) => {
        /// How a GGUF tensor's elements are stored: a number a block, or blocks of quantized numbers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, non_camel_case_types)]
        #[non_exhaustive]
        pub enum Kind {
            $($variant,)*
        }

        impl Kind {
            /// Every type there is.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The type of a number in a GGUF file.
            #[must_use]
            pub fn from_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// The number that stands for the type in a GGUF file.
            #[must_use]
            pub fn id(self) -> u32 {
                match self {
                    $(Self::$variant => $id,)*
                }
            }

            /// The type's name in ggml, such as `Q4_K`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($variant),)*
                }
            }

            /// Elements in a block.
            #[must_use]
            pub fn block_len(self) -> usize {
                match self {
                    $(Self::$variant => $len,)*
                }
            }

            /// Bytes of a block.
            #[must_use]
            pub fn block_bytes(self) -> usize {
                match self {
                    $(Self::$variant => $bytes,)*
                }
            }
        }
    };
}

kinds! {
    0 F32 1 4;
    1 F16 1 2;
    2 Q4_0 32 2 + 16;
    3 Q4_1 32 4 + 16;
    6 Q5_0 32 2 + 4 + 16;
    7 Q5_1 32 4 + 4 + 16;
    8 Q8_0 32 2 + 32;
    9 Q8_1 32 8 + 32;
    10 Q2_K 256 16 + 64 + 4;
    11 Q3_K 256 32 + 64 + 12 + 2;
    12 Q4_K 256 4 + 12 + 128;
    13 Q5_K 256 4 + 12 + 32 + 128;
    14 Q6_K 256 128 + 64 + 16 + 2;
    15 Q8_K 256 4 + 256 + 32;
    16 IQ2_XXS 256 2 + 64;
    17 IQ2_XS 256 2 + 64 + 8;
    18 IQ3_XXS 256 2 + 64 + 32;
    19 IQ1_S 256 2 + 32 + 16;
    20 IQ4_NL 32 2 + 16;
    21 IQ3_S 256 2 + 64 + 8 + 32 + 4;
    22 IQ2_S 256 2 + 64 + 8 + 8;
    23 IQ4_XS 256 2 + 2 + 4 + 128;
    24 I8 1 1;
    25 I16 1 2;
    26 I32 1 4;
    27 I64 1 8;
    28 F64 1 8;
    29 IQ1_M 256 32 + 16 + 8;
    30 BF16 1 2;
    34 TQ1_0 256 48 + 4 + 2;
    35 TQ2_0 256 64 + 2;
    39 MXFP4 32 1 + 16;
    40 NVFP4 64 4 + 32;
    41 Q1_0 128 2 + 16;
}

impl Kind {
    /// The type of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// The bytes that rows of `row_len` elements, `elements` in all, take; none where a row is not whole blocks or
    /// the number overflows.
    #[must_use]
    pub fn num_bytes(self, elements: u64, row_len: u64) -> Option<u64> {
        let block_len = self.block_len() as u64;
        if !row_len.is_multiple_of(block_len) {
            return None;
        }
        (elements / block_len).checked_mul(self.block_bytes() as u64)
    }
}
