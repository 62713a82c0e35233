"""Dense layers on a GPU: which product of ours or of cuBLAS computes one, with one arithmetic at every row count."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch
from octavo.kernels.activation import act_and_mul
from octavo.kernels.gluon_support import gluon_serves
from octavo.kernels.launch import compiling
from octavo.kernels.linear_skinny import skinny_gated, skinny_product
from octavo.kernels.linear_tables import (
    SlabTile,
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

__all__ = ["Dense", "configure_cublas"]

_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
_REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def configure_cublas() -> Callable[[], None]:
    """Hold cuBLAS to one arithmetic: no split of K and float32 sums, so that a row's bits do not depend on the others.

    For the process. The workspaces' sizes are read from the environment when the first cuBLAS handle is made, so call
    this before any product on the GPU; with room for nothing, no kernel that needs a workspace to split K is chosen.

    Returns:
        To be called when the caller computes no more. Once all callers have done so, torch's settings are put back as
        they were before the first (the environment stays).
    """
    caller = object()
    with _CALLERS.lock:
        put_back = _apply_settings()
        if not _CALLERS.active:
            _CALLERS.put_back = put_back
        _CALLERS.active.add(caller)

    def release() -> None:
        with _CALLERS.lock:
            if caller in _CALLERS.active:
                _CALLERS.active.remove(caller)
                if not _CALLERS.active:
                    _CALLERS.put_back()

    return release


class _Callers:
    """Who relies on the settings of the process, and what puts the former ones back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active: set[object] = set()
        self.put_back: Callable[[], None] = lambda: None


_CALLERS = _Callers()


def _apply_settings() -> Callable[[], None]:
    """Change the settings; what is returned changes them back."""
    os.environ.update(_ENVIRONMENT)
    matmul = torch.backends.cuda.matmul
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)) for name in _REDUCED}
    library = _blas_library()
    tf32 = matmul.allow_tf32
    # A pair, of reduced sums and of the split of K, since torch 2.10.
    pairs = hasattr(matmul, f"{_REDUCED[0]}_split_k")

    def apply(reduced: dict[str, tuple[bool, bool]], library: str, tf32: bool) -> None:
        # Choosing one, even the same, prints a warning.
        if library != _blas_library():
            torch.backends.cuda.preferred_blas_library(library)
        for name, pair in reduced.items():
            setattr(matmul, name, pair if pairs else pair[0])
        matmul.allow_tf32 = tf32

    apply(dict.fromkeys(_REDUCED, (False, False)), "cublaslt", False)
    return lambda: apply(before, library, tf32)


def _blas_library() -> str:
    """The library for products, in torch's words: `cublas` or `cublaslt`."""
    return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()


class Dense:
    """A dense layer y = x @ weight.T + bias.

    Every way of computing it that a card uses sums K in order, 16 at a time, in float32, so that a row's bits are the
    same at every number of rows. float32 weights go to cuBLAS, whose float32 kernels promise no such thing.

    Attributes:
        weight: [N, K].
        bias: [N] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take the tensors as they are.

        Args:
            weight: [N, K], contiguous, float32, bfloat16 or float16.
            bias: [N] of the same dtype, or None.
        """
        self.weight = weight
        self.bias = bias
        self._transposed = weight.t()
        # A tensor in no memory stands for one on the card in use.
        on_card = weight.device.type != "cpu" and torch.cuda.is_available()
        self._capability = torch.cuda.get_device_capability() if on_card else (0, 0)
        self._ours = weight.dtype != torch.float32 and not cublas_is_invariant(self._capability)

    @property
    def num_bytes(self) -> int:
        """Memory the layer takes."""
        return sum(tensor.nbytes for tensor in (self.weight, self.bias) if tensor is not None)

    def forward(self, x: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """Store x @ weight.T + bias of the first rows.

        Args:
            x: [rows or more, K], contiguous.
            out: [rows or more, N], contiguous, of x's dtype or float32, which takes the sums unrounded.
            rows: to compute; a graph's bucket, so the way is chosen once a graph.
        """
        n, k = self.weight.shape
        half = self.weight.dtype != torch.float32
        slab = self._slab_tile(n, k, rows, gated=False) if half else None
        wide = self._wide_tile(n, k, rows, gated=False) if half else None
        tile = skinny_tile(self._capability, n, k, rows, gated=False) if half else None
        tiled = middle_tile(self._capability, n, k, rows) if half else None
        if self._ours:
            tiled = tiled_tile(self._capability, n, k, rows)
        if slab is not None:
            from octavo.kernels.linear_slab import slab_product

            slab_product(x, self.weight, self.bias, out, rows, slab)
        elif wide is not None:
            from octavo.kernels.linear_hopper import wide_product

            wide_product(x, self.weight, self.bias, out, rows, wide)
        elif tile is not None:
            skinny_product(x, self.weight, self.bias, out, rows, tile)
        elif tiled is not None:
            tiled_product(x, self.weight, self.bias, out, rows, tiled)
        elif not compiling():
            self._cublas(x[:rows], out[:rows])

    def gated(self, x: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor, rows: int, activation: str) -> None:
        """Store activation(gate) * up of the first rows, gate and up being the halves of the layer's product.

        Gate and up are rounded to x's dtype first, whether one kernel or two compute this: the bits are the same.

        Args:
            x: [rows or more, K], contiguous.
            scratch: [rows or more, N], contiguous, of x's dtype; what it holds afterwards is not defined.
            out: [rows or more, N / 2], contiguous, of x's dtype.
            rows: to compute.
            activation: "silu", "gelu" or "gelu_tanh".
        """
        n, k = self.weight.shape
        slab = wide = tile = tiled = None
        if self.weight.dtype != torch.float32 and self.bias is None:
            slab = self._slab_tile(n // 2, k, rows, gated=True)
            wide = self._wide_tile(n // 2, k, rows, gated=True)
            tile = skinny_tile(self._capability, n // 2, k, rows, gated=True)
            tiled = gated_tile(self._capability, n // 2, rows)
        if slab is not None:
            from octavo.kernels.linear_slab import slab_gated

            slab_gated(x, self.weight, out, rows, slab, activation)
        elif wide is not None:
            from octavo.kernels.linear_hopper import wide_gated

            wide_gated(x, self.weight, out, rows, wide, activation)
        elif tile is not None:
            skinny_gated(x, self.weight, out, rows, tile, activation)
        elif tiled is not None:
            tiled_gated(x, self.weight, out, rows, tiled, activation)
        else:
            self.forward(x, scratch, rows)
            act_and_mul(scratch, out, rows, activation)

    def _slab_tile(self, n: int, k: int, rows: int, *, gated: bool) -> SlabTile | None:
        """As `slab_tile`, where this Triton has what its kernel takes."""
        tile = slab_tile(self._capability, n, k, rows, gated=gated)
        return tile if tile is not None and gluon_serves() else None

    def _wide_tile(self, n: int, k: int, rows: int, *, gated: bool) -> WideTile | None:
        """As `wide_tile`, likewise."""
        tile = wide_tile(self._capability, n, k, rows, gated=gated)
        return tile if tile is not None and gluon_serves() else None

    def _cublas(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if out.dtype != x.dtype:
            torch.mm(x, self._transposed, out_dtype=out.dtype, out=out)
            if self.bias is not None:
                out += self.bias
        elif self.bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self.bias, x, self._transposed, out=out)
