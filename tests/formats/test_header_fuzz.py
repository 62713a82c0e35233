"""Small valid files with bytes changed, inserted, removed: a header or a typed error, soon, and nothing else."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_files import small_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from octavo._core import read_gguf, read_safetensors
from octavo.errors import ModelError
from safetensors.numpy import save

INTERESTING = [0, 1, 4, 9, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]

change = st.one_of(
    st.tuples(st.just("byte"), st.integers(0, 10_000), st.integers(0, 255)),
    st.tuples(st.just("bit"), st.integers(0, 10_000), st.integers(0, 7)),
    st.tuples(st.just("u64"), st.integers(0, 10_000), st.sampled_from(INTERESTING)),
    st.tuples(st.just("insert"), st.integers(0, 10_000), st.integers(0, 255)),
    st.tuples(st.just("remove"), st.integers(0, 10_000), st.integers(1, 64)),
    st.tuples(st.just("cut"), st.integers(0, 10_000), st.just(0)),
)


def changed(content: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    raw = bytearray(content)
    for what, place, value in changes:
        at = place % (len(raw) + 1)
        if what == "byte":
            raw[at : at + 1] = bytes([value])
        elif what == "bit" and at < len(raw):
            raw[at] ^= 1 << value
        elif what == "u64":
            raw[at : at + 8] = struct.pack("<Q", value)
        elif what == "insert":
            raw[at:at] = bytes([value])
        elif what == "remove":
            del raw[at : at + value]
        elif what == "cut":
            del raw[at:]
    return bytes(raw)


FILES = {
    "gguf": (read_gguf, small_gguf()),
    "safetensors": (
        read_safetensors,
        save({"a": np.zeros((2, 3), np.float32), "b": np.ones(5, np.int16)}, {"format": "np"}),
    ),
}


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=1500, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(change, min_size=1, max_size=4))
def test_a_changed_file_gives_a_sound_header_or_a_typed_error(tmp_path: Path, name: str, changes):
    read, content = FILES[name]
    content = changed(content, changes)
    path = tmp_path / "model"
    path.write_bytes(content)
    try:
        _, tensors = read(str(path))
    except ModelError:
        return
    ends = 0
    for _, _, _, offset, num_bytes in sorted(tensors, key=lambda tensor: tensor[3:]):
        assert ends <= offset
        ends = offset + num_bytes
    assert ends <= len(content)
    assert len({name for name, *_ in tensors}) == len(tensors)
