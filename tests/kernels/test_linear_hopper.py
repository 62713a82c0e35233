"""Hopper's products of few and of some rows: they have the bits of cuBLAS."""

from __future__ import annotations

import itertools

import pytest
import torch
from linear_operands import MANY, UNTOUCHED, assert_exact, operands, untouched
from octavo.kernels.activation import act_and_mul
from octavo.kernels.gluon_support import gluon_serves
from octavo.kernels.linear import Dense, configure_cublas
from octavo.kernels.linear_tables import (
    MAX_SLAB_ROWS,
    WideTile,
    slab_tile,
)


def slab_card() -> tuple[int, int]:
    """The card's capability; skips where slabs are not used."""
    capability = torch.cuda.get_device_capability()
    if capability < (9, 0) or not gluon_serves():
        pytest.skip("slabs are for Hopper and later, and for the Triton they are written for")
    return capability


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("n", [32, 1000, 4096])
@pytest.mark.parametrize("k", [1024, 2048, 3072])
def test_slabs_have_cublas_s_bits(k: int, n: int, with_bias: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Columns that fill no tile among them, and rows behind the last that are NaN."""
    from octavo.kernels.linear_slab import slab_product

    capability = slab_card()
    restore = configure_cublas()
    try:
        x, weight, offsets = operands(MANY, n, k, dtype, device)
        bias = offsets if with_bias else None
        for out_dtype in (dtype, torch.float32):
            whole = untouched(MANY, n, out_dtype, device)
            Dense(weight, bias).forward(x, whole, MANY)
            assert_exact(whole, x, weight, bias, MANY)
            for rows in range(1, MAX_SLAB_ROWS + 1):
                tile = slab_tile(capability, n, k, rows, gated=False)
                assert tile is not None
                few, out = x[: rows + 1].clone(), untouched(rows, n, out_dtype, device)
                few[rows] = torch.nan
                slab_product(few, weight, bias, out, rows, tile)
                assert out[:rows].equal(whole[:rows]), (rows, out_dtype)
                assert (out[rows:] == UNTOUCHED).all()
    finally:
        restore()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("n", [16, 1000, 3072])
def test_slabs_of_gate_and_up_have_the_bits_of_cublas_and_an_activation(
    n: int, activation: str, device: torch.device, dtype: torch.dtype
) -> None:
    from octavo.kernels.linear_slab import slab_gated

    capability = slab_card()
    restore = configure_cublas()
    try:
        x, weight, _ = operands(MANY, 2 * n, 1024, dtype, device)
        both, whole = untouched(MANY, 2 * n, dtype, device), untouched(MANY, n, dtype, device)
        Dense(weight).forward(x, both, MANY)
        act_and_mul(both, whole, MANY, activation)
        for rows in range(1, MAX_SLAB_ROWS + 1):
            tile = slab_tile(capability, n, 1024, rows, gated=True)
            assert tile is not None
            few, out = x[: rows + 1].clone(), untouched(rows, n, dtype, device)
            few[rows] = torch.nan
            slab_gated(few, weight, out, rows, tile, activation)
            assert out[:rows].equal(whole[:rows]), rows
            assert (out[rows:] == UNTOUCHED).all()
    finally:
        restore()


def wide_card() -> tuple[int, int]:
    """The card's capability; skips where `linear_hopper` is not used."""
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0) or not gluon_serves():
        pytest.skip("for Hopper, and for the Triton it is written for")
    return capability


WIDE = [WideTile(64, 16, 8), WideTile(64, 32, 3), WideTile(64, 64, 4), WideTile(128, 64, 6), WideTile(128, 32, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (1000, 192), (1024, 2048), (1024, 3072), (4096, 1024)])
def test_wide_products_have_cublas_s_bits(
    n: int, k: int, with_bias: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Columns that fill no tile among them, fewer steps than stages, and rows behind the last that are NaN."""
    wide_card()
    from octavo.kernels.linear_hopper import wide_product

    restore = configure_cublas()
    try:
        x, weight, offsets = operands(MANY, n, k, dtype, device)
        bias = offsets if with_bias else None
        for out_dtype in (dtype, torch.float32):
            whole = untouched(MANY, n, out_dtype, device)
            Dense(weight, bias).forward(x, whole, MANY)
            assert_exact(whole, x, weight, bias, MANY)
            for rows in (1, 63, 64, 65, 129, 255, 256):
                some = x[: rows + 1].clone()
                some[rows] = torch.nan
                for tile in WIDE:
                    out = untouched(rows, n, out_dtype, device)
                    wide_product(some, weight, bias, out, rows, tile)
                    assert out[:rows].equal(whole[:rows]), (rows, tile, out_dtype)
                    assert (out[rows:] == UNTOUCHED).all()
    finally:
        restore()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("n", [16, 1000, 3072])
def test_wide_gate_and_up_have_the_bits_of_cublas_and_an_activation(
    n: int, activation: str, device: torch.device, dtype: torch.dtype
) -> None:
    wide_card()
    from octavo.kernels.linear_hopper import wide_gated

    restore = configure_cublas()
    try:
        x, weight, _ = operands(MANY, 2 * n, 1024, dtype, device)
        both, whole = untouched(MANY, 2 * n, dtype, device), untouched(MANY, n, dtype, device)
        Dense(weight).forward(x, both, MANY)
        act_and_mul(both, whole, MANY, activation)
        for rows in (1, 64, 65, 130, 256):
            some = x[: rows + 1].clone()
            some[rows] = torch.nan
            for tile in WIDE:
                out = untouched(rows, n, dtype, device)
                wide_gated(some, weight, out, rows, tile, activation)
                assert out[:rows].equal(whole[:rows]), (rows, tile)
                assert (out[rows:] == UNTOUCHED).all()
    finally:
        restore()


@pytest.mark.gpu
def test_wide_products_find_what_the_kernel_before_wrote(device: torch.device, dtype: torch.dtype) -> None:
    """A chain of products in a graph, each of which starts while the one before runs, has the bits of one by one."""
    wide_card()
    from octavo.kernels.linear_hopper import wide_product

    tile, rows, n = WideTile(64, 64, 8), 200, 1024
    x, weight, _ = operands(rows, n, n, dtype, device)
    ring = [x] + [untouched(rows, n, dtype, device) for _ in range(8)]

    def chain(*, apart: bool) -> None:
        for source, target in itertools.pairwise(ring):
            wide_product(source, weight, None, target, rows, tile)
            if apart:
                torch.cuda.synchronize()

    chain(apart=True)
    right = [result[:rows].clone() for result in ring[1:]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(apart=False)
    for _ in range(50):
        for result in ring[1:]:
            result.fill_(torch.nan)
        graph.replay()
        assert [torch.equal(result[:rows], wanted) for result, wanted in zip(ring[1:], right, strict=True)] == [
            True
        ] * 8
