"""Rotary positions, per-head norms and the writing of keys and values."""

from typing import Any

import pytest
import reference_kernels as reference
import torch
from kernel_calls import ISAS, NAMES, attention, instruction_set, rope_and_cache, threads
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

DTYPES = [torch.bfloat16, torch.float32]
HEADS, KV_HEADS = 6, 2


def table(rotary_dim: int, positions: int = 300) -> Tensor:
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def inputs(
    tokens: int, head_dim: int, dtype: torch.dtype, block_size: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv, an empty cache, positions and slots, both shuffled."""
    generator = torch.Generator().manual_seed(tokens + head_dim)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * head_dim, generator=generator).to(dtype)
    blocks = tokens // block_size + 3
    cache = torch.full((blocks, 2, KV_HEADS, block_size, head_dim), float("nan"), dtype=dtype)
    positions = torch.randint(0, 300, (tokens,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens].int()
    return qkv, cache, positions, slots


def natural(cache: Tensor) -> Tensor:
    """The cache in the order of its shape, whatever the kernels' order within a tile is."""
    blocks, _, heads, block_size, head_dim = cache.shape
    words = 2 if cache.dtype == torch.bfloat16 else 1
    keys = cache[:, 0].reshape(blocks, heads, head_dim // words, block_size, words)
    keys = keys.transpose(2, 3).reshape(blocks, heads, block_size, head_dim)
    values = cache[:, 1].reshape(blocks, heads, block_size // words, head_dim, words)
    values = values.transpose(3, 4).reshape(blocks, heads, block_size, head_dim)
    return torch.stack((keys, values), dim=1)


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


CASES: list[dict[str, Any]] = [
    {"head_dim": 64, "rotary_dim": 64},
    {"head_dim": 80, "rotary_dim": 80},
    {"head_dim": 112, "rotary_dim": 48, "block_size": 32},
    {"head_dim": 64, "rotary_dim": 20},
    {"head_dim": 256, "rotary_dim": 256, "block_size": 48},
    {"head_dim": 64, "rotary_dim": 0},
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference_to_the_bit(isa: str, dtype: torch.dtype, case: dict[str, Any]) -> None:
    head_dim = case["head_dim"]
    qkv, cache, positions, slots = inputs(45, head_dim, dtype, case.get("block_size", 16))
    slots[::7] = -1
    cos_sin = table(case["rotary_dim"])
    expected, expected_cache = qkv.clone(), cache.clone()
    reference.rope_and_cache(expected, expected_cache, positions, slots, cos_sin, HEADS)
    with instruction_set(isa):
        rope_and_cache(qkv, cache, positions, slots, cos_sin, HEADS)
    assert qkv.equal(expected)
    assert same(natural(cache), expected_cache)


def test_turns_as_transformers_does() -> None:
    qkv, cache, positions, slots = inputs(30, 64, torch.float32)
    cos_sin = table(64)
    cos, sin = (x.repeat(1, 2)[None] for x in cos_sin[positions.long()].chunk(2, dim=-1))
    q, k = qkv.view(1, 30, -1, 64).transpose(1, 2)[:, : HEADS + KV_HEADS].split([HEADS, KV_HEADS], dim=1)
    q, k = (x[0].transpose(0, 1) for x in apply_rotary_pos_emb(q, k, cos, sin))
    rope_and_cache(qkv, cache, positions, slots, cos_sin, HEADS)
    assert qkv.view(30, -1, 64)[:, :HEADS].equal(q)
    assert natural(cache)[slots // 16, 0, :, slots % 16].equal(k)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_heads_are_normed_as_qwen3_does(dtype: torch.dtype) -> None:
    qkv, cache, positions, slots = inputs(30, 128, dtype)
    norms = []
    for seed in range(2):
        norm = Qwen3RMSNorm(128, eps=1e-6).to(dtype)
        norm.weight.data = torch.rand(128, generator=torch.Generator().manual_seed(seed)).to(dtype)
        norms.append(norm)
    q, k, _ = qkv.view(30, -1, 128).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = table(128)[positions.long()].chunk(2, dim=-1)
    with torch.no_grad():
        q, k = (reference.rotate(norm(x).float(), cos, sin).to(dtype) for norm, x in zip(norms, (q, k), strict=True))
    weights = [norm.weight.detach().float() for norm in norms]
    rope_and_cache(qkv, cache, positions, slots, table(128), HEADS, q_norm=weights[0], k_norm=weights[1], eps=1e-6)
    out_q = qkv.view(30, -1, 128)[:, :HEADS]
    out_k = natural(cache)[slots // 16, 0, :, slots % 16]
    for out, expected in ((out_q, q), (out_k, k)):
        if dtype == torch.bfloat16:
            torch.testing.assert_close(out, expected, atol=1e-2, rtol=2**-6)
            assert (out == expected).float().mean() > 0.998
        else:
            torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_a_token_does_not_depend_on_the_others() -> None:
    qkv, cache, positions, slots = inputs(40, 64, torch.bfloat16)
    one_by_one, its_cache = qkv.clone(), cache.clone()
    with threads(3):
        rope_and_cache(qkv, cache, positions, slots, table(64), HEADS)
    with threads(1):
        for i in range(40):
            part = slice(i, i + 1)
            rope_and_cache(one_by_one[part], its_cache, positions[part], slots[part], table(64), HEADS)
    assert one_by_one.equal(qkv)
    assert same(its_cache, cache)


def test_what_is_written_is_what_attention_reads() -> None:
    """One key: its weight is 1, the result is its value."""
    qkv, cache, positions, slots = inputs(5, 64, torch.float32)
    rope_and_cache(qkv, cache, positions, slots, table(64), HEADS)
    slot = int(slots[2])
    # The token alone, moved to the start of its block.
    position, block = slot % 16, slot // 16
    alone = torch.full_like(cache, float("nan"))
    rope_and_cache(qkv[2:3].clone(), alone, positions[2:3], torch.tensor([slot - position]).int(), table(64), HEADS)
    one = torch.tensor([1], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    start = torch.tensor([0, 1], dtype=torch.int32)
    out = attention(qkv[2:3], alone, torch.tensor([[block]]).int(), zero, start, one, HEADS, 0.125)
    values = qkv.view(5, -1, 64)[2, HEADS + KV_HEADS :].repeat_interleave(HEADS // KV_HEADS, dim=0)
    assert out[0].equal(values)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "block_size", "message"),
    [(40, 40, 16, "head_dim"), (272, 16, 16, "head_dim"), (64, 66, 16, "rotary_dim"), (64, 64, 8, "block_size")],
)
def test_bad_shapes_are_refused(head_dim: int, rotary_dim: int, block_size: int, message: str) -> None:
    qkv, cache, positions, slots = inputs(3, head_dim, torch.float32, block_size)
    with pytest.raises(ValueError, match=message):
        rope_and_cache(qkv, cache, positions, slots, table(rotary_dim), HEADS)
