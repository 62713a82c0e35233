"""Counts of a sequence's tokens, for its penalties."""

from __future__ import annotations

import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow
from torch import Tensor

__all__ = ["PROMPT_BIT", "compile_cases", "count_history"]

PROMPT_BIT = 1 << 30
"""Set in the count of a token that the prompt holds."""

_HISTORY_BLOCK = 1024


@triton.jit(do_not_specialize=["slot", "length", "prompt_length", "vocab_size"])
def _count_history_kernel(
    tokens,
    token_counts,
    slot,
    length,
    prompt_length,
    vocab_size,
    PROMPT_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the row is cleared before it is counted into."""
    follow(PDL)
    lanes = tl.arange(0, BLOCK)
    row = token_counts + tl.cast(slot, tl.int64) * vocab_size
    for start in range(0, vocab_size, BLOCK):
        i = start + lanes
        tl.store(row + i, tl.zeros_like(i), mask=i < vocab_size)
    tl.debug_barrier()
    for start in range(0, length, BLOCK):
        i = start + lanes
        given = i < length
        token = tl.load(tokens + i, mask=given, other=0)
        in_prompt = i < prompt_length
        tl.atomic_or(row + token, tl.full([BLOCK], PROMPT_BIT, tl.int32), mask=given & in_prompt)
        tl.atomic_add(row + token, tl.full([BLOCK], 1, tl.int32), mask=given & (i >= prompt_length))


def count_history(tokens: Tensor, token_counts: Tensor, slot: int, prompt_length: int) -> None:
    """Count a sequence's tokens for its penalties, anew.

    Args:
        tokens: int32[n], prompt and output so far; pinned where the counts are on a GPU.
        token_counts: int32[max_num_seqs, vocab_size]; row `slot` becomes the output's counts, with `PROMPT_BIT` set
            where the prompt holds the token.
        slot: of the sequence.
        prompt_length: tokens of the prompt.
    """
    launch(
        _count_history_kernel,
        (1,),
        tokens,
        token_counts,
        slot,
        tokens.shape[0],
        prompt_length,
        token_counts.shape[1],
        PROMPT_BIT=PROMPT_BIT,
        BLOCK=_HISTORY_BLOCK,
        num_warps=8,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """The kernel once: what it compiles to does not depend on the model."""
    del capability
    arguments = dict.fromkeys(("tokens", "token_counts"), "*i32")
    arguments |= dict.fromkeys(("slot", "length", "prompt_length", "vocab_size"), "i32")
    constants = {"PROMPT_BIT": PROMPT_BIT, "BLOCK": _HISTORY_BLOCK}
    return [CompileCase(_count_history_kernel, arguments, constants, num_warps=8)]
