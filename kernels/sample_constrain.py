"""What rows may choose of: masks and biases of their logits, in one launch before all else that sampling does.

A mask is read where the host left it, in pinned memory: 256 rows of 151,936 tokens are 4.9 MB. Where a mask and a bias
meet in a logit, two programs change it, in either order: one stores -inf, the other adds to what is there, atomically,
and both leave -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import await_previous, start_next
from torch import Tensor

__all__ = ["compile_cases", "constrain"]

_PROGRAMS = 264
"""Two for each multiprocessor of a large card: enough reads of the host's memory are then on their way."""

_WARPS = 4
_WORDS = 128
_BIASES = 128


@triton.jit
def _load_words(masks, item, num_items, parts, num_words, WORDS: tl.constexpr):
    """int32 [WORDS] of one part of a mask; 0 past its end, and where there is no such item."""
    word = item % parts * WORDS + tl.arange(0, WORDS)
    mask = masks + (item // parts).to(tl.int64) * num_words
    return tl.load(mask + word, mask=(word < num_words) & (item < num_items), other=0)


# That rows begin at multiples of 16 bytes would have a thread store four neighbours, one after the other as each has a
# bit of its own, and a warp's stores would lie apart.
@triton.jit(do_not_specialize=["mask_rows", "vocab_size"])
def _constrain_kernel(
    logits,
    counts,
    turn,
    mask_logits,
    masks,
    bias_logits,
    bias_tokens,
    bias_values,
    mask_rows,
    vocab_size,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs take parts of masks, and biases, until there are no more. Grid (any,)."""
    start_next(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    num_words = tl.cdiv(vocab_size, 32)
    parts = tl.cdiv(num_words, WORDS)
    # All of this is the plan's, or the host's, and there before the logits are.
    num_logits, num_biases = tl.load(counts + 3), tl.load(counts + 7)
    num_items = tl.load(counts + 12) * parts
    masks += tl.load(turn).to(tl.int64) * mask_rows * num_words
    words = _load_words(masks, program, num_items, parts, num_words, WORDS)
    await_previous(PDL)
    for item in range(program, num_items, programs):
        # The next part is on its way while this one is worked on.
        next_words = _load_words(masks, item + programs, num_items, parts, num_words, WORDS)
        row = tl.load(mask_logits + item // parts)
        word = item % parts * WORDS + tl.arange(0, WORDS)
        bit = tl.arange(0, 32)[None, :]
        token = word[:, None] * 32 + bit
        refused = ((words[:, None] >> bit) & 1) == 0
        place = logits + row.to(tl.int64) * vocab_size + token
        tl.store(place, float("-inf"), mask=refused & (token < vocab_size) & (row < num_logits))
        words = next_words
    for start in range(program * BIASES, num_biases, programs * BIASES):
        bias = start + tl.arange(0, BIASES)
        given = bias < num_biases
        row = tl.load(bias_logits + bias, mask=given, other=0)
        token = tl.load(bias_tokens + bias, mask=given, other=0)
        value = tl.load(bias_values + bias, mask=given, other=0).to(tl.float32, bitcast=True)
        inside = given & (row < num_logits) & (token < vocab_size)
        place = logits + row.to(tl.int64) * vocab_size + token
        banned = value == float("-inf")
        # Not by a sum, which infinity would not give in to.
        tl.store(place, value, mask=inside & banned)
        tl.atomic_add(place, value, mask=inside & (banned == 0), sem="relaxed")


def constrain(
    logits: Tensor,
    counts: Tensor,
    turn: Tensor,
    mask_logits: Tensor,
    masks: Tensor,
    bias_logits: Tensor,
    bias_tokens: Tensor,
    bias_values: Tensor,
    *,
    rows: int,
) -> None:
    """Hold rows of logits to masks, and change single logits; as `reference.constrain`.

    One launch, which does next to nothing where counts[8] and counts[13] are 0.

    Args:
        logits: float32 [>= rows, vocab_size], contiguous, changed in place.
        counts: int32 [16], the step's counts: [3] rows, [8] biases, [13] masks.
        turn: int32 [1], the arena of the step.
        mask_logits: int32 [>= counts[13]], row of each mask; no row twice.
        masks: int32 [arenas, >= counts[13], ceil(vocab_size / 32)], pinned where the logits are on a GPU: bit t % 32 of
            word t // 32 of the k-th row is set where the k-th masked row may have token t.
        bias_logits: int32 [>= counts[8]], row of each bias.
        bias_tokens: int32 [>= counts[8]], its token; no row and token twice.
        bias_values: int32 [>= counts[8]], the bits of the float32 that is added to its logit; -inf makes any logit
            -inf. Sums below 1.2e-38 become 0.
        rows: the most rows that counts[3] can say, as padded; bounds the launch.
    """
    vocab_size = logits.shape[1]
    parts = triton.cdiv(masks.shape[2], _WORDS)
    launch(
        _constrain_kernel,
        (min(rows * parts, _PROGRAMS),),
        logits,
        counts,
        turn,
        mask_logits,
        masks,
        bias_logits,
        bias_tokens,
        bias_values,
        masks.shape[1],
        vocab_size,
        WORDS=_WORDS,
        BIASES=_BIASES,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """The one kernel of all vocabularies."""
    constants = {"WORDS": _WORDS, "BIASES": _BIASES}
    arguments = dict.fromkeys(_constrain_kernel.arg_names, "*i32") | {"logits": "*fp32"}
    arguments |= dict.fromkeys(("mask_rows", "vocab_size"), "i32")
    for name in (*constants, "PDL"):
        del arguments[name]
    return [CompileCase(_constrain_kernel, arguments, constants, num_warps=_WARPS)]
