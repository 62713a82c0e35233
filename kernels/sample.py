"""Sampling on a GPU: from logits to tokens in four launches that stay the same from step to step.

What a row needs is read on the device from its slot's parameters, so one CUDA graph serves greedy rows, drawn rows and
rows with penalties, limits or log probabilities in any mixture. A row's token depends on the row alone: every reduction
has a shape that is fixed by the vocabulary.

1. `sample_constrain.constrain`: rows are held to masks, and single logits changed.

The others are `sample`:

2. `sample_blocks.reduce_blocks_kernel`: every logit is read once; maxima of parts and blocks, and the best of scaled
   logit plus noise where a row is drawn without limits.
3. `sample_thresholds.draw_limited_kernel`: rows with top_k, top_p or min_p.
4. `_choose_kernel`: the token of each row, its log probabilities, and what the next step needs to know of it.

The draw by the largest of scaled logit plus Gumbel noise is the Gumbel-max trick (Maddison et al., "A* Sampling",
2014).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.logprobs import write_logprobs
from octavo.kernels.overlap import follow
from octavo.kernels.sample_blocks import SampleTiles, reduce_blocks_kernel
from octavo.kernels.sample_row import (
    HAS_PENALTIES,
    NO_ID,
    PARAM_WORDS,
    WANTS_LOGPROBS,
    float_word,
    is_drawn,
    wants_thresholds,
)
from octavo.kernels.sample_thresholds import LIMITED_WARPS, draw_limited_kernel
from torch import Tensor

__all__ = ["SampleTiles", "SampleWorkspace", "compile_cases", "sample", "workspace_bytes"]

_CHOOSE_WARPS = 8


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
    PDL: tl.constexpr,
):
    """Choose the token of one row of what the kernels before found, and write everything. Grid (rows,)."""
    follow(PDL)
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

    Log probabilities are those of the logits before penalties and temperature. Rows that do not ask leave their places
    in out_logprobs, out_top_ids and out_top_logprobs as they are, and rows that ask for n tokens write n.

    Args:
        logits: float32 [>= rows, vocab_size], contiguous, held to what rows may choose of; nothing of them changes.
        counts: int32 [16], the step's counts.
        logits_rows: int32 [>= rows], token whose hidden state gave the logits.
        logits_slots: int32 [>= rows], each row's slot, no slot twice.
        positions: int32 [tokens] of the tokens; the new one's is one more.
        params: int32 [slots, 16], sampling parameters as the plan gives them.
        token_counts: int32 [slots, vocab_size], output count of each token, bit 30 set where the prompt holds it, for
            slots with penalties; counts the new tokens there. None where no slot has penalties.
        last_token: int32 [slots], takes the new tokens.
        out_ids: int32 [>= rows], takes the new tokens.
        out_logprobs: float32 [>= rows], the chosen tokens' log probabilities.
        out_top_ids: int32 [>= rows, max_logprobs], likeliest first, -1 where too few are above -inf.
        out_top_logprobs: float32 [>= rows, max_logprobs], -inf there.
        workspace: made for as many rows, this vocabulary and max_logprobs.
        rows: the most rows that counts[3] can say, as padded; bounds the launch.
    """
    has_counts = token_counts is not None
    counted = token_counts if token_counts is not None else logits_slots
    row_inputs = (logits, counts, logits_rows, logits_slots, positions, params, counted)
    _reduce_blocks(row_inputs, workspace, rows, has_counts)
    _draw_limited(row_inputs, workspace, rows, has_counts)
    outputs = (last_token, out_ids, out_logprobs, out_top_ids, out_top_logprobs)
    _choose((logits, counts, logits_slots, params, counted), outputs, workspace, rows, has_counts)


def _reduce_blocks(row_inputs: tuple[Tensor, ...], workspace: SampleWorkspace, rows: int, has_counts: bool) -> None:
    tiles = workspace.tiles
    # Fused multiply-adds would make penalized logits differ from the reference in their last bits.
    launch(
        reduce_blocks_kernel,
        (workspace.num_blocks, rows),
        *row_inputs,
        workspace.sub_maxima,
        workspace.sub_masses,
        workspace.raw_sub_maxima,
        workspace.raw_sub_masses,
        workspace.block_floats,
        workspace.block_ids,
        VOCAB=workspace.vocab_size,
        NUM_BLOCKS=workspace.num_blocks,
        BLOCK=tiles.sub * tiles.subs,
        PART=tiles.part,
        SUB=tiles.sub,
        STAGES=tiles.stages,
        HAS_COUNTS=has_counts,
        num_warps=tiles.warps,
        enable_fp_fusion=False,
    )


def _draw_limited(row_inputs: tuple[Tensor, ...], workspace: SampleWorkspace, rows: int, has_counts: bool) -> None:
    tiles = workspace.tiles
    launch(
        draw_limited_kernel,
        (rows,),
        *row_inputs,
        workspace.sub_maxima,
        workspace.sub_masses,
        workspace.visits,
        workspace.found,
        workspace.found_ids,
        workspace.drawn,
        VOCAB=workspace.vocab_size,
        NUM_SUBS=workspace.num_subs,
        LENGTH=triton.next_power_of_2(workspace.num_subs),
        SUB=tiles.sub,
        TILE=tiles.visited,
        FOUND=tiles.found,
        HAS_COUNTS=has_counts,
        num_warps=LIMITED_WARPS,
        enable_fp_fusion=False,
    )


def _choose(
    row_inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    workspace: SampleWorkspace,
    rows: int,
    has_counts: bool,
) -> None:
    launch(
        _choose_kernel,
        (rows,),
        *row_inputs,
        workspace.raw_sub_maxima,
        workspace.raw_sub_masses,
        workspace.block_floats,
        workspace.block_ids,
        workspace.drawn,
        *outputs,
        VOCAB=workspace.vocab_size,
        NUM_BLOCKS=workspace.num_blocks,
        BLOCKS_LENGTH=triton.next_power_of_2(workspace.num_blocks),
        NUM_SUBS=workspace.num_subs,
        LENGTH=triton.next_power_of_2(workspace.num_subs),
        SUB=workspace.tiles.sub,
        MAX_LOGPROBS=workspace.max_logprobs,
        MOST=triton.next_power_of_2(max(workspace.max_logprobs, 1)),
        HAS_COUNTS=has_counts,
        num_warps=_CHOOSE_WARPS,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """The vocabularies of a large and a small model, with and without penalties."""
    floats = ("logits", "raw_sub_maxima", "raw_sub_masses", "block_floats", "out_logprobs", "out_top_logprobs")
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
        constants = shape | choice
        names = [name for name in _choose_kernel.arg_names if name not in constants]
        arguments = {name: "*fp32" if name in floats else "*i32" for name in names}
        cases.append(CompileCase(_choose_kernel, arguments, constants, num_warps=_CHOOSE_WARPS))
    return cases
