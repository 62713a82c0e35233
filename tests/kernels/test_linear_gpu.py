"""The Triton products and the dense layer of GPUs against float64."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import reference_kernels as reference
import torch
from kernel_devices import INTERPRETED, in_one_dtype
from octavo.kernels.activation import act_and_mul
from octavo.kernels.gluon_support import gluon_serves
from octavo.kernels.linear import Dense, configure_cublas
from octavo.kernels.linear_skinny import skinny_gated, skinny_product
from octavo.kernels.linear_tables import (
    MAX_SLAB_ROWS,
    MAX_WIDE_ROWS,
    SkinnyTile,
    TiledTile,
    WideTile,
    cublas_is_invariant,
    gated_tile,
    middle_tile,
    skinny_tile,
    slab_tile,
    tiled_tile,
    wide_tile,
)
from octavo.kernels.linear_tiled import tiled_gated, tiled_product

SKINNY = [
    SkinnyTile(False, 16, 16, 32, 1, 3),
    SkinnyTile(False, 64, 32, 64, 4, 3),
    SkinnyTile(True, 8, 16, 64, 1, 4),
    SkinnyTile(True, 16, 64, 32, 4, 3),
]
TILED = [TiledTile(16, 32, 2, 3), TiledTile(64, 64, 4, 3)]
UNTOUCHED = 7.0
# More rows than any product of ours takes on Hopper: cuBLAS computes them.
MANY = MAX_WIDE_ROWS + 1


def random(*shape: int, dtype: torch.dtype, device: torch.device, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * spread).to(dtype).to(device)


def operands(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [rows + 1, k] whose last row is poison, weight [n, k], bias [n]."""
    x = random(rows + 1, k, dtype=dtype, device=device)
    x[rows] = torch.nan
    return x, random(n, k, dtype=dtype, device=device, spread=k**-0.5), random(n, dtype=dtype, device=device)


def assert_exact(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int
) -> None:
    """The first rows are the product rounded once from sums in float32; the rest are untouched.

    A chain of n float32 sums, which tensor cores cut off rather than round, errs by 2^-23 n of the sum of its terms'
    sizes at most, and in every case seen by less than a quarter of that.
    """
    digits = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}[out.dtype]
    left, right = x[:rows].double(), weight.double().T
    expected, sizes = left @ right, left.abs() @ right.abs()
    if bias is not None:
        expected += bias.double()
    summed = 2**-25 * (weight.shape[1] / 16 + 16) * sizes
    error = (out[:rows].double() - expected).abs()
    assert (error <= summed + 1.01 * digits * (expected.abs() + summed)).all(), (error - summed).max()
    assert (out[rows:] == UNTOUCHED).all()


def untouched(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((rows + 1, n), UNTOUCHED, dtype=dtype, device=device)


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


def test_tables_cover_every_number_of_rows() -> None:
    for capability in ((0, 0), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        for n, k in ((1024, 2048), (6144, 1024), (28672, 4096), (151936, 1024)):
            for rows in (1, 8, 16, 17, 32, 33, 64, 65, 128, 4096):
                for gated in (False, True):
                    tile = skinny_tile(capability, n, k, rows, gated=gated)
                    assert tile is None or tile.rows >= rows
                assert tiled_tile(capability, n, k, rows).rows >= 16
                gated_tiled = gated_tile(capability, n, rows)
                assert gated_tiled is None or gated_tiled.columns >= 16
                middle = middle_tile(capability, n, k, rows)
                assert middle is None or middle.rows >= rows
    assert not cublas_is_invariant((8, 9))
    assert cublas_is_invariant((9, 0))


@pytest.mark.parametrize(("k", "gated"), [(1024, False), (2048, False), (3072, False), (1024, True)])
def test_slabs_are_for_few_rows_on_hopper_and_later(k: int, gated: bool) -> None:
    for rows in range(1, MAX_SLAB_ROWS + 1):
        for capability in ((0, 0), (8, 0), (8, 6), (8, 9), (12, 0)):
            assert slab_tile(capability, 1024, k, rows, gated=gated) is None
        for capability in ((9, 0), (10, 0)):
            tile = slab_tile(capability, 1024, k, rows, gated=gated)
            assert tile is not None
            assert tile.rows >= rows
            assert tile.piece * tile.pieces == k
            # What one program holds, weights and x, is at most what a Hopper's multiprocessor has.
            assert 2 * k * ((1 + gated) * tile.columns + tile.rows) <= 227 << 10
    assert slab_tile((9, 0), 1024, k, MAX_SLAB_ROWS + 1, gated=gated) is None
    assert slab_tile((9, 0), 1024, k + 16, 1, gated=gated) is None


@pytest.mark.parametrize(
    ("n", "k", "gated"), [(4096, 1024, False), (1024, 2048, False), (1024, 3072, False), (3072, 1024, True)]
)
def test_wide_tiles_run_all_at_once_on_hopper(n: int, k: int, gated: bool) -> None:
    for rows in (65, 96, 128, 129, 200, MAX_WIDE_ROWS):
        for capability in ((0, 0), (8, 0), (8, 9), (10, 0), (12, 0)):
            assert wide_tile(capability, n, k, rows, gated=gated) is None
        tile = wide_tile((9, 0), n, k, rows, gated=gated)
        assert tile is not None
        programs = -(-rows // tile.rows) * -(-n // tile.columns)
        shared = 2 * 64 * tile.stages * (tile.rows + (1 + gated) * tile.columns)
        assert shared <= 220 << 10
        assert programs <= 132 * ((227 << 10) // shared)
        assert programs <= 2 * 132
    assert wide_tile((9, 0), n, k, MAX_WIDE_ROWS + 1, gated=gated) is None
    assert wide_tile((9, 0), n, k + 16, 128, gated=gated) is None
    # Most of what is bound by its weights' way from memory is left to cuBLAS.
    assert wide_tile((9, 0), 6144, 4096, 256, gated=False) is None
    assert wide_tile((9, 0), 4096, 4096, 192, gated=False) is None
    assert wide_tile((9, 0), 4096, 4096, 256, gated=False) == WideTile(128, 64, 8)
    assert wide_tile((9, 0), 14336, 4096, 65, gated=True) is None
    assert wide_tile((9, 0), 14336, 4096, 64, gated=True) == WideTile(64, 64, 8)


def test_cublas_settings_can_be_put_back() -> None:
    program = """
import os, torch
from octavo.kernels.linear import configure_cublas
matmul = torch.backends.cuda.matmul
def settings():
    return (str(torch.backends.cuda.preferred_blas_library()), matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction, matmul.allow_tf32)
matmul.allow_tf32 = True
before = settings()
restore = configure_cublas()
assert settings() == ("_BlasBackend.Cublaslt", False, False, False), settings()
assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "1"
second = configure_cublas()
held = settings()
restore()
restore()
assert settings() == held, "the second caller still computes"
second()
assert settings() == before, settings()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
