"""Sampling on a GPU: from logits to tokens in four launches that stay the same from step to step.

What a row needs is read on the device from its slot's parameters, so one CUDA graph serves greedy rows, drawn rows and
rows with penalties, limits or log probabilities in any mixture. A row's token depends on the row alone: every reduction
has a shape that is fixed by the vocabulary.

1. `_ban_kernel`: tokens that a row must not choose get -inf.
2. `_reduce_blocks_kernel`: every logit is read once; maxima of parts and blocks, and the best of scaled logit plus
   noise where a row is drawn without limits.
3. `sample_thresholds.draw_limited_kernel`: rows with top_k, top_p or min_p.
4. `_choose_kernel`: the token of each row, its log probabilities, and what the next step must know of it.

The draw by the largest of scaled logit plus Gumbel noise is the Gumbel-max trick (Maddison et al., "A* Sampling",
2014).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.logprobs import write_logprobs
from octavo.kernels.noise import gumbel, noise_bits, noise_keys
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
from octavo.kernels.sample_thresholds import LIMITED_WARPS, draw_limited_kernel
from torch import Tensor

__all__ = ["SampleTiles", "SampleWorkspace", "compile_cases", "sample", "workspace_bytes"]

_NUM_BAN_PROGRAMS = 8
_BAN_BLOCK = 128
_CHOOSE_WARPS = 8


@triton.jit
def _ban_kernel(logits, counts, ban_logits, ban_tokens, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.load(counts + 8)
    for start in range(tl.program_id(0) * BLOCK, number, tl.num_programs(0) * BLOCK):
        ban = start + tl.arange(0, BLOCK)
        row = tl.load(ban_logits + ban, mask=ban < number, other=0).to(tl.int64)
        token = tl.load(ban_tokens + ban, mask=ban < number, other=0)
        inside = (ban < number) & (row < tl.load(counts + 3)) & (token < VOCAB)
        tl.store(logits + row * VOCAB + token, float("-inf"), mask=inside)


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

    The logits come out of the L1 cache a second time.
    """
    first, second = noise_keys(tl.load(words + 7), tl.load(words + 8), tl.load(words + 9), position)
    inverse = tl.div_rn(1.0, float_word(words, 0))
    place = tl.arange(0, PART)[:, None] * SUB + tl.arange(0, SUB)[None, :]
    best = tl.full([PART, SUB], float("-inf"), tl.float32)
    best_ids = tl.full([PART, SUB], NO_ID, tl.int32)
    for part in range(start, start + BLOCK, PART * SUB):
        token_ids = part + place
        x = row_values(row_logits, row_counts, words, token_ids, token_ids < VOCAB, HAS_COUNTS)
        score = (x - maximum) * inverse + gumbel(noise_bits(token_ids, first, second))
        score = tl.where(x > float("-inf"), score, float("-inf"))
        # Ids rise from part to part, so the first of equals stays.
        best_ids = tl.where(score > best, token_ids, best_ids)
        best = tl.maximum(best, score)
    block_best = tl.max(tl.max(best, 1), 0)
    return block_best, tl.min(tl.min(tl.where(best == block_best, best_ids, NO_ID), 1), 0)


@triton.jit
def _store_masses(masses, x, largest, inverse):
    """Store the sums of e^((x - largest) * inverse) of rows of x [n, SUB] to masses [n]; 0 where all are -inf."""
    # Nothing is subtracted of infinities, which would leave NaN.
    base = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    tl.store(masses, tl.sum(tl.exp((x - base[:, None]) * inverse), 1))


@triton.jit
def _reduce_blocks_kernel(
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
    floats = block_floats + row * (2 * NUM_BLOCKS) + block
    ids = block_ids + row * (2 * NUM_BLOCKS) + block
    tl.store(floats, maximum)
    if maximum > float("-inf"):
        tl.store(ids, tl.min(tl.min(tl.where(best == maximum, best_ids, NO_ID), 1), 0))
        if drawn & (not limited):
            position = tl.load(positions + tl.load(logits_rows + row)) + 1
            score, score_id = _draw_block(
                row_logits, row_counts, words, position, start, maximum, VOCAB, BLOCK, PART, SUB, HAS_COUNTS
            )
            tl.store(floats + NUM_BLOCKS, score)
            tl.store(ids + NUM_BLOCKS, score_id)
    else:
        # The first that is -inf and not NaN. Penalties leave -inf as it is.
        for part in range(start, start + BLOCK, PART * SUB):
            x = tl.load(row_logits + part + place, mask=part + place < VOCAB, other=float("nan"))
            best_ids = tl.minimum(best_ids, tl.where(x == float("-inf"), part + place, NO_ID))
        tl.store(ids, tl.min(tl.min(best_ids, 1), 0))


@triton.jit
def _choose_kernel(
    logits,
    counts,
    logits_slots,
    slot_params,
    token_counts,
    raw_sub_maxima,
    raw_sub_masses,
    block_floats,
    block_ids,
    drawn,
    last_token,
    out_ids,
    out_logprobs,
    out_top_ids,
    out_top_logprobs,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_LENGTH: tl.constexpr,
    NUM_SUBS: tl.constexpr,
    LENGTH: tl.constexpr,
    SUB: tl.constexpr,
    MAX_LOGPROBS: tl.constexpr,
    MOST: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """Choose the token of one row of what the kernels before found, and write everything. Grid (rows,)."""
    row = tl.program_id(0)
    if row >= tl.load(counts + 3):
        return
    slot = tl.load(logits_slots + row)
    words = slot_params + slot * PARAM_WORDS
    flags = tl.load(words + 10)
    block = tl.arange(0, BLOCKS_LENGTH)
    exists = block < NUM_BLOCKS
    floats = block_floats + row * (2 * NUM_BLOCKS) + block
    ids = block_ids + row * (2 * NUM_BLOCKS) + block
    maxima = tl.load(floats, mask=exists, other=float("-inf"))
    maximum = tl.max(maxima, 0)
    places = tl.load(ids, mask=exists, other=NO_ID)
    token = tl.min(tl.where(maxima == maximum, places, NO_ID), 0)
    token = tl.where(token == NO_ID, 0, token)
    if is_drawn(words) & (maximum > float("-inf")) & (maximum < float("inf")):
        if wants_thresholds(words, VOCAB):
            token = tl.load(drawn + row)
        else:
            scores = tl.load(floats + NUM_BLOCKS, mask=exists, other=float("-inf"))
            scores += (maxima - maximum) * tl.div_rn(1.0, float_word(words, 0))
            scores = tl.where(maxima > float("-inf"), scores, float("-inf"))
            places = tl.load(ids + NUM_BLOCKS, mask=exists, other=NO_ID)
            token = tl.min(tl.where(scores == tl.max(scores, 0), places, NO_ID), 0)
    tl.store(last_token + slot, token)
    tl.store(out_ids + row, token)
    if HAS_COUNTS and (flags & HAS_PENALTIES) != 0:
        count = token_counts + slot.to(tl.int64) * VOCAB + token
        tl.store(count, tl.load(count) + 1)
    if (flags & WANTS_LOGPROBS) != 0:
        write_logprobs(
            logits + row.to(tl.int64) * VOCAB,
            token,
            raw_sub_maxima + row * NUM_SUBS,
            raw_sub_masses + row * NUM_SUBS,
            out_logprobs + row,
            out_top_ids + row * MAX_LOGPROBS,
            out_top_logprobs + row * MAX_LOGPROBS,
            tl.minimum(tl.load(words + 11), MAX_LOGPROBS),
            VOCAB,
            NUM_SUBS,
            LENGTH,
            SUB,
            MOST,
        )


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


_TILES = SampleTiles()


def workspace_bytes(max_logits: int, vocab_size: int, tiles: SampleTiles = _TILES) -> int:
    """Bytes of a `SampleWorkspace`."""
    num_blocks = tiles.num_blocks(vocab_size)
    return 4 * max_logits * (5 * num_blocks * tiles.subs + 4 * num_blocks + 2 * tiles.found + 1)


class SampleWorkspace:
    """Scratch of `sample`, made once.

    Args:
        max_logits: rows of logits at most.
        vocab_size: of the logits.
        max_logprobs: likeliest tokens of a row at most.
        device: of the logits.
        tiles: how the kernels cut a row.
    """

    def __init__(
        self, max_logits: int, vocab_size: int, max_logprobs: int, device: torch.device, tiles: SampleTiles = _TILES
    ) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(max_logits, *shape, dtype=dtype, device=device)

        num_blocks = tiles.num_blocks(vocab_size)
        num_subs = num_blocks * tiles.subs
        self.tiles = tiles
        self.vocab_size, self.max_logprobs = vocab_size, max_logprobs
        self.num_blocks, self.num_subs = num_blocks, num_subs
        self.sub_maxima, self.sub_masses = empty(num_subs), empty(num_subs)
        self.raw_sub_maxima, self.raw_sub_masses = empty(num_subs), empty(num_subs)
        self.block_floats, self.block_ids = empty(2, num_blocks), empty(2, num_blocks, dtype=torch.int32)
        self.visits = empty(num_subs, dtype=torch.int32)
        self.found, self.found_ids = empty(tiles.found), empty(tiles.found, dtype=torch.int32)
        self.drawn = empty(dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


def sample(
    logits: Tensor,
    counts: Tensor,
    logits_rows: Tensor,
    logits_slots: Tensor,
    positions: Tensor,
    params: Tensor,
    token_counts: Tensor | None,
    ban_logits: Tensor,
    ban_tokens: Tensor,
    last_token: Tensor,
    out_ids: Tensor,
    out_logprobs: Tensor,
    out_top_ids: Tensor,
    out_top_logprobs: Tensor,
    workspace: SampleWorkspace,
    *,
    rows: int,
) -> None:
    """Choose a token for each of the first counts[3] rows of logits; nothing of later rows is read or written.

    Log probabilities are those of the logits after bans, before penalties and temperature. Rows that do not ask leave
    their places in out_logprobs, out_top_ids and out_top_logprobs as they are, and rows that ask for n tokens write n.

    Args:
        logits: float32 [>= rows, vocab_size], contiguous; banned tokens become -inf, nothing else changes.
        counts: int32 [16], the step's counts.
        logits_rows: int32 [>= rows], token whose hidden state gave the logits.
        logits_slots: int32 [>= rows], each row's slot, no slot twice.
        positions: int32 [tokens] of the tokens; the new one's is one more.
        params: int32 [slots, 16], sampling parameters as the plan gives them.
        token_counts: int32 [slots, vocab_size], output count of each token, bit 30 set where the prompt holds it, for
            slots with penalties; counts the new tokens there. None where no slot has penalties.
        ban_logits: int32 [>= counts[8]], row of each ban.
        ban_tokens: int32 [>= counts[8]], token of each ban.
        last_token: int32 [slots], takes the new tokens.
        out_ids: int32 [>= rows], takes the new tokens.
        out_logprobs: float32 [>= rows], the chosen tokens' log probabilities.
        out_top_ids: int32 [>= rows, max_logprobs], likeliest first, -1 where too few are above -inf.
        out_top_logprobs: float32 [>= rows, max_logprobs], -inf there.
        workspace: made for as many rows, this vocabulary and max_logprobs.
        rows: the most rows that counts[3] can say, as padded; bounds the launch.
    """
    tiles, vocab_size = workspace.tiles, workspace.vocab_size
    has_counts = token_counts is not None
    counted = token_counts if token_counts is not None else logits_slots
    length = triton.next_power_of_2(workspace.num_subs)
    # Fused multiply-adds would make penalized logits differ from the reference in their last bits.
    launch(
        _ban_kernel,
        (_NUM_BAN_PROGRAMS,),
        logits,
        counts,
        ban_logits,
        ban_tokens,
        VOCAB=vocab_size,
        BLOCK=_BAN_BLOCK,
        num_warps=1,
        enable_fp_fusion=False,
    )
    launch(
        _reduce_blocks_kernel,
        (workspace.num_blocks, rows),
        logits,
        counts,
        logits_rows,
        logits_slots,
        positions,
        params,
        counted,
        workspace.sub_maxima,
        workspace.sub_masses,
        workspace.raw_sub_maxima,
        workspace.raw_sub_masses,
        workspace.block_floats,
        workspace.block_ids,
        VOCAB=vocab_size,
        NUM_BLOCKS=workspace.num_blocks,
        BLOCK=tiles.sub * tiles.subs,
        PART=tiles.part,
        SUB=tiles.sub,
        STAGES=tiles.stages,
        HAS_COUNTS=has_counts,
        num_warps=tiles.warps,
        enable_fp_fusion=False,
    )
    launch(
        draw_limited_kernel,
        (rows,),
        logits,
        counts,
        logits_rows,
        logits_slots,
        positions,
        params,
        counted,
        workspace.sub_maxima,
        workspace.sub_masses,
        workspace.visits,
        workspace.found,
        workspace.found_ids,
        workspace.drawn,
        VOCAB=vocab_size,
        NUM_SUBS=workspace.num_subs,
        LENGTH=length,
        SUB=tiles.sub,
        TILE=tiles.visited,
        FOUND=tiles.found,
        HAS_COUNTS=has_counts,
        num_warps=LIMITED_WARPS,
        enable_fp_fusion=False,
    )
    launch(
        _choose_kernel,
        (rows,),
        logits,
        counts,
        logits_slots,
        params,
        counted,
        workspace.raw_sub_maxima,
        workspace.raw_sub_masses,
        workspace.block_floats,
        workspace.block_ids,
        workspace.drawn,
        last_token,
        out_ids,
        out_logprobs,
        out_top_ids,
        out_top_logprobs,
        VOCAB=vocab_size,
        NUM_BLOCKS=workspace.num_blocks,
        BLOCKS_LENGTH=triton.next_power_of_2(workspace.num_blocks),
        NUM_SUBS=workspace.num_subs,
        LENGTH=length,
        SUB=tiles.sub,
        MAX_LOGPROBS=workspace.max_logprobs,
        MOST=triton.next_power_of_2(max(workspace.max_logprobs, 1)),
        HAS_COUNTS=has_counts,
        num_warps=_CHOOSE_WARPS,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """The vocabularies of a large and a small model, with and without penalties."""
    masses = ("sub_maxima", "sub_masses", "raw_sub_maxima", "raw_sub_masses", "block_floats")
    floats = ("logits", "out_logprobs", "out_top_logprobs", *masses)
    cases = []
    for vocab_size, has_counts in ((151_936, True), (50_257, False)):
        num_blocks = _TILES.num_blocks(vocab_size)
        shape = {"VOCAB": vocab_size, "NUM_BLOCKS": num_blocks, "SUB": _TILES.sub, "HAS_COUNTS": has_counts}
        choice = {
            "BLOCKS_LENGTH": triton.next_power_of_2(num_blocks),
            "NUM_SUBS": num_blocks * _TILES.subs,
            "LENGTH": triton.next_power_of_2(num_blocks * _TILES.subs),
            "MAX_LOGPROBS": 20,
            "MOST": 32,
        }
        for kernel, constants, num_warps in (
            (_ban_kernel, {"VOCAB": vocab_size, "BLOCK": _BAN_BLOCK}, 1),
            (
                _reduce_blocks_kernel,
                shape | {"BLOCK": _TILES.sub * _TILES.subs, "PART": _TILES.part, "STAGES": _TILES.stages},
                _TILES.warps,
            ),
            (_choose_kernel, shape | choice, _CHOOSE_WARPS),
        ):
            arguments = {
                name: "*fp32" if name in floats else "*i32" for name in kernel.arg_names if name not in constants
            }
            cases.append(CompileCase(kernel, arguments, constants, num_warps=num_warps))
    return cases
