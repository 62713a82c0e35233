"""CUDA graphs of whole steps: one for each size of step, captured when the first step of it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from octavo.errors import EngineDead
from octavo.layers.backends.cuda_inputs import StepSize
from octavo.runner.device import WHOLE_DEVICE

if TYPE_CHECKING:
    from octavo.layers.backends.cuda_inputs import StepKind

__all__ = ["StepGraphs", "bucket_table", "buckets", "samples_bound", "step_sizes"]

_FIRST = (1, 2, 4, 8)
_ROWS = ((64, 8), (128, 16), (256, 32), (1 << 31, 64))
"""(rows, step): up to so many rows, sizes are so far apart."""

_FEW_SAMPLES = 8
_FINE = 256
"""Up to so many tokens sizes are those of rows, though there be fewer."""

_TOKENS = ((1024, 128), (4096, 256), (1 << 31, 512))
"""The same of tokens beyond the most rows."""


def buckets(max_num_seqs: int, max_tokens: int) -> list[int]:
    """The sizes to which steps are padded, rising.

    Up to the most rows they are close together, since every padded row costs a decode step; far beyond, only prompts
    fill a step, whose products are computed in tiles of 128 rows anyway.

    Args:
        max_num_seqs: rows of a step, at most; a size of its own.
        max_tokens: tokens of a step, at most; the last size.
    """
    sizes = {*_FIRST, max_num_seqs, max_tokens}
    size = _FIRST[-1]
    for steps, most in ((_ROWS, max(max_num_seqs, _FINE)), (_TOKENS, max_tokens)):
        while size < most:
            size += next(step for end, step in steps if size < end)
            sizes.add(size)
        size -= size % _TOKENS[0][1]
    return sorted(size for size in sizes if size <= max_tokens)


def bucket_table(sizes: list[int]) -> list[int]:
    """The smallest size that holds n, for every n from 0 to the largest size."""
    table = [sizes[0]]
    for size in sizes:
        table += [size] * (size + 1 - len(table))
    return table


def samples_bound(count: int, most: int) -> int:
    """To how many samples those of a step with prompt rows are padded: a few, or the most there may be.

    Each costs what a decode row costs in the last layer and the head, and a prompt's chunk has one at most.
    """
    return min(_FEW_SAMPLES, most) if count <= _FEW_SAMPLES else most


def step_sizes(max_num_seqs: int, max_tokens: int) -> list[StepSize]:
    """Every size of step that there can be, and so every graph; arguments as of `buckets`."""
    sizes = []
    for tokens in buckets(max_num_seqs, max_tokens):
        if tokens <= max_num_seqs:
            sizes += [StepSize("decode", tokens, tokens), StepSize("grouped", tokens, tokens)]
        most = min(tokens, max_num_seqs)
        for samples in sorted({samples_bound(1, most), most}):
            sizes += [StepSize("mixed", tokens, samples), StepSize("mixed_grouped", tokens, samples)]
    return sizes


class StepGraphs:
    """Runs steps on one stream, as graphs.

    The first step of each kind runs as it is: that loads its kernels and makes the libraries' workspaces. Every later
    size of that kind is captured when it first comes. Nothing but the capture itself is different about such a step.

    Args:
        step: launches all of a step of one size on the current stream, allocating nothing.

    Attributes:
        num_captured: graphs made so far.
    """

    def __init__(self, step: Callable[[StepSize], None]) -> None:
        self._step = step
        self._seen: set[StepKind] = set()
        self._graphs: dict[StepSize, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.num_captured = 0

    def run(self, size: StepSize) -> None:
        """Launch a step on the current stream.

        Raises:
            EngineDead: it could not be captured.
        """
        graph = self._graphs.get(size)
        if graph is None:
            if size.kind not in self._seen:
                self._step(size)
                self._seen.add(size.kind)
                return
            graph = self._graphs[size] = self._capture(size)
        graph.replay()

    def close(self) -> None:
        """Let go of the graphs."""
        self._graphs.clear()

    def _capture(self, size: StepSize) -> torch.cuda.CUDAGraph:
        with WHOLE_DEVICE:
            return self._capture_alone(size)

    def _capture_alone(self, size: StepSize) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Relaxed, for a kernel of this size alone may still have to be loaded. Not through `torch.cuda.graph`,
            # which waits for the device and collects garbage first.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                self._step(size)
            except BaseException:
                # To end a broken capture fails too, and says less of why.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise EngineDead(
                f"a {size.kind} step of {size.tokens} tokens could not be captured as a CUDA graph: {reason}"
            ) from error
        self.num_captured += 1
        return graph
