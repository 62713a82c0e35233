from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from octavo._core import read_safetensors
from octavo.errors import CorruptFile, ModelNotFound, UnsupportedModel
from safetensors import safe_open
from safetensors.numpy import save as save_numpy
from safetensors.torch import save_file


@pytest.fixture
def write(tmp_path: Path):
    def write(content: bytes) -> str:
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        return str(path)

    return write


def safetensors(header: object, data: int = 0) -> bytes:
    """A file with that header (an object or JSON text) and `data` zero bytes."""
    raw = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def info(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [start, end]}


def test_a_file_of_the_reference_library_reads_as_it_says(tmp_path):
    path = str(tmp_path / "model.safetensors")
    tensors = {
        "w": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.zeros(0, 5),
        "mask": torch.tensor([True, False, True]),
        "fp8": torch.ones(4, 2).to(torch.float8_e4m3fn),
        "é中": torch.arange(3),
    }
    save_file(tensors, path, metadata={"format": "pt", "note": 'quote " and \n'})
    metadata, found = read_safetensors(path)
    assert metadata == {"format": "pt", "note": 'quote " and \n'}
    assert {name for name, *_ in found} == set(tensors)
    content = Path(path).read_bytes()
    with safe_open(path, "pt") as reference:
        for name, dtype, shape, offset, num_bytes in found:
            assert dtype == reference.get_slice(name).get_dtype()
            assert shape == list(tensors[name].shape)
            raw = tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert content[offset : offset + num_bytes] == raw


def test_tensors_come_in_the_order_of_their_data(write):
    content = safetensors({"b": info(8, 16), "a": info(16, 24), "c": info(0, 8)}, 24)
    metadata, tensors = read_safetensors(write(content))
    data = len(content) - 24
    assert metadata == {}
    assert tensors == [
        ("c", "F32", [2], data, 8),
        ("b", "F32", [2], data + 8, 8),
        ("a", "F32", [2], data + 16, 8),
    ]


TWICE = f'{{"a":{json.dumps(info(0, 8))},"a":{json.dumps(info(8, 16))}}}'

CORRUPT = {
    "empty": (b"", "shorter than the 8 bytes"),
    "short": (b"\0\0\0", "shorter than the 8 bytes"),
    "header longer than the file": (struct.pack("<Q", 100) + b"{}", "a header of 100 bytes does not fit a file of 10"),
    "header of any length": (struct.pack("<Q", 2**64 - 1) + b"{}", "cut short"),
    "header whose end overflows": (struct.pack("<Q", 2**63) + b"{}", "cut short"),
    "no JSON": (safetensors("GGUF"), r"header \(byte 8\): the JSON"),
    "half JSON": (safetensors('{"a":'), "the JSON"),
    "text after the JSON": (safetensors("{} {}"), "the JSON"),
    "not UTF-8": (struct.pack("<Q", 6) + b'{"\xff":1', "the JSON|cut short"),
    "a list": (safetensors([]), "an object of tensors"),
    "a number for a tensor": (safetensors({"a": 1}), "the JSON"),
    "no shape": (safetensors({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8), "shape"),
    "negative offset": (safetensors({"a": info(-8, 0)}, 8), "the JSON"),
    "fraction": (safetensors('{"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}}', 8), "the JSON"),
    "number past 64 bits": (safetensors({"a": info(0, 2**64)}, 8), "the JSON"),
    "three offsets": (safetensors('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}}', 8), "the JSON"),
    "deep nesting": (safetensors('{"__metadata__":' + "[" * 5000), "the JSON"),
    "metadata that is no text": (safetensors({"__metadata__": {"a": 1}}), "the JSON"),
    "metadata twice": (safetensors('{"__metadata__":{"k":"1","k":"2"}}'), '"k" is there twice'),
    "tensor twice": (safetensors(TWICE, 16), '"a" is there twice'),
    "end before start": (safetensors({"a": info(8, 0)}, 8), r'tensor "a" .*\[8, 0\]'),
    "end past the file": (safetensors({"a": info(0, 8)}, 7), r'tensor "a" .*outside the 7 bytes'),
    "offsets of any size": (safetensors({"a": info(2**63, 2**63 + 8)}, 8), 'tensor "a" .*outside the 8 bytes'),
    "size too small": (safetensors({"a": info(0, 4)}, 4), r'tensor "a" .*F32 \[2\] does not take'),
    "size too large": (safetensors({"a": info(0, 12)}, 12), "does not take the 12 bytes"),
    "elements that overflow": (safetensors({"a": info(0, 8, [2**62, 4])}, 8), "does not take"),
    "bits that overflow": (safetensors({"a": info(0, 8, [2**61])}, 8), "does not take"),
    "overlap": (safetensors({"a": info(0, 8), "b": info(4, 12)}, 12), 'tensor "b" .*overlaps .*"a"'),
    "same place": (safetensors({"a": info(0, 8), "b": info(0, 8)}, 8), "overlaps"),
    "hole": (safetensors({"a": info(0, 8), "b": info(12, 20)}, 20), 'tensor "b" .*4 bytes before'),
    "hole at the start": (safetensors({"a": info(8, 16)}, 16), 'tensor "a" .*8 bytes before'),
    "bytes left over": (safetensors({"a": info(0, 8)}, 9), "1 bytes at the file's end"),
    "odd bits": (safetensors({"a": info(0, 1, [1], "F4")}, 1), "does not take"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_refused_with_the_place(write, case):
    content, message = CORRUPT[case]
    with pytest.raises(CorruptFile, match=rf"model\.safetensors: .*({message})"):
        read_safetensors(write(content))


@pytest.mark.parametrize("dtype", ["F128", "", "bf16", "FLOAT"])
def test_an_unknown_dtype_is_not_supported(write, dtype):
    with pytest.raises(UnsupportedModel, match=f'tensor "a" .*dtype "{dtype}"'):
        read_safetensors(write(safetensors({"a": info(0, 8, dtype=dtype)}, 8)))


def test_every_truncation_is_refused(write):
    content = save_numpy({"a": np.zeros((2, 3), np.float32), "b": np.ones(5, np.int16)}, {"format": "np"})
    read_safetensors(write(content))
    for length in range(len(content)):
        with pytest.raises(CorruptFile):
            read_safetensors(write(content[:length]))


def test_a_header_longer_than_the_format_allows_is_refused(write):
    path = write(struct.pack("<Q", 2**39))
    os.truncate(path, 2**40)
    with pytest.raises(CorruptFile, match="the limit is 100000000"):
        read_safetensors(path)


def test_what_is_no_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFound, match="no file"):
        read_safetensors(str(tmp_path / "missing.safetensors"))
    with pytest.raises(ModelNotFound, match="not a file"):
        read_safetensors(str(tmp_path))
