from __future__ import annotations

import os
import resource
import struct
import sys
from pathlib import Path

import gguf as gguf_py
import numpy as np
import pytest
from gguf_files import (
    ARRAY,
    BOOL,
    STRING,
    TYPE_F32,
    TYPE_Q4_0,
    TYPE_Q4_K,
    TYPE_Q8_0,
    U8,
    U32,
    U64,
    array,
    entry,
    gguf,
    small_gguf,
    string,
    tensor,
)
from octavo._core import dequantize, read_gguf
from octavo.errors import CorruptFile, ModelNotFound, UnsupportedModel
from octavo.loading.demo import demo_model


@pytest.fixture
def write(tmp_path: Path):
    def write(content: bytes) -> str:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return str(path)

    return write


def test_every_type_of_metadata_becomes_a_python_value(write):
    content = small_gguf()
    metadata, tensors = read_gguf(write(content))
    assert metadata == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -56,
        "u16": 60_000,
        "i16": -2,
        "u32": 2**32 - 1,
        "i32": -3,
        "f32": float(np.float32(1e-5)),
        "bool": True,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
        "empty": "",
        "bytes": [0, 127, 255],
        "signed": [0, -1],
        "shorts": [5, -5],
        "types": [1, -1],
        "scores": [0.5, -1.25],
        "longs": [2**63],
        "flags": [False, True],
        "tokens": ["a", "", "é中🙂"],
        "none": [],
    }
    assert metadata["bool"] is True
    assert metadata["flags"][0] is False
    data = len(content) - 244
    assert tensors == [("a", "Q8_0", [3, 64], data, 204), ("b.weight", "F32", [5], data + 224, 20)]


def reader_metadata(reader: gguf_py.GGUFReader) -> dict[str, object]:
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def reader_tensors(reader: gguf_py.GGUFReader) -> list[tuple[str, str, list[int], int, int]]:
    return [
        (t.name, t.tensor_type.name, [int(n) for n in reversed(t.shape)], int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    ]


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_a_file_of_the_reference_writer_reads_as_its_reader_says(tmp_path, alignment):
    path = str(tmp_path / "written.gguf")
    writer = gguf_py.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list([b"<s>", "▁é".encode(), b"<0x0A>"])
    writer.add_token_scores([0.0, -1.5, 3.25])
    writer.add_token_types([3, 1, 6])
    writer.add_add_bos_token(True)
    rng = np.random.default_rng(0)
    writer.add_tensor("one", rng.standard_normal((3, 7), dtype=np.float32))
    writer.add_tensor("two", rng.standard_normal((2, 3, 5)).astype(np.float16))
    blocks = gguf_py.quants.quantize(rng.standard_normal((4, 64), dtype=np.float32), gguf_py.GGMLQuantizationType.Q5_1)
    writer.add_tensor("three", blocks, raw_dtype=gguf_py.GGMLQuantizationType.Q5_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata, tensors = read_gguf(path)
    reader = gguf_py.GGUFReader(path)
    assert metadata == reader_metadata(reader)
    assert tensors == reader_tensors(reader)


@pytest.mark.demo
def test_the_demo_model_reads_as_the_reference_reader_says():
    path = str(demo_model())
    metadata, tensors = read_gguf(path)
    reader = gguf_py.GGUFReader(path)
    assert metadata == reader_metadata(reader)
    assert tensors == reader_tensors(reader)


@pytest.mark.parametrize("kind", list(gguf_py.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_every_tensor_type_is_known_even_where_it_cannot_be_dequantized(write, kind):
    block_len, block_bytes = gguf_py.GGML_QUANT_SIZES[kind]
    size = 3 * 2 * block_bytes
    content = gguf([], [tensor("t", [2 * block_len, 3], kind.value, 0)], size)
    _, tensors = read_gguf(write(content))
    assert tensors == [("t", kind.name, [3, 2 * block_len], len(content) - size, size)]

    source = np.zeros(block_bytes, np.uint8)
    out = np.full(block_len, 7, np.float32)
    arguments = (
        source.ctypes.data,
        block_bytes,
        kind.name,
        out.ctypes.data,
        block_len,
        "float32",
    )
    supported = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"}
    if kind.name in supported:
        dequantize(*arguments)
        assert not out.any()
    else:
        with pytest.raises(UnsupportedModel, match=kind.name):
            dequantize(*arguments)


HUGE = 2**63
A = tensor("a", [64], TYPE_Q8_0, 0)

CORRUPT = {
    "empty": (b"", "not a GGUF file"),
    "short": (b"GG", "not a GGUF file"),
    "magic": (gguf(magic=b"GGML"), "not a GGUF file"),
    "magic alone": (b"GGUF", "file ends after 0"),
    "entries that cannot be there": (gguf(num_entries=HUGE), "do not fit"),
    "tensors that cannot be there": (gguf(num_tensors=2**64 - 1), "do not fit"),
    "one entry too many": (gguf([entry("k", U32, bytes(4))], num_entries=2), r"header \(byte \d+\)"),
    "key of no bytes": (gguf([entry("", U32, bytes(4))], data=99), "a key of 0 bytes"),
    "key longer than the file": (
        gguf([struct.pack("<Q", 60_000) + b"key" + bytes(9)], data=99),
        "60000 bytes are needed",
    ),
    "key of any length": (
        gguf([struct.pack("<Q", HUGE) + b"key" + bytes(9)], data=99),
        f"a key of {HUGE} bytes",
    ),
    "key that is not UTF-8": (gguf([entry(b"\xff\xfe", U32, bytes(4))], data=99), "key that is not UTF-8"),
    "key twice": (gguf([entry("k", U32, bytes(4))] * 2), 'metadata "k" .*there twice'),
    "value type": (gguf([entry("k", 13, bytes(4))]), 'metadata "k" .*value type 13'),
    "bool of 2": (gguf([entry("k", BOOL, b"\x02")]), 'metadata "k" .*not 2'),
    "string longer than the file": (
        gguf([entry("k", STRING, struct.pack("<Q", HUGE))]),
        'metadata "k" .*cut short',
    ),
    "string that is not UTF-8": (gguf([entry("k", STRING, string(b"\xc3("))]), 'metadata "k" .*not UTF-8'),
    "array of numbers longer than the file": (
        gguf([entry("k", ARRAY, array(U32, HUGE, bytes(64)))]),
        'metadata "k" .*cut short',
    ),
    "array whose bytes overflow": (
        gguf([entry("k", ARRAY, array(U64, 2**61, bytes(64)))]),
        'metadata "k" .*cut short',
    ),
    "array of strings longer than the file": (
        gguf([entry("k", ARRAY, array(STRING, 2**62, bytes(64)))]),
        'metadata "k" .*cut short',
    ),
    "array of bools longer than the file": (
        gguf([entry("k", ARRAY, array(BOOL, HUGE, bytes(64)))]),
        'metadata "k" .*cut short',
    ),
    "array of an unknown type": (gguf([entry("k", ARRAY, array(77, 1, bytes(64)))]), "value type 77"),
    "alignment 0": (gguf([entry("general.alignment", U32, bytes(4))]), "0 is not a power of two"),
    "alignment 48": (gguf([entry("general.alignment", U32, struct.pack("<I", 48))]), "not a power of two"),
    "alignment of another type": (gguf([entry("general.alignment", U8, b" ")]), "u32 is needed, not u8"),
    "alignment past the end": (
        gguf([entry("general.alignment", U32, struct.pack("<I", 2**31))], [A], 68),
        'tensor "a" .*outside the file',
    ),
    "five dimensions": (gguf([], [tensor("a", [32, 1, 1, 1, 1], TYPE_Q8_0, 0)], 34), "5 dimensions"),
    "dimensions without end": (
        gguf([], [string("a") + struct.pack("<I", 2**32 - 1) + bytes(64)]),
        "4294967295 dimensions",
    ),
    "a dimension of 0": (gguf([], [tensor("a", [32, 0], TYPE_Q8_0, 0)]), "no or too many elements"),
    "elements that overflow": (
        gguf([], [tensor("a", [2**32, 2**32, 2], TYPE_F32, 0)]),
        "no or too many elements",
    ),
    "bytes that overflow": (gguf([], [tensor("a", [2**32, 2**31], TYPE_F32, 0)]), "elements of F32 have no size"),
    "half a block in a row": (gguf([], [tensor("a", [48, 2], TYPE_Q4_0, 0)], 99), "rows of 48 .* 32 Q4_0"),
    "half a big block in a row": (gguf([], [tensor("a", [128, 2], TYPE_Q4_K, 0)], 999), "256 Q4_K"),
    "tensor name of no bytes": (gguf([], [tensor("", [32], TYPE_Q8_0, 0)], 34), "tensor name of 0 bytes"),
    "tensor twice": (gguf([], [A, tensor("a", [32], TYPE_Q8_0, 96)], 999), 'tensor "a" .*there twice'),
    "offset off the alignment": (gguf([], [tensor("a", [32], TYPE_Q8_0, 16)], 99), "16 is not a multiple of 32"),
    "offset past the end": (gguf([], [tensor("a", [32], TYPE_Q8_0, 64)], 97), 'tensor "a" .*outside the file'),
    "offset that overflows": (
        gguf([], [tensor("a", [32], TYPE_Q8_0, 2**64 - 32)], 99),
        'tensor "a" .*outside the file',
    ),
    "data one byte short": (gguf([], [A], 67), 'tensor "a" .*68 bytes .*outside the file'),
    "overlap": (gguf([], [tensor("b", [32], TYPE_Q8_0, 64), A], 999), 'tensor "b" .*overlaps .*"a"'),
    "same place": (gguf([], [tensor("b", [32], TYPE_Q8_0, 0), A], 999), "overlaps"),
}

UNSUPPORTED = {
    "version 1": (gguf(version=1), "version 1"),
    "version 4": (gguf(version=4), "version 4"),
    "big-endian": (gguf(version=3 << 24), "big-endian"),
    "nested array": (
        gguf([entry("k", ARRAY, array(ARRAY, 1, array(U8, 1, b"\0")))]),
        'metadata "k" .*array of arrays',
    ),
    "withdrawn tensor type": (gguf([], [tensor("a", [32], 4, 0)], 99), 'tensor "a" .*tensor type 4'),
    "unknown tensor type": (gguf([], [tensor("a", [32], 1000, 0)], 99), 'tensor "a" .*tensor type 1000'),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_refused_with_the_place(write, case):
    content, message = CORRUPT[case]
    with pytest.raises(CorruptFile, match=rf"model\.gguf: .*{message}"):
        read_gguf(write(content))


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_supported_is_said(write, case):
    content, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModel, match=rf"model\.gguf: .*{message}"):
        read_gguf(write(content))


def test_every_truncation_is_refused(write):
    content = small_gguf()
    for length in range(len(content)):
        with pytest.raises(CorruptFile):
            read_gguf(write(content[:length]))


def test_names_are_escaped_and_cut_in_messages(write):
    name = "\x1b[2J\n" + "x" * 5000
    with pytest.raises(CorruptFile) as raised:
        read_gguf(write(gguf([], [tensor(name, [1] * 5, TYPE_F32, 0)], 99)))
    message = str(raised.value).split(": ", 1)[1]
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
@pytest.mark.parametrize(
    "first",
    [
        entry("k", STRING, struct.pack("<Q", 2**39)),
        entry("k", ARRAY, array(U8, 2**39, b"")),
        entry("k", ARRAY, array(STRING, 2**36, b"")),
        struct.pack("<Q", 2**39),
    ],
    ids=["string", "bytes", "strings", "key"],
)
def test_a_huge_file_of_nothing_takes_no_memory(write, first):
    path = write(gguf([first]))
    os.truncate(path, 2**40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptFile):
        read_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


def test_what_is_no_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFound, match="no file"):
        read_gguf(str(tmp_path / "missing.gguf"))
    with pytest.raises(ModelNotFound, match="not a file"):
        read_gguf(str(tmp_path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ModelNotFound, match="not a file"):
        read_gguf(str(pipe))
