"""The one reading of all logits: maxima and masses of parts of each row, and the draw of rows without limits."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.noise import gumbel, gumbel_bound, noise_bits, noise_keys
from octavo.kernels.overlap import follow
from octavo.kernels.sample_row import (
    HAS_PENALTIES,
    NO_ID,
    PARAM_WORDS,
    WANTS_LOGPROBS,
    float_word,
    is_drawn,
    penalized,
    row_values,
    wants_thresholds,
)

__all__ = ["SampleTiles", "compile_cases", "reduce_blocks_kernel"]


@dataclass(frozen=True)
class SampleTiles:
    """How the kernels cut a row; powers of two but for the stages.

    Attributes:
        sub: logits that share a maximum.
        subs: these parts in a block that one program reduces.
        part: these parts that it works on at a time.
        stages: of its pipelined loads.
        warps: of its program.
        visited: logits of the parts that one pass over a row with limits takes at a time; at least sub.
        found: candidates that are searched in registers.
    """

    sub: int = 128
    subs: int = 32
    part: int = 4
    stages: int = 4
    warps: int = 4
    visited: int = 2048
    found: int = 4096

    def num_blocks(self, vocab_size: int) -> int:
        """Blocks of a row."""
        return -(-vocab_size // (self.sub * self.subs))


@triton.jit
def _scores(row_logits, row_counts, words, token_ids, mask, first, second, maximum, inverse, HAS_COUNTS: tl.constexpr):
    """(logit - maximum) * inverse plus noise of int32 token ids; -inf where masked and where the logit is."""
    x = row_values(row_logits, row_counts, words, token_ids, mask, HAS_COUNTS)
    score = (x - maximum) * inverse + gumbel(noise_bits(token_ids, first, second))
    return tl.where(x > float("-inf"), score, float("-inf"))


@triton.jit
def _draw_block(
    row_logits,
    row_counts,
    words,
    position,
    start,
    maximum,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    SUB: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """The best of (logit - maximum) times the inverse temperature, plus noise, of the block from start on, and its id.

    A lane bounds the scores of its tokens, which takes less than half of the work, and scores the one of the highest
    bound. No other token is the best while its bound is below the best of these; where one is not, about once in two
    thousand blocks, all are scored. The logits come out of the L1 cache a second time.
    """
    first, second = noise_keys(tl.load(words + 7), tl.load(words + 8), tl.load(words + 9), position)
    inverse = tl.div_rn(1.0, float_word(words, 0))
    place = tl.arange(0, PART)[:, None] * SUB + tl.arange(0, SUB)[None, :]
    highest = tl.full([PART, SUB], float("-inf"), tl.float32)
    highest_ids = tl.full([PART, SUB], NO_ID, tl.int32)
    others = tl.full([PART, SUB], float("-inf"), tl.float32)
    for part in range(start, start + BLOCK, PART * SUB):
        token_ids = part + place
        x = row_values(row_logits, row_counts, words, token_ids, token_ids < VOCAB, HAS_COUNTS)
        bound = (x - maximum) * inverse + gumbel_bound(noise_bits(token_ids, first, second))
        others = tl.maximum(others, tl.minimum(bound, highest))
        highest_ids = tl.where(bound > highest, token_ids, highest_ids)
        highest = tl.maximum(highest, bound)
    scores = _scores(
        row_logits, row_counts, words, highest_ids, highest_ids != NO_ID, first, second, maximum, inverse, HAS_COUNTS
    )
    best = tl.max(tl.max(scores, 1), 0)
    best_id = tl.min(tl.min(tl.where(scores == best, highest_ids, NO_ID), 1), 0)
    if tl.max(tl.max(others, 1), 0) >= best:
        highest = tl.full([PART, SUB], float("-inf"), tl.float32)
        for part in range(start, start + BLOCK, PART * SUB):
            token_ids = part + place
            scores = _scores(
                row_logits, row_counts, words, token_ids, token_ids < VOCAB, first, second, maximum, inverse, HAS_COUNTS
            )
            # Ids rise from part to part, so the first of equals stays.
            highest_ids = tl.where(scores > highest, token_ids, highest_ids)
            highest = tl.maximum(highest, scores)
        best = tl.max(tl.max(highest, 1), 0)
        best_id = tl.min(tl.min(tl.where(highest == best, highest_ids, NO_ID), 1), 0)
    return best, best_id


@triton.jit
def _store_masses(masses, x, largest, inverse):
    """Store the sums of e^((x - largest) * inverse) of rows of x [n, SUB] to masses [n]; 0 where all are -inf."""
    # Nothing is subtracted of infinities, which would leave NaN.
    base = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    tl.store(masses, tl.sum(tl.exp((x - base[:, None]) * inverse), 1))


@triton.jit
def reduce_blocks_kernel(
    logits,
    counts,
    logits_rows,
    logits_slots,
    positions,
    slot_params,
    token_counts,
    sub_maxima,
    sub_masses,
    raw_sub_maxima,
    raw_sub_masses,
    block_floats,
    block_ids,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    SUB: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce one block of a row. Grid (NUM_BLOCKS, rows).

    Of the arguments:
        logits: float32 [rows, VOCAB]; and the plan's arrays as `sample` takes them.
        sub_maxima: float32 [rows, NUM_BLOCKS * BLOCK / SUB], the largest penalized logit of every SUB.
        sub_masses: same shape, the mass of every SUB after temperature over that of its largest, where top_p asks.
        raw_sub_maxima: as sub_maxima before penalties, where log probabilities are asked for.
        raw_sub_masses: as sub_masses before penalties and temperature, there.
        block_floats: float32 [rows, 2, NUM_BLOCKS]: the largest penalized logit, the best score over it.
        block_ids: int32 [rows, 2, NUM_BLOCKS]: the lowest ids of both.
        PART: sub-blocks of SUB that are worked on at a time, while the next STAGES - 1 are on their way.
    """
    follow(PDL)
    row = tl.program_id(1)
    if row >= tl.load(counts + 3):
        return
    block = tl.program_id(0)
    start = block * BLOCK
    row_logits = logits + row.to(tl.int64) * VOCAB
    place = tl.arange(0, PART)[:, None] * SUB + tl.arange(0, SUB)[None, :]
    slot = tl.load(logits_slots + row)
    words = slot_params + slot * PARAM_WORDS
    wants_logprobs = (tl.load(words + 10) & WANTS_LOGPROBS) != 0
    has_penalties = (tl.load(words + 10) & HAS_PENALTIES) != 0
    drawn = is_drawn(words)
    limited = wants_thresholds(words, VOCAB)
    wants_masses = drawn & (float_word(words, 1) < 1.0)
    row_counts = token_counts
    if HAS_COUNTS:
        row_counts = token_counts + slot.to(tl.int64) * VOCAB
    if wants_logprobs | has_penalties | (drawn & limited):
        best = tl.full([PART, SUB], float("-inf"), tl.float32)
        best_ids = tl.full([PART, SUB], NO_ID, tl.int32)
        sub = row * (NUM_BLOCKS * BLOCK // SUB) + start // SUB + tl.arange(0, PART)
        for part in tl.range(start, start + BLOCK, PART * SUB, num_stages=STAGES):
            x = tl.load(row_logits + part + place, mask=part + place < VOCAB, other=float("-inf"))
            x = tl.where(x == x, x, float("-inf"))
            if wants_logprobs:
                largest = tl.max(x, 1)
                tl.store(raw_sub_maxima + sub, largest)
                _store_masses(raw_sub_masses + sub, x, largest, 1.0)
            if HAS_COUNTS and has_penalties:
                x = penalized(x, tl.load(row_counts + part + place, mask=part + place < VOCAB, other=0), words)
            largest = tl.max(x, 1)
            tl.store(sub_maxima + sub, largest)
            if wants_masses:
                _store_masses(sub_masses + sub, x, largest, tl.div_rn(1.0, float_word(words, 0)))
            best_ids = tl.where(x > best, part + place, best_ids)
            best = tl.maximum(best, x)
            sub += PART
        maximum = tl.max(tl.max(best, 1), 0)
        maximum_id = tl.min(tl.min(tl.where(best == maximum, best_ids, NO_ID), 1), 0)
    else:
        # Nobody asks for parts: the whole block is on its way at once.
        token_ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + token_ids, mask=token_ids < VOCAB, other=float("-inf"))
        x = tl.where(x == x, x, float("-inf"))
        maximum = tl.max(x, 0)
        maximum_id = tl.min(tl.where(x == maximum, token_ids, NO_ID), 0)
    floats = block_floats + row * (2 * NUM_BLOCKS) + block
    ids = block_ids + row * (2 * NUM_BLOCKS) + block
    tl.store(floats, maximum)
    if maximum > float("-inf"):
        tl.store(ids, maximum_id)
        if drawn & (not limited):
            position = tl.load(positions + tl.load(logits_rows + row)) + 1
            score, score_id = _draw_block(
                row_logits, row_counts, words, position, start, maximum, VOCAB, BLOCK, PART, SUB, HAS_COUNTS
            )
            tl.store(floats + NUM_BLOCKS, score)
            tl.store(ids + NUM_BLOCKS, score_id)
    else:
        # The first that is -inf and not NaN. Penalties leave -inf as it is.
        first_ids = tl.full([PART, SUB], NO_ID, tl.int32)
        for part in range(start, start + BLOCK, PART * SUB):
            y = tl.load(row_logits + part + place, mask=part + place < VOCAB, other=float("nan"))
            first_ids = tl.minimum(first_ids, tl.where(y == float("-inf"), part + place, NO_ID))
        tl.store(ids, tl.min(tl.min(first_ids, 1), 0))


def compile_cases(capability: int) -> list[CompileCase]:
    """The vocabularies of a large and a small model, with and without penalties."""
    tiles = SampleTiles()
    integers = ("counts", "logits_rows", "logits_slots", "positions", "slot_params", "token_counts", "block_ids")
    cases = []
    for vocab_size, has_counts in ((151_936, True), (50_257, False)):
        constants = {
            "VOCAB": vocab_size,
            "NUM_BLOCKS": tiles.num_blocks(vocab_size),
            "BLOCK": tiles.sub * tiles.subs,
            "PART": tiles.part,
            "SUB": tiles.sub,
            "STAGES": tiles.stages,
            "HAS_COUNTS": has_counts,
        }
        names = [name for name in reduce_blocks_kernel.arg_names if name not in constants]
        arguments = {name: "*i32" if name in integers else "*fp32" for name in names}
        cases.append(CompileCase(reduce_blocks_kernel, arguments, constants, num_warps=tiles.warps))
    return cases
