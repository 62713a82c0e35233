"""Which product the tables choose, and cuBLAS's settings."""

from __future__ import annotations

import subprocess
import sys

import pytest
from octavo.kernels.linear_tables import (
    MAX_SLAB_ROWS,
    MAX_WIDE_ROWS,
    WideTile,
    cublas_is_invariant,
    gated_tile,
    middle_tile,
    skinny_tile,
    slab_tile,
    tiled_tile,
    wide_tile,
)


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
