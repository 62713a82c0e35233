"""Weights from mapped files to a device, through a ring of pinned buffers.

Threads copy chunks of a tensor from the page cache, dequantizing what is quantized, into pinned memory, and queue its
way to the device on a stream of its own; what is stored in another dtype is converted there. So reading, copying and
converting overlap, and no more than the ring's memory is taken on the host. A buffer is filled again only when the
device has passed the event behind its last copy.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol, runtime_checkable

import torch

from octavo import _core
from octavo.errors import ModelError
from octavo.layers.parameter import WeightPart, Weights

__all__ = ["DrawsOnDevice", "stacked_weight"]

_CHUNK_BYTES = 8 << 20
_MAX_THREADS = 8
_BLOCK = 256
"""Elements that chunks are multiples of: every block type's size divides it."""

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DEQUANTIZED = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@runtime_checkable
class DrawsOnDevice(Protocol):
    """Weights that a device can make by itself."""

    def draw(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with the tensor of that name."""
        ...


def stacked_weight(weights: Weights, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Tensors stacked along their first axis, on a device; returns when the host's part of the work is done.

    What is launched on the current stream afterwards sees the values.

    Args:
        weights: where the tensors lie.
        names: of the tensors, whole (`model.layers.0.mlp.up_proj.weight`); their shapes differ in the first axis only.
        dtype: of the result, any floating-point one.
        device: where to; on `meta` nothing is read.

    Returns:
        [sum N_i, ...], contiguous.

    Raises:
        ModelError: tensors that do not stack, or whose bytes are not what their shape needs.
        UnsupportedModel: a tensor type that Octavo cannot convert.
        torch.OutOfMemoryError: the device is full.
    """
    shapes = [weights.describe(name)[1] for name in names]
    if any(shape[1:] != shapes[0][1:] for shape in shapes):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
        raise ModelError(f"the model's files hold tensors that cannot be stacked: {listed}")
    out = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=device)
    if device.type == "meta":
        return out
    slices = torch.split(out, [shape[0] for shape in shapes])
    if device.type == "cuda" and isinstance(weights, DrawsOnDevice):
        for name, target in zip(names, slices, strict=True):
            weights.draw(name, target)
        return out
    _ring(weights, out.device).upload([(name, weights.get(name)) for name in names], slices)
    return out


class _Slot:
    """One staging buffer.

    Attributes:
        staging: uint8, pinned where the device is not the host.
        scratch: uint8 on the device, for what is converted there; made when it is first needed.
        done: the event behind the last copy; None when there is none.
    """

    def __init__(self, pinned: bool) -> None:
        self.staging = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self.scratch: torch.Tensor | None = None
        self.done: torch.cuda.Event | None = None


class _Ring:
    """The staging buffers and threads of one device.

    Args:
        device: a CUDA device, or the CPU, where the same copies are made without a stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        # Half as many again as threads: none waits for the device while it keeps up.
        for _ in range(threads + (threads + 1) // 2):
            self._free.put(_Slot(self._cuda))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="octavo-upload")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    def upload(self, parts: Sequence[tuple[str, WeightPart]], targets: Sequence[torch.Tensor]) -> None:
        """Copy each part into its contiguous target of as many elements.

        Nothing of an upload that fails is left running.
        """
        if self._stream is not None:
            # The targets' memory may have had another use on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        futures = []
        try:
            for (name, part), target in zip(parts, targets, strict=True):
                flat = target.view(-1)
                _check(name, part, flat.numel())
                for start, stop in _chunks(part, flat.numel(), flat.dtype):
                    futures.append(self._threads.submit(self._chunk, part, flat[start:stop], start))
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)
            if self._stream is not None:
                self._stream.synchronize()
            raise
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _chunk(self, part: WeightPart, target: torch.Tensor, start: int) -> None:
        """Fill `target` with the elements of `part` from `start` on."""
        slot = self._free.get()
        try:
            if slot.done is not None:
                slot.done.synchronize()
            staged = _stage(part, start, target, slot.staging)
            if self._stream is None:
                target.copy_(staged)
                return
            with torch.cuda.stream(self._stream):
                if staged.dtype != target.dtype:
                    if slot.scratch is None:
                        slot.scratch = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=self._device)
                    moved = slot.scratch.view(staged.dtype)[: staged.numel()]
                    moved.copy_(staged, non_blocking=True)
                    staged = moved
                target.copy_(staged, non_blocking=True)
                if slot.done is None:
                    slot.done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                slot.done.record(self._stream)
        finally:
            self._free.put(slot)


def _check(name: str, part: WeightPart, count: int) -> None:
    """Whether the part's bytes hold so many elements."""
    stored = _STORED.get(part.kind)
    if math.prod(part.shape) != count or (stored is not None and part.num_bytes != count * stored.itemsize):
        raise ModelError(f"{name}: {part.num_bytes} bytes are not {count} elements of {part.kind}")


def _staged_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Content of a staging buffer: stored or dequantized numbers."""
    stored = _STORED.get(kind)
    if stored is not None:
        return stored
    return dtype if dtype in _DEQUANTIZED else torch.float32


def _chunks(part: WeightPart, count: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) that fit a staging buffer, whole blocks each."""
    step = _CHUNK_BYTES // _staged_dtype(part.kind, dtype).itemsize // _BLOCK * _BLOCK
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _stage(part: WeightPart, start: int, target: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """The part's elements from `start` on, as many as the target has, in the staging buffer; without the GIL."""
    dtype, count = _staged_dtype(part.kind, target.dtype), target.numel()
    staged = staging.view(dtype)[:count]
    total = math.prod(part.shape)
    # Blocks are of one size, and chunks of whole blocks: both divisions are exact.
    first, last = start * part.num_bytes // total, (start + count) * part.num_bytes // total
    source = part.pointer + first
    if part.kind in _STORED:
        ctypes.memmove(staged.data_ptr(), source, last - first)
    else:
        _core.dequantize(source, last - first, part.kind, staged.data_ptr(), count, _DEQUANTIZED[dtype])
    return staged


_RINGS: weakref.WeakKeyDictionary[Weights, dict[torch.device, _Ring]] = weakref.WeakKeyDictionary()


def _ring(weights: Weights, device: torch.device) -> _Ring:
    """The ring that loads these weights; it lives as long as they do, and so takes no memory in service."""
    rings = _RINGS.setdefault(weights, {})
    if device not in rings:
        ring = rings[device] = _Ring(device)
        weakref.finalize(weights, ring.close)
    return rings[device]
