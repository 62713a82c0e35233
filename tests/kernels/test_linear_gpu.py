"""The portable Triton products and the dense layer of GPUs against float64."""

from __future__ import annotations

import pytest
import reference_kernels as reference
import torch
from kernel_devices import INTERPRETED, in_one_dtype
from linear_operands import UNTOUCHED, assert_exact, operands, untouched
from octavo.kernels.activation import act_and_mul
from octavo.kernels.linear import Dense, configure_cublas
from octavo.kernels.linear_skinny import skinny_gated, skinny_product
from octavo.kernels.linear_tables import (
    SkinnyTile,
    TiledTile,
    skinny_tile,
)
from octavo.kernels.linear_tiled import tiled_gated, tiled_product

SKINNY = [
    SkinnyTile(False, 16, 16, 32, 1, 3),
    SkinnyTile(False, 64, 32, 64, 4, 3),
    SkinnyTile(True, 8, 16, 64, 1, 4),
    SkinnyTile(True, 16, 64, 32, 4, 3),
]
TILED = [TiledTile(16, 32, 2, 3), TiledTile(64, 64, 4, 3)]


@pytest.mark.parametrize("tile", SKINNY, ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 32, 64), (3, 40, 80), (8, 16, 16), (7, 70, 208)])
def test_skinny_product(tile: SkinnyTile, rows: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, n, k, dtype, device)
    for used in (None, bias):
        for out_dtype in {dtype, torch.float32}:
            out = untouched(rows, n, out_dtype, device)
            skinny_product(x, weight, used, out, rows, tile)
            assert_exact(out, x, weight, used, rows)


@in_one_dtype
@pytest.mark.parametrize("rows", [1, 2, 9, 16, 17, 31, 33, 48, 63, 64])
def test_skinny_product_of_any_few_rows(rows: int, device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, 24, 48, dtype, device)
    out = untouched(rows, 24, dtype, device)
    tile = skinny_tile((8, 0), 24, 48, rows, gated=False)
    assert tile is not None
    skinny_product(x, weight, bias, out, rows, tile)
    assert_exact(out, x, weight, bias, rows)


@pytest.mark.parametrize("tile", TILED, ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 64), (37, 40, 80), (64, 32, 16), (100, 72, 192)])
def test_tiled_product(tile: TiledTile, rows: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, n, k, dtype, device)
    for used, out_dtype in ((None, dtype), (bias, torch.float32)):
        out = untouched(rows, n, out_dtype, device)
        tiled_product(x, weight, used, out, rows, tile)
        assert_exact(out, x, weight, used, rows)


@pytest.mark.parametrize("tile", SKINNY, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_fused_gate_and_up_store_what_the_separate_kernels_store(
    tile: SkinnyTile, activation: str, device: torch.device, dtype: torch.dtype
) -> None:
    rows, n, k = 5, 40, 80
    x, weight, _ = operands(rows, 2 * n, k, dtype, device)
    fused, separate = untouched(rows, n, dtype, device), untouched(rows, n, dtype, device)
    skinny_gated(x, weight, fused, rows, tile, activation)
    both = torch.empty(rows + 1, 2 * n, dtype=dtype, device=device)
    skinny_product(x, weight, None, both, rows, tile)
    act_and_mul(both, separate, rows, activation)
    # The interpreter's float32 products are NumPy's, whose order of sums depends on a column's place.
    if dtype == torch.float32:
        torch.testing.assert_close(fused, separate, atol=1e-6, rtol=2e-6)
    else:
        assert fused.equal(separate)
    digits = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}[dtype]
    expected = reference.act_and_mul(both[:rows].float(), activation)
    torch.testing.assert_close(fused[:rows].float(), expected, atol=digits / 8, rtol=1.5 * digits)


@pytest.mark.parametrize("tile", TILED, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_tiles_of_gate_and_up_store_what_the_separate_kernels_store(
    tile: TiledTile, activation: str, device: torch.device, dtype: torch.dtype
) -> None:
    rows, n, k = 70, 40, 80
    x, weight, _ = operands(rows, 2 * n, k, dtype, device)
    fused, separate = untouched(rows, n, dtype, device), untouched(rows, n, dtype, device)
    tiled_gated(x, weight, fused, rows, tile, activation)
    both = torch.empty(rows + 1, 2 * n, dtype=dtype, device=device)
    tiled_product(x, weight, None, both, rows, tile)
    act_and_mul(both, separate, rows, activation)
    # The interpreter's products are NumPy's, whose order of sums depends on a column's place.
    if INTERPRETED:
        digits = 2e-6 if dtype == torch.float32 else 2**-10
        torch.testing.assert_close(fused, separate, atol=digits / 2, rtol=digits)
    else:
        assert fused.equal(separate)


@pytest.mark.gpu
@in_one_dtype
@pytest.mark.parametrize(("n", "k"), [(1024, 3072), (4096, 1024), (136, 80)])
def test_our_products_have_the_same_bits_in_every_tile_of_a_kind(
    n: int, k: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Tiles of fewer than 64 rows, which use one instruction on every card."""
    x, weight, bias = operands(300, n, k, dtype, device)
    whole = torch.empty(300, n, dtype=torch.float32, device=device)
    tiled_product(x, weight, bias, whole, 300, TiledTile(32, 64, 4, 3))
    for rows in (1, 2, 15, 16, 31):
        for tile in SKINNY:
            if tile.rows < rows or 64 in (tile.rows, tile.columns):
                continue
            out = torch.empty(rows, n, dtype=torch.float32, device=device)
            skinny_product(x, weight, bias, out, rows, tile)
            assert out.equal(whole[:rows]), (rows, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (4096, 1024),
        (1024, 2048),
        (6144, 1024),
        (1024, 3072),
        (4096, 4096),
        (6144, 4096),
        (4096, 14336),
        (32000, 1024),
    ],
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    n: int, k: int, bias: bool, device: torch.device, dtype: torch.dtype
) -> None:
    restore = configure_cublas()
    try:
        x, weight, offsets = operands(2048, n, k, dtype, device)
        dense = Dense(weight, offsets if bias else None)
        for out_dtype in (dtype, torch.float32):
            whole = torch.empty(2048, n, dtype=out_dtype, device=device)
            dense.forward(x, whole, 2048)
            assert_exact(whole, x, weight, dense.bias, 2048)
            for rows in (1, 2, 7, 8, 16, 31, 32, 33, 48, 64, 65, 96, 127, 128, 129, 200, 256, 257, 1000):
                some = untouched(rows, n, out_dtype, device)
                dense.forward(x, some, rows)
                assert some[:rows].equal(whole[:rows]), rows
                assert (some[rows:] == UNTOUCHED).all()
    finally:
        restore()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(3072, 1024), (3072, 2048), (14336, 4096)])
def test_gated_has_the_same_bits_at_every_number_of_rows(
    n: int, k: int, device: torch.device, dtype: torch.dtype
) -> None:
    restore = configure_cublas()
    try:
        x, weight, _ = operands(300, 2 * n, k, dtype, device)
        dense = Dense(weight)
        scratch = torch.empty(300, 2 * n, dtype=dtype, device=device)
        whole = torch.empty(300, n, dtype=dtype, device=device)
        dense.gated(x, scratch, whole, 300, "silu")
        for rows in (1, 2, 8, 16, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257):
            some = untouched(rows, n, dtype, device)
            dense.gated(x, scratch, some, rows, "silu")
            assert some[:rows].equal(whole[:rows]), rows
            assert (some[rows:] == UNTOUCHED).all()
    finally:
        restore()


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_dense_and_gated(rows: int, device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, 48, 80, dtype, device)
    restore = configure_cublas()
    try:
        dense = Dense(weight, bias)
        out = untouched(rows, 48, dtype, device)
        dense.forward(x, out, rows)
        assert_exact(out, x, weight, bias, rows)
        scratch, activated = untouched(rows, 48, dtype, device), untouched(rows, 24, dtype, device)
        dense.gated(x, scratch, activated, rows, "silu")
    finally:
        restore()
    expected = reference.act_and_mul(out[:rows], "silu")
    torch.testing.assert_close(activated[:rows].float(), expected.float(), atol=1e-3, rtol=2**-6)
    assert (activated[rows:] == UNTOUCHED).all()
    assert dense.num_bytes == weight.nbytes + bias.nbytes
