"""Copies whole blocks of the KV cache, in every layer at once, as the plan on the device says."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow

__all__ = ["NUM_COPIES", "compile_cases", "copy_blocks"]

NUM_COPIES = 5
"""Place of the number of copies among a plan's counts."""

_PARTS = 4
_BLOCK = 2048


@triton.jit
def _copy_blocks_kernel(
    cache_ptr,
    sources_ptr,
    destinations_ptr,
    counts_ptr,
    layer_words,
    COUNT: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of every block to copy in one layer, of a cache seen as 8-byte words."""
    follow(PDL)
    count = tl.load(counts_ptr + COUNT)
    if count > 0:
        cache = cache_ptr + tl.program_id(0).to(tl.int64) * layer_words
        part_words: tl.constexpr = (BLOCK_WORDS + PARTS - 1) // PARTS
        first = tl.program_id(1) * part_words
        end = tl.minimum(first + part_words, BLOCK_WORDS)
        for index in range(count):
            source = cache + tl.load(sources_ptr + index).to(tl.int64) * BLOCK_WORDS
            destination = cache + tl.load(destinations_ptr + index).to(tl.int64) * BLOCK_WORDS
            for start in range(first, end, BLOCK):
                words = start + tl.arange(0, BLOCK)
                value = tl.load(source + words, mask=words < end)
                tl.store(destination + words, value, mask=words < end)


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, counts: torch.Tensor) -> None:
    """Copy blocks in every layer; no destination is a source.

    Args:
        cache: [layers, num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous; a block of a layer is a multiple
            of 8 bytes.
        sources: int32 block ids, on the device.
        destinations: as sources.
        counts: int32, a plan's counts on the device; that at `NUM_COPIES` is how many blocks to copy.
    """
    words = cache.flatten(2).view(torch.int64)
    layers, num_blocks, block_words = words.shape
    launch(
        _copy_blocks_kernel,
        (layers, _PARTS),
        words,
        sources,
        destinations,
        counts,
        num_blocks * block_words,
        COUNT=NUM_COPIES,
        BLOCK_WORDS=block_words,
        PARTS=_PARTS,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """The cache of a model of 8 heads of 128 dimensions, blocks of 16."""
    arguments = {
        "cache_ptr": "*i64",
        "sources_ptr": "*i32",
        "destinations_ptr": "*i32",
        "counts_ptr": "*i32",
        "layer_words": "i64",
    }
    constants = {"COUNT": NUM_COPIES, "BLOCK_WORDS": 2 * 8 * 16 * 128 * 2 // 8, "PARTS": _PARTS, "BLOCK": _BLOCK}
    return [CompileCase(_copy_blocks_kernel, arguments, constants, num_warps=8, aligned=("layer_words",))]
