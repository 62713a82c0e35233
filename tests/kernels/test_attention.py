"""Paged attention of the CPU kernels: right values, nothing foreign touched, and one result a query."""

import math
from typing import Any

import pytest
import reference_kernels as reference
import torch
from kernel_calls import ISAS, NAMES, Paged, instruction_set, threads
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float32]
LENGTHS = [1, 5, 16, 17, 256, 290]


def whole(paged: Paged) -> list[tuple[int, int, int]]:
    return [(s, 0, n) for s, n in enumerate(paged.lengths)]


def exact(paged: Paged, parts: list[tuple[int, int, int]], scale: float, **options: Any) -> Tensor:
    qkv, rows, query_start, seq_lens = paged.rows(parts)
    head_dim = paged.natural.shape[-1]
    q = qkv[:, : paged.num_heads * head_dim].reshape(len(qkv), paged.num_heads, head_dim)
    return reference.attention(q, paged.natural, paged.block_tables, rows, query_start, seq_lens, scale, **options)


def torch_error(paged: Paged, exactly: Tensor, scale: float) -> float:
    """How far torch's own attention in the same dtype is from the float64 result, whole sequences."""
    head_dim, groups = paged.natural.shape[-1], paged.natural.shape[2]
    worst, first = 0.0, 0
    for n, qkv in zip(paged.lengths, paged.qkv, strict=True):
        q, k, v = qkv.view(n, -1, head_dim).transpose(0, 1).split([paged.num_heads, groups, groups])
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)
        worst = max(worst, float((out.double() - exactly[first : first + n]).abs().max()))
        first += n
    return worst


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 128), (2, 2, 80)])
def test_every_instruction_set_is_as_near_float64_as_torch(
    isa: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    paged = Paged(LENGTHS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    scale = head_dim**-0.5
    exactly = exact(paged, whole(paged), scale)
    with instruction_set(isa):
        out = paged.attention(whole(paged), scale)
    error = float((out.double() - exactly).abs().max())
    assert error <= 2 * torch_error(paged, exactly, scale) + 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_shapes(dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    paged = Paged(
        [3, 40, 260],
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=head_dim + group,
    )
    parts = [(0, 2, 3), (1, 0, 40), (2, 250, 260)]
    out = paged.attention(parts, head_dim**-0.5)
    exactly = exact(paged, parts, head_dim**-0.5)
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 3e-6, "rtol": 1e-5}
    torch.testing.assert_close(out.double(), exactly, **tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (37, 0.0), (256, 0.0), (300, 2.5), (0, 5.0)])
def test_window_and_softcap(isa: str, dtype: torch.dtype, window: int, softcap: float) -> None:
    paged = Paged(LENGTHS, dtype=dtype)
    options = {"window": window, "softcap": softcap}
    with instruction_set(isa):
        out = paged.attention(whole(paged), 0.3, **options)
    exactly = exact(paged, whole(paged), 0.3, **options)
    tolerance = {"atol": 3e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(out.double(), exactly, **tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("window", [0, 45])
def test_a_query_has_one_result(isa: str, dtype: torch.dtype, window: int) -> None:
    """Alone or among others, as a decode row or in a chunk of any size, on one thread or more: the same bits."""
    paged = Paged([1, 33, 275, 530], num_heads=3, num_kv_heads=1, dtype=dtype)
    scale = 0.125
    with instruction_set(isa), threads(2):
        together = paged.attention(whole(paged), scale, window=window)
        first = 0
        for s, n in enumerate(paged.lengths):
            expected = together[first : first + n]
            first += n
            with threads(1):
                assert paged.attention([(s, 0, n)], scale, window=window).equal(expected)
            for chunk in (16, 37):
                steps = [paged.attention([(s, i, min(i + chunk, n))], scale, window=window) for i in range(0, n, chunk)]
                assert torch.cat(steps).equal(expected)
            for position in {0, n // 3, n - 1}:
                decode = paged.attention([(s, position, position + 1)], scale, window=window)
                assert decode[0].equal(expected[position])


def test_many_threads_and_long_decode_rows_keep_the_bits() -> None:
    paged = Paged([3000, 1029], num_heads=8, num_kv_heads=1)
    parts = [(0, 2999, 3000), (1, 1028, 1029)]
    with threads(1):
        alone = paged.attention(parts, 0.125)
    for count in (2, 3, 8):
        with threads(count):
            assert paged.attention(parts, 0.125).equal(alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_not_a_number_stays_in_its_request(dtype: torch.dtype) -> None:
    paged = Paged([50, 300, 20], dtype=dtype)
    clean = paged.attention(whole(paged), 0.125)
    assert clean.isfinite().all()
    poisoned = Paged([50, 300, 20], dtype=dtype)
    for block in poisoned.block_tables[poisoned.slots[1], : -(-300 // 16)].tolist():
        poisoned.cache[block] = math.nan
    out = poisoned.attention(whole(poisoned), 0.125)
    assert out[:50].equal(clean[:50])
    assert out[350:].equal(clean[350:])
    assert out[50:350].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    paged = Paged([300], dtype=torch.float32)
    out = paged.attention(whole(paged), 1000.0)
    torch.testing.assert_close(out.double(), exact(paged, whole(paged), 1000.0), atol=5e-2, rtol=1e-2)


def test_rows_without_queries_are_passed_over() -> None:
    paged = Paged([20, 30])
    out = paged.attention([(0, 20, 20), (1, 10, 30)], 0.125)
    assert out.equal(paged.attention([(1, 10, 30)], 0.125))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"scale": 0.0}, "scale"), ({"softcap": -1.0}, "softcap"), ({"num_heads": 3}, "num_heads")],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    paged = Paged([20])
    paged.num_heads = change.pop("num_heads", paged.num_heads)
    with pytest.raises(ValueError, match=message):
        paged.attention(whole(paged), change.pop("scale", 0.125), **change)
