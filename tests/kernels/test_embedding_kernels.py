"""Gathered rows, scalings, and copies of cache blocks."""

from __future__ import annotations

import pytest
import torch
from octavo.kernels.blocks import NUM_COPIES, copy_blocks
from octavo.kernels.embedding import gather_rows, scale, softcap


@pytest.mark.parametrize("columns", [7, 96, 2500])
def test_rows_are_gathered(columns: int, device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(11, columns, device=device).to(dtype)
    indices = torch.tensor([3, 10, 0, 3, 5], dtype=torch.int32, device=device)
    out = torch.zeros(5, columns, dtype=dtype, device=device)
    gather_rows(table, indices, out, 4)
    assert out[:4].equal(table[indices[:4].long()])
    assert not out[4].any()


def test_scalings_are_rounded_once(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(3, 700, device=device).to(dtype) * 20
    scaled, capped = x.clone(), x.clone()
    scale(scaled, 5.656854249492381)
    assert scaled.equal((x.float() * 5.656854249492381).to(dtype))
    softcap(capped, 30.0)
    exact = (30 * torch.tanh(x.double() / 30)).to(dtype)
    digits = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 4e-6}[dtype]
    torch.testing.assert_close(capped, exact, rtol=digits, atol=1e-7)


def test_softcap_at_both_ends_and_near_zero(device: torch.device) -> None:
    x = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 0.249, 0.25, 0.251, 5.0, 1e5, -1e5, torch.inf, -torch.inf, torch.nan])
    out = x.clone().to(device)
    softcap(out, 1.0)
    expected = torch.tanh(x.double()).float()
    torch.testing.assert_close(out.cpu(), expected, rtol=4e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [0, 3])
def test_blocks_are_copied_in_every_layer(count: int, device: torch.device, dtype: torch.dtype) -> None:
    cache = torch.randn(3, 9, 2, 2, 16, 80, device=device).to(dtype)
    sources = torch.tensor([1, 4, 1, 8], dtype=torch.int32, device=device)
    destinations = torch.tensor([2, 0, 7, 6], dtype=torch.int32, device=device)
    counts = torch.full((16,), 4, dtype=torch.int32, device=device)
    counts[NUM_COPIES] = count
    expected = cache.clone()
    expected[:, destinations[:count].long()] = cache[:, sources[:count].long()]
    copy_blocks(cache, sources, destinations, counts)
    assert cache.equal(expected)
