"""GGUF files written by hand, valid or with one thing wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

# ggml's numbers of a few tensor types.
TYPE_F32, TYPE_Q4_0, TYPE_Q8_0, TYPE_Q4_K = 0, 2, 8, 12


def string(text: str | bytes) -> bytes:
    """Length and bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, value_type: int, value: bytes) -> bytes:
    """A metadata entry from its value's bytes."""
    return string(key) + struct.pack("<I", value_type) + value


def array(value_type: int, count: int, values: bytes) -> bytes:
    """The value of an array entry."""
    return struct.pack("<IQ", value_type, count) + values


def tensor(name: str | bytes, dims: Sequence[int], type_id: int, offset: int) -> bytes:
    """A tensor's entry; `dims` fastest first, as in the file."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_entries: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file with `data` zero bytes after the padded header."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % alignment + data)


def small_gguf() -> bytes:
    """A small valid file with a value of every type and two tensors."""
    entries = [
        entry("general.architecture", STRING, string("llama")),
        entry("u8", U8, b"\xc8"),
        entry("i8", I8, b"\xc8"),
        entry("u16", U16, struct.pack("<H", 60_000)),
        entry("i16", I16, struct.pack("<h", -2)),
        entry("u32", U32, struct.pack("<I", 2**32 - 1)),
        entry("i32", I32, struct.pack("<i", -3)),
        entry("f32", F32, struct.pack("<f", 1e-5)),
        entry("bool", BOOL, b"\x01"),
        entry("u64", U64, struct.pack("<Q", 2**64 - 1)),
        entry("i64", I64, struct.pack("<q", -(2**63))),
        entry("f64", F64, struct.pack("<d", 0.1)),
        entry("empty", STRING, string("")),
        entry("bytes", ARRAY, array(U8, 3, b"\x00\x7f\xff")),
        entry("signed", ARRAY, array(I8, 2, b"\x00\xff")),
        entry("shorts", ARRAY, array(I16, 2, struct.pack("<2h", 5, -5))),
        entry("types", ARRAY, array(I32, 2, struct.pack("<2i", 1, -1))),
        entry("scores", ARRAY, array(F32, 2, struct.pack("<2f", 0.5, -1.25))),
        entry("longs", ARRAY, array(U64, 1, struct.pack("<Q", 2**63))),
        entry("flags", ARRAY, array(BOOL, 2, b"\x00\x01")),
        entry("tokens", ARRAY, array(STRING, 3, string("a") + string("") + string("é中🙂"))),
        entry("none", ARRAY, array(STRING, 0, b"")),
    ]
    tensors = [tensor("a", [64, 3], TYPE_Q8_0, 0), tensor("b.weight", [5], TYPE_F32, 224)]
    return gguf(entries, tensors, 224 + 20)
