"""The decoder's operations on a CPU: the extension's kernels, called by address."""

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
from octavo.layers.operations import IntArray, StepInputs
from octavo.layers.spec import DecoderSpec
from octavo.layers.weights import Weights, to_float32

__all__ = ["MLP_ROWS", "STORAGE", "CpuKvCache", "CpuOperations", "check_kernels", "mapped_zeros"]

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


def check_kernels(spec: DecoderSpec) -> None:
    """Refuse shapes that the kernels do not have.

    Raises:
        UnsupportedModel: naming the shape.
    """
    if spec.head_dim % _HEAD_DIM_STEP or spec.head_dim > _MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"head_dim: heads of {spec.head_dim} channels are not supported; the kernels take multiples of "
            f"{_HEAD_DIM_STEP} up to {_MAX_HEAD_DIM}"
        )


class CpuKvCache:
    """Blocks of all layers; the order within a tile is the kernels' own.

    Attributes:
        layers: a layer's address.
        num_bytes: of all layers.
        populator: at work on the pages.
    """

    def __init__(self, spec: DecoderSpec, dtype: str, num_blocks: int, block_size: int) -> None:
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self._memory = mapped_zeros(shape, STORAGE[dtype])
        self.populator = Populator(self._memory)
        self.layers = [layer.ctypes.data for layer in self._memory]
        self.num_bytes = self._memory.nbytes

    def copy_blocks(self, sources: IntArray, destinations: IntArray, counts: None = None) -> None:
        """As `KvCache.copy_blocks`, of all that are given."""
        self._memory[:, destinations] = self._memory[:, sources]

    def close(self) -> None:
        """As `KvCache.close`."""
        self.populator.close()


class CpuOperations:
    """As `Operations`; a buffer is an address.

    Args:
        spec: the family.
        dtype: `bfloat16` or `float32`.
        block_size: tokens a block of the KV cache.
    """

    mlp_rows = MLP_ROWS

    def __init__(self, spec: DecoderSpec, dtype: str, block_size: int) -> None:
        self.spec = spec
        self.dtype = dtype
        self._hidden_size = spec.hidden_size
        self._eps = spec.norm_eps
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._block_size = block_size
        self._qkv_size = spec.qkv_size
        self._intermediate_size = spec.intermediate_size

    def memory(self, rows: int, columns: int, *, float32: bool = False) -> Array:
        """As `Operations.memory`, with pages resident once they are written."""
        return mapped_zeros((rows, columns), STORAGE["float32" if float32 else self.dtype])

    def place(self, array: Array) -> Array:
        """The array itself."""
        return array

    def buffer(self, memory: Array) -> int:
        """The array's address."""
        if not memory.flags.c_contiguous:
            raise ValueError("a buffer is contiguous")
        return memory.ctypes.data

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> _core.PackedLinear:
        """As `Operations.linear`; the parts' memory is let go once they are packed."""
        parts = [weights.get(f"{name}.weight") for name in names]
        packed = [(part.pointer, part.num_bytes, part.kind, part.shape[0]) for part in parts]
        width = parts[0].shape[1]
        if not bias:
            return _core.PackedLinear(packed, width, self.dtype)
        stacked = np.concatenate([to_float32(weights.get(f"{name}.bias")) for name in names])
        return _core.PackedLinear(packed, width, self.dtype, bias=stacked.ctypes.data)

    def kv_cache(self, num_blocks: int, block_size: int) -> CpuKvCache:
        """As `Operations.kv_cache`."""
        return CpuKvCache(self.spec, self.dtype, num_blocks, block_size)

    def norm(self, x: int, weight: int, out: int, rows: int) -> None:
        """As `Operations.norm`."""
        _core.cpu_rms_norm(x, weight, out, rows, self._hidden_size, self._eps, self.dtype)

    def add_norm(self, x: int, residual: int, weight: int, out: int, rows: int) -> None:
        """As `Operations.add_norm`."""
        _core.cpu_rms_norm(x, weight, out, rows, self._hidden_size, self._eps, self.dtype, residual=residual)

    def rope_and_cache(
        self, qkv: int, cache: int, cos_sin: int, q_norm: int | None, k_norm: int | None, inputs: StepInputs
    ) -> None:
        """As `Operations.rope_and_cache`."""
        rotary = self.spec.rotary
        _core.cpu_rope_and_cache(
            qkv,
            cache,
            inputs.positions,
            inputs.slot_mappings[0],
            cos_sin,
            inputs.num_tokens,
            *self._heads,
            rotary.dim,
            self._block_size,
            self.dtype,
            interleaved=rotary.interleaved,
            q_norm=q_norm or 0,
            k_norm=k_norm or 0,
            eps=self._eps,
        )

    def attention(self, qkv: int, out: int, cache: int, window: int, inputs: StepInputs) -> None:
        """As `Operations.attention`."""
        _core.cpu_attention(
            qkv,
            self._qkv_size,
            out,
            cache,
            inputs.block_tables[0],
            inputs.table_stride,
            inputs.rows,
            inputs.query_start,
            inputs.seq_lens,
            inputs.num_rows,
            *self._heads,
            self._block_size,
            self.spec.attention_scale,
            self.dtype,
            window=window,
            softcap=self.spec.attention_softcap,
        )

    def gated(self, linear: _core.PackedLinear, source: int, scratch: int, activated: int, rows: int) -> None:
        """As `Operations.gated`."""
        linear.forward(source, scratch, rows)
        _core.cpu_act_and_mul(scratch, activated, rows, self._intermediate_size, self.spec.activation, self.dtype)

    def scale(self, x: Array, factor: float) -> None:
        """As `Operations.scale`."""
        values = _widened(x)
        _store(values * np.float32(factor), x)

    def softcap(self, x: Array, cap: float) -> None:
        """As `Operations.softcap`."""
        values = _widened(x)
        _store(np.tanh(values / np.float32(cap)) * np.float32(cap), x)

    def gather(self, x: Array, indices: IntArray, out: Array) -> None:
        """As `Operations.gather`."""
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
