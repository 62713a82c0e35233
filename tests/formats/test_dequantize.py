from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from octavo._core import dequantize, read_gguf
from octavo.errors import UnsupportedModel
from octavo.loading.demo import demo_model

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
# Where a block keeps its half-precision scales, so that a test can leave them finite.
SCALES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(kind: str, count: int, seed: int, *, finite: bool) -> np.ndarray:
    """Blocks of random bytes, uint8 [count, bytes of a block]; `finite`: no infinity or NaN in the result."""
    rng = np.random.default_rng(seed)
    _, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    if finite and kind in SCALES:
        for at in SCALES[kind]:
            scales = rng.standard_normal(count).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    elif finite:
        dtype = {"F32": np.float32, "F16": np.float16}.get(kind)
        values = rng.standard_normal((count, 1), dtype=np.float32)
        blocks = values.astype(dtype).view(np.uint8) if dtype else values.view(np.uint8)[:, 2:].copy()
    return blocks


def reference(blocks: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks.reshape(-1), GGMLQuantizationType[kind]).reshape(-1)


def ours(raw: np.ndarray, kind: str, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(elements, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    dequantize(raw.ctypes.data, raw.nbytes, kind, out.data_ptr(), elements, name)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, 4099])
def test_every_bit_is_what_the_reference_says(kind, count):
    blocks = random_blocks(kind, count, seed=count, finite=True)
    expected = reference(blocks, kind)
    result = ours(blocks, kind, expected.size).numpy()
    np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_at_all_match_the_reference(kind):
    blocks = random_blocks(kind, 6000, seed=7, finite=False)
    expected = reference(blocks, kind)
    np.testing.assert_array_equal(ours(blocks, kind, expected.size).numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_rounded_to_nearest_even(kind):
    blocks = random_blocks(kind, 3000, seed=3, finite=True)
    expected = torch.from_numpy(reference(blocks, kind).copy()).to(torch.bfloat16)
    assert torch.equal(ours(blocks, kind, expected.numel(), torch.bfloat16), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_many_pieces_at_once_cover_every_element(kind):
    block_len, _ = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random_blocks(kind, (1 << 19) // block_len + 1, seed=11, finite=True)
    expected = reference(blocks, kind)
    np.testing.assert_array_equal(ours(blocks, kind, expected.size).numpy(), expected)


@pytest.mark.demo
def test_the_demo_model_matches_the_reference():
    path = demo_model()
    raw = np.memmap(path, np.uint8, mode="r")
    _, tensors = read_gguf(str(path))
    kinds = set()
    for name, kind, shape, offset, num_bytes in tensors:
        if name.startswith("blk.") and not name.startswith(("blk.0.", "blk.29.")):
            continue
        kinds.add(kind)
        data = raw[offset : offset + num_bytes]
        expected = reference(np.asarray(data), kind)
        result = ours(data, kind, int(np.prod(shape)))
        np.testing.assert_array_equal(result.numpy(), expected, err_msg=name)
    assert kinds == {"F32", "Q4_1", "Q8_0"}


def test_what_does_not_fit_together_is_refused():
    source = np.zeros(34 * 4, np.uint8)
    out = np.zeros(128, np.float32)
    place, target = source.ctypes.data, out.ctypes.data
    for num_bytes, elements in [(34 * 4, 127), (34 * 4, 96), (34 * 4 - 1, 128), (0, 128), (34, 31)]:
        with pytest.raises(ValueError, match=f"{num_bytes} bytes of Q8_0 are not {elements} elements"):
            dequantize(place, num_bytes, "Q8_0", target, elements, "float32")
    with pytest.raises(ValueError, match="dtype"):
        dequantize(place, 136, "Q8_0", target, 128, "float16")
    with pytest.raises(ValueError, match="null"):
        dequantize(0, 136, "Q8_0", target, 128, "float32")
    with pytest.raises(ValueError, match="not aligned"):
        dequantize(place, 136, "Q8_0", target + 2, 128, "float32")
    with pytest.raises(ValueError, match="address space"):
        dequantize(place, 136, "Q8_0", target, 2**62, "float32")
    with pytest.raises(UnsupportedModel, match="Q9_9"):
        dequantize(place, 136, "Q9_9", target, 128, "float32")
    assert not out.any()
    dequantize(0, 0, "Q8_0", 0, 0, "float32")
