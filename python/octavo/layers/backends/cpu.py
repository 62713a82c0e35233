"""The CPU backend: the extension's kernels, called by address."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import _core
from octavo.errors import UnsupportedModel
from octavo.layers.backend import AttentionSpec, IntArray, StepInputs
from octavo.layers.decoder import Decoder
from octavo.layers.kv_cache import KvCacheLayout
from octavo.layers.parameter import Weights, to_float32

__all__ = ["MLP_ROWS", "STORAGE", "CpuBackend", "CpuKvCache", "check_kernels", "mapped_zeros"]

Array = npt.NDArray[Any]

MLP_ROWS = 128
"""Few enough that gate and up of the slice stay in the second-level cache, enough that reading weights costs little."""

_HEAD_DIM_STEP, _MAX_HEAD_DIM = 16, 256

STORAGE: dict[str, npt.DTypeLike] = {"float32": np.float32, "bfloat16": np.uint16}
"""numpy's type of the same width: it has no bfloat16, and nothing here computes with it."""


def mapped_zeros(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """An array of zeros in pages of its own, huge ones where the system has them.

    Pages become resident when they are written.

    Raises:
        MemoryError: the system refuses.
    """
    count = math.prod(shape)
    try:
        size = max(count * np.dtype(dtype).itemsize, 1)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without huge pages it is slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(shape)


class Populator:
    """Makes an array's pages resident in the background, so that no step waits for them.

    What was planned is then really there: memory that is not ends the engine at its start, not in service. A system
    that cannot (before Linux 5.14) leaves the pages to their first writing.
    """

    _CHUNK = 32 << 20
    _MADV_POPULATE_WRITE = 23

    def __init__(self, array: Array) -> None:
        self._array = array
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-populate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        start, size = self._array.ctypes.data, self._array.nbytes
        for offset in range(0, size, self._CHUNK):
            if self._stop.is_set():
                return
            if madvise(start + offset, min(self._CHUNK, size - offset), self._MADV_POPULATE_WRITE):
                return

    def wait(self) -> None:
        """Until every page is resident."""
        self._thread.join()

    def close(self) -> None:
        """Stop before the array goes."""
        self._stop.set()
        self._thread.join()


def check_kernels(decoder: Decoder) -> None:
    """Refuse shapes that the kernels do not have.

    Raises:
        UnsupportedModel: names the shape.
    """
    for block in decoder.blocks:
        head_dim = block.attention.spec.head_dim
        if head_dim % _HEAD_DIM_STEP or head_dim > _MAX_HEAD_DIM:
            raise UnsupportedModel(
                f"head_dim: heads of {head_dim} channels are not supported; the kernels take multiples of "
                f"{_HEAD_DIM_STEP} up to {_MAX_HEAD_DIM}"
            )


class CpuKvCache:
    """The KV cache in host memory; the order within a tile is the kernels' own.

    Attributes:
        layers: address of each layer's blocks.
        num_bytes: of the whole cache.
        populator: makes the pages resident.
    """

    def __init__(self, layout: KvCacheLayout, dtype: str, num_blocks: int, block_size: int) -> None:
        self._memory = mapped_zeros(layout.shape(num_blocks, block_size), STORAGE[dtype])
        self.populator = Populator(self._memory)
        self.layers = [self._memory[place].ctypes.data for _, place in layout.places]
        self.num_bytes = self._memory.nbytes

    def copy_blocks(self, sources: IntArray, destinations: IntArray, counts: None = None) -> None:
        """Copy whole blocks; see `KvCache.copy_blocks`."""
        self._memory[:, destinations] = self._memory[:, sources]

    def close(self) -> None:
        """Stop making pages resident."""
        self.populator.close()


class CpuAttention:
    """The kernels of one layer's attention; see `AttentionKernels`."""

    def __init__(self, spec: AttentionSpec, dtype: str, block_size: int) -> None:
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._qkv_size = spec.qkv_size
        self._rotary_dim = spec.rotary_dim
        self._eps = spec.norm_eps
        self._scale = spec.scale
        self._softcap = spec.softcap
        self._window = spec.window
        self._dtype = dtype
        self._block_size = block_size

    def rope_and_cache(
        self,
        qkv: int,
        cache: int,
        cos_sin: int,
        q_norm: int | None,
        k_norm: int | None,
        inputs: StepInputs,
        group: int,
    ) -> None:
        """Head norms, rotation, and keys and values into their slots."""
        _core.cpu_rope_and_cache(
            qkv,
            cache,
            inputs.positions,
            inputs.slot_mappings[group],
            cos_sin,
            inputs.num_tokens,
            *self._heads,
            self._rotary_dim,
            self._block_size,
            self._dtype,
            q_norm=q_norm or 0,
            k_norm=k_norm or 0,
            eps=self._eps,
        )

    def attend(self, qkv: int, out: int, cache: int, inputs: StepInputs, group: int) -> None:
        """Causal attention over the cached blocks."""
        _core.cpu_attention(
            qkv,
            self._qkv_size,
            out,
            cache,
            inputs.block_tables[group],
            inputs.table_stride,
            inputs.rows,
            inputs.query_start,
            inputs.seq_lens,
            inputs.num_rows,
            *self._heads,
            self._block_size,
            self._scale,
            self._dtype,
            window=self._window,
            softcap=self._softcap,
        )


class CpuBackend:
    """The CPU as a backend; a buffer is an address.

    Args:
        dtype: `bfloat16` or `float32`.
        block_size: tokens a block of the KV cache.
    """

    mlp_rows = MLP_ROWS

    def __init__(self, dtype: str, block_size: int) -> None:
        self.dtype = dtype
        self.loaded_bytes = 0
        self._block_size = block_size

    def empty(self, size: int, *, float32: bool = False) -> Array:
        """An array whose pages become resident when they are written."""
        return mapped_zeros((size,), STORAGE["float32" if float32 else self.dtype])

    def to_device(self, array: Array) -> Array:
        """The array itself."""
        self.loaded_bytes += array.nbytes
        return array

    def buffer(self, memory: Array) -> int:
        """The array's address."""
        if not memory.flags.c_contiguous:
            raise ValueError("a buffer is contiguous")
        return memory.ctypes.data

    def round(self, value: float) -> float:
        """The nearest value that the model's dtype holds."""
        values = np.array([value], dtype=np.float32)
        stored = np.empty(1, dtype=STORAGE[self.dtype])
        _store(values, stored)
        return float(_widened(stored)[0])

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> _core.PackedLinear:
        """A packed dense layer; the parts' memory is released once they are packed."""
        parts = [weights.get(f"{name}.weight") for name in names]
        packed = [(part.pointer, part.num_bytes, part.kind, part.shape[0]) for part in parts]
        width = parts[0].shape[1]
        if bias:
            stacked = np.concatenate([to_float32(weights.get(f"{name}.bias")) for name in names])
            product = _core.PackedLinear(packed, width, self.dtype, bias=stacked.ctypes.data)
        else:
            product = _core.PackedLinear(packed, width, self.dtype)
        self.loaded_bytes += product.num_bytes
        return product

    def attention(self, spec: AttentionSpec) -> CpuAttention:
        """The kernels of a layer's attention."""
        return CpuAttention(spec, self.dtype, self._block_size)

    def kv_cache(self, layout: KvCacheLayout, num_blocks: int, block_size: int) -> CpuKvCache:
        """Zeroed blocks."""
        return CpuKvCache(layout, self.dtype, num_blocks, block_size)

    def norm(self, x: int, weight: int, out: int, rows: int, size: int, eps: float) -> None:
        """Out = rms_norm(x) * weight."""
        _core.cpu_rms_norm(x, weight, out, rows, size, eps, self.dtype)

    def add_norm(
        self,
        x: int,
        residual: int,
        weight: int,
        out: int,
        rows: int,
        size: int,
        eps: float,
        post_weight: int | None = None,
    ) -> None:
        """Residual += x, out = rms_norm(residual) * weight; x is normed first where `post_weight` is given."""
        if post_weight is not None:
            _core.cpu_rms_norm(x, post_weight, x, rows, size, eps, self.dtype)
        _core.cpu_rms_norm(x, weight, out, rows, size, eps, self.dtype, residual=residual)

    def gated_mlp(
        self,
        product: _core.PackedLinear,
        source: int,
        scratch: int,
        activated: int,
        rows: int,
        size: int,
        activation: str,
    ) -> None:
        """Activated = activation(gate) * up."""
        product.forward(source, scratch, rows)
        _core.cpu_act_and_mul(scratch, activated, rows, size, activation, self.dtype)

    def scale(self, x: Array, factor: float) -> None:
        """X *= factor, in place."""
        values = _widened(x)
        _store(values * np.float32(factor), x)

    def softcap(self, x: Array, cap: float) -> None:
        """X = cap * tanh(x / cap), in place."""
        values = _widened(x)
        _store(np.tanh(values / np.float32(cap)) * np.float32(cap), x)

    def gather(self, x: Array, indices: IntArray, out: Array) -> None:
        """out[i] = x[indices[i]]."""
        # Without a mode numpy goes through a copy of the output.
        np.take(x, indices, axis=0, out=out, mode="clip")


def _widened(x: Array) -> npt.NDArray[np.float32]:
    """float32 values of stored ones."""
    if x.dtype == np.float32:
        return x
    widened: npt.NDArray[np.float32] = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return widened


def _store(values: npt.NDArray[np.float32], out: Array) -> None:
    """Round to nearest even where the storage is bfloat16."""
    if out.dtype == np.float32:
        out[...] = values
        return
    bits = values.view(np.uint32)
    out[...] = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
