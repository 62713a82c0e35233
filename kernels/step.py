"""The step on the device: takes the plan in, and gives the samples out.

The arenas of the plan and the ring of the results are pinned host memory that kernels read and write in place, so that
no copy is queued by the host and one graph serves all three arenas. Which of the three is next is a number on the
device (`turn`) that the last kernel of a step moves on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from octavo._core import NUM_ARENAS, PARAM_LEN
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow
from octavo.kernels.reference import PROMPT_BIT
from torch import Tensor

__all__ = [
    "DeviceState",
    "PlanLayout",
    "Samples",
    "compile_cases",
    "count_history",
    "publish",
    "take_plan",
]

_TAKEN = (
    "rows",
    "query_start",
    "seq_lens",
    "logits_rows",
    "logits_slots",
    "param_slots",
    "param_values",
    "bias_logits",
    "bias_tokens",
    "bias_values",
    "mask_logits",
    "group_rows",
    "group_starts",
    "group_blocks",
    "table_slots",
    "table_indices",
    "table_blocks",
    "token_ids",
    "positions",
    "slot_mapping",
)
_JOBS = 4
_TAKE_BLOCK = 512
_PUBLISH_ROWS = 64
_HISTORY_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class PlanLayout:
    """Where the arrays of a plan lie, in int32 elements; every offset is a multiple of 32.

    Attributes:
        offsets: first element of each array.
        sizes: elements of each array.
        length: of an arena.
    """

    offsets: dict[str, int]
    sizes: dict[str, int]
    length: int

    @classmethod
    def of(cls, arrays: Sequence[tuple[str, int, int]], length: int) -> PlanLayout:
        """From (name, offset, elements) of every array, as the core tells them."""
        return cls(
            {name: offset for name, offset, _ in arrays},
            {name: size for name, _, size in arrays},
            length,
        )

    @property
    def num_groups(self) -> int:
        """Cache groups: each has a slot mapping of all tokens."""
        return self.sizes["slot_mapping"] // self.sizes["token_ids"]

    def view(self, plan: Tensor, name: str) -> Tensor:
        """The named array of a plan int32[length]."""
        return plan[self.offsets[name] : self.offsets[name] + self.sizes[name]]


@dataclasses.dataclass(frozen=True)
class DeviceState:
    """What stays on the device from step to step.

    Attributes:
        turn: int32[1], the arena of the next step.
        plan: int32[length], the plan of the step that runs.
        block_tables: int32[num_groups * max_num_seqs, blocks of the longest sequence], a cache group after the other.
        params: int32[max_num_seqs, PARAM_LEN], sampling parameters.
        last_token: int32[max_num_seqs].
    """

    turn: Tensor
    plan: Tensor
    block_tables: Tensor
    params: Tensor
    last_token: Tensor

    @classmethod
    def empty(cls, layout: PlanLayout, max_num_seqs: int, table_stride: int, device: torch.device) -> DeviceState:
        """The state before the first step, whose arena is the second."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            torch.ones(1, dtype=torch.int32, device=device),
            zeros(layout.length),
            zeros(layout.num_groups * max_num_seqs, table_stride),
            zeros(max_num_seqs, PARAM_LEN),
            zeros(max_num_seqs),
        )


@dataclasses.dataclass(frozen=True)
class Samples:
    """What steps sample, on the device or in the ring of results (then each with a first dimension of NUM_ARENAS).

    Attributes:
        ids: int32[R].
        logprobs: float32[R], of the chosen tokens.
        top_ids: int32[R, M], the likeliest tokens.
        top_logprobs: float32[R, M].
    """

    ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @classmethod
    def empty(cls, rows: int, max_logprobs: int, device: torch.device, *, ring: bool = False) -> Samples:
        """Zeroed memory for `rows` samples; a ring lies in host memory, pinned where `device` is a GPU."""
        first = (NUM_ARENAS,) if ring else ()
        place = torch.device("cpu") if ring else device
        pinned = ring and device.type == "cuda"

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(first + shape, dtype=dtype, device=place, pin_memory=pinned)

        return cls(
            zeros(torch.int32, rows),
            zeros(torch.float32, rows),
            zeros(torch.int32, rows, max_logprobs),
            zeros(torch.float32, rows, max_logprobs),
        )


@triton.jit(do_not_specialize=["tokens", "rows", "table_stride", "group_stride"])
def _take_plan_kernel(
    arenas,
    turn,
    plan,
    block_tables,
    slot_params,
    last_token,
    length,
    rows_at,
    query_start_at,
    seq_lens_at,
    logits_rows_at,
    logits_slots_at,
    param_slots_at,
    param_values_at,
    bias_logits_at,
    bias_tokens_at,
    bias_values_at,
    mask_logits_at,
    group_rows_at,
    group_starts_at,
    group_blocks_at,
    table_slots_at,
    table_indices_at,
    table_blocks_at,
    token_ids_at,
    positions_at,
    slot_mapping_at,
    tokens,
    rows,
    table_stride,
    group_stride,
    PARAM_LEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One job a column of the grid; the programs of a column share its elements."""
    follow(PDL)
    job = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    arena = arenas + tl.load(turn).to(tl.int64) * length
    lanes = tl.arange(0, BLOCK)
    num_tokens = tl.load(arena)
    num_rows = tl.load(arena + 1)
    num_decode_rows = tl.load(arena + 2)
    if job == 0:
        # What the bounds allow is read before the counts are known: each reading of host memory takes a microsecond.
        for start in range(first, tokens, step):
            i = start + lanes
            given = i < tokens
            token = tl.load(arena + token_ids_at + i, mask=given, other=0)
            position = tl.load(arena + positions_at + i, mask=given, other=0)
            slot = tl.load(arena + slot_mapping_at + i, mask=given, other=0)
            # A decode row is one token, so row and token have one index.
            row = tl.load(arena + rows_at + i, mask=i < rows, other=0)
            awaited = (i < num_decode_rows) & (token < 0)
            token = tl.where(awaited, tl.load(last_token + row, mask=awaited, other=0), token)
            real = i < num_tokens
            tl.store(plan + token_ids_at + i, tl.where(real, token, 0), mask=given)
            tl.store(plan + positions_at + i, tl.where(real, position, 0), mask=given)
            tl.store(plan + slot_mapping_at + i, tl.where(real, slot, -1), mask=given)
            for group in tl.static_range(1, NUM_GROUPS):
                at = slot_mapping_at + group * group_stride + i
                slot = tl.load(arena + at, mask=given, other=0)
                tl.store(plan + at, tl.where(real, slot, -1), mask=given)
    elif job == 1:
        num_logits = tl.load(arena + 3)
        for start in range(first, rows + 1, step):
            i = start + lanes
            given = i < rows
            row = tl.load(arena + rows_at + i, mask=given, other=0)
            seq_len = tl.load(arena + seq_lens_at + i, mask=given, other=0)
            begin = tl.load(arena + query_start_at + i, mask=i <= rows, other=0)
            source = tl.load(arena + logits_rows_at + i, mask=given, other=0)
            slot = tl.load(arena + logits_slots_at + i, mask=given, other=0)
            real, sampled = i < num_rows, i < num_logits
            tl.store(plan + rows_at + i, tl.where(real, row, 0), mask=given)
            tl.store(plan + seq_lens_at + i, tl.where(real, seq_len, 0), mask=given)
            tl.store(plan + query_start_at + i, tl.where(i <= num_rows, begin, num_tokens), mask=i <= rows)
            tl.store(plan + logits_rows_at + i, tl.where(sampled, source, 0), mask=given)
            tl.store(plan + logits_slots_at + i, tl.where(sampled, slot, 0), mask=given)
        if first == 0:
            i = tl.arange(0, 16)
            tl.store(plan + i, tl.load(arena + i))
    elif job == 2:
        num_updates = tl.load(arena + 4)
        for start in range(first, num_updates, step):
            i = start + lanes
            given = i < num_updates
            slot = tl.load(arena + table_slots_at + i, mask=given, other=0).to(tl.int64)
            index = tl.load(arena + table_indices_at + i, mask=given, other=0)
            block = tl.load(arena + table_blocks_at + i, mask=given, other=0)
            tl.store(block_tables + slot * table_stride + index, block, mask=given)
        num_values = tl.load(arena + 6) * PARAM_LEN
        for start in range(first, num_values, step):
            i = start + lanes
            given = i < num_values
            slot = tl.load(arena + param_slots_at + i // PARAM_LEN, mask=given, other=0)
            value = tl.load(arena + param_values_at + i, mask=given, other=0)
            tl.store(slot_params + slot * PARAM_LEN + i % PARAM_LEN, value, mask=given)
    else:
        num_biases = tl.load(arena + 7)
        for start in range(first, num_biases, step):
            i = start + lanes
            given = i < num_biases
            tl.store(plan + bias_logits_at + i, tl.load(arena + bias_logits_at + i, mask=given, other=0), mask=given)
            tl.store(plan + bias_tokens_at + i, tl.load(arena + bias_tokens_at + i, mask=given, other=0), mask=given)
            tl.store(plan + bias_values_at + i, tl.load(arena + bias_values_at + i, mask=given, other=0), mask=given)
        num_masks = tl.load(arena + 12)
        for start in range(first, num_masks, step):
            i = start + lanes
            given = i < num_masks
            tl.store(plan + mask_logits_at + i, tl.load(arena + mask_logits_at + i, mask=given, other=0), mask=given)
        num_groups = tl.load(arena + 8)
        if num_groups > 0:
            for start in range(first, num_decode_rows + 1, step):
                # There are fewer groups than rows in them, and no more of these than decode rows.
                i = start + lanes
                given = i < num_decode_rows
                row = tl.load(arena + group_rows_at + i, mask=given, other=0)
                blocks = tl.load(arena + group_blocks_at + i, mask=i < num_groups, other=0)
                begin = tl.load(arena + group_starts_at + i, mask=i <= num_groups, other=0)
                tl.store(plan + group_rows_at + i, row, mask=given)
                tl.store(plan + group_blocks_at + i, blocks, mask=i < num_groups)
                tl.store(plan + group_starts_at + i, begin, mask=i <= num_groups)


def take_plan(arenas: Tensor, layout: PlanLayout, state: DeviceState, *, tokens: int, rows: int) -> None:
    """Take the next plan in: its arrays to `state.plan`, its changes to block tables and parameters.

    Token ids of -1 become the last tokens of their slots. Tokens from the step's count to `tokens` become padding (id
    0, position 0, cache slot -1 in every cache group), rows and samples beyond theirs point at slot 0 and token 0.

    Args:
        arenas: int32[NUM_ARENAS, length], pinned where the device is a GPU.
        layout: of an arena.
        state: changed in place.
        tokens: the most tokens the step may have, to which it is padded.
        rows: the most rows and samples.
    """
    launch(
        _take_plan_kernel,
        (triton.cdiv(max(tokens, rows + 1), _TAKE_BLOCK), _JOBS),
        arenas,
        state.turn,
        state.plan,
        state.block_tables,
        state.params,
        state.last_token,
        layout.length,
        *[layout.offsets[name] for name in _TAKEN],
        tokens,
        rows,
        state.block_tables.shape[1],
        layout.sizes["token_ids"],
        PARAM_LEN=PARAM_LEN,
        NUM_GROUPS=layout.num_groups,
        BLOCK=_TAKE_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["ring_rows"])
def _publish_kernel(
    turn,
    counts,
    slots,
    slot_params,
    ids,
    logprobs,
    top_ids,
    top_logprobs,
    ring_ids,
    ring_logprobs,
    ring_top_ids,
    ring_top_logprobs,
    ring_rows,
    MAX_LOGPROBS: tl.constexpr,
    TOP: tl.constexpr,
    PARAM_LEN: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_ARENAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: it must be the last to look at `turn`."""
    follow(PDL)
    arena = tl.load(turn)
    num_logits = tl.load(counts + 3)
    base = arena.to(tl.int64) * ring_rows
    columns = tl.arange(0, TOP)
    for start in range(0, num_logits, ROWS):
        i = start + tl.arange(0, ROWS)
        given = i < num_logits
        tl.store(ring_ids + base + i, tl.load(ids + i, mask=given, other=0), mask=given)
        slot = tl.load(slots + i, mask=given, other=0)
        asked = given & ((tl.load(slot_params + slot * PARAM_LEN + 10, mask=given, other=0) & 2) != 0)
        if tl.max(asked.to(tl.int32), axis=0) > 0:
            tl.store(ring_logprobs + base + i, tl.load(logprobs + i, mask=asked, other=0.0), mask=asked)
            width = tl.load(slot_params + slot * PARAM_LEN + 11, mask=asked, other=0)
            wanted = columns[None, :] < tl.minimum(width, MAX_LOGPROBS)[:, None]
            at = i[:, None] * MAX_LOGPROBS + columns[None, :]
            there = base * MAX_LOGPROBS + at
            tl.store(ring_top_ids + there, tl.load(top_ids + at, mask=wanted, other=0), mask=wanted)
            tl.store(ring_top_logprobs + there, tl.load(top_logprobs + at, mask=wanted, other=0.0), mask=wanted)
    tl.debug_barrier()
    tl.store(turn, (arena + 1) % NUM_ARENAS)


def publish(state: DeviceState, counts: Tensor, logits_slots: Tensor, samples: Samples, ring: Samples) -> None:
    """Leave the step's samples in the ring of results, at its arena's place, and pass the turn on.

    Log probabilities go out for the rows that asked for them, as many as they asked for.

    Args:
        state: of the device; `turn` is moved on.
        counts: int32[16] of the step.
        logits_slots: int32[R], the slot of each sample.
        samples: what was sampled, on the device.
        ring: where it goes, in pinned host memory.
    """
    max_logprobs = samples.top_ids.shape[1]
    launch(
        _publish_kernel,
        (1,),
        state.turn,
        counts,
        logits_slots,
        state.params,
        samples.ids,
        samples.logprobs,
        samples.top_ids,
        samples.top_logprobs,
        ring.ids,
        ring.logprobs,
        ring.top_ids,
        ring.top_logprobs,
        ring.ids.shape[1],
        MAX_LOGPROBS=max_logprobs,
        TOP=triton.next_power_of_2(max(max_logprobs, 1)),
        PARAM_LEN=PARAM_LEN,
        ROWS=_PUBLISH_ROWS,
        NUM_ARENAS=NUM_ARENAS,
        num_warps=4,
    )


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
    """Each kernel once: what they compile to does not depend on the model."""
    offsets = dict.fromkeys([f"{name}_at" for name in _TAKEN], "i32") | {"length": "i32"}
    device = dict.fromkeys(("arenas", "turn", "plan", "block_tables", "slot_params", "last_token"), "*i32")
    bounds = dict.fromkeys(("tokens", "rows", "table_stride", "group_stride"), "i32")
    sampled = {
        f"{place}{name}": kind
        for place in ("", "ring_")
        for name, kind in (("ids", "*i32"), ("logprobs", "*fp32"), ("top_ids", "*i32"), ("top_logprobs", "*fp32"))
    }
    published = dict.fromkeys(("turn", "counts", "slots", "slot_params"), "*i32") | sampled | {"ring_rows": "i32"}
    counted = dict.fromkeys(("tokens", "token_counts"), "*i32")
    counted |= dict.fromkeys(("slot", "length", "prompt_length", "vocab_size"), "i32")
    return [
        CompileCase(
            _take_plan_kernel,
            device | offsets | bounds,
            {"PARAM_LEN": PARAM_LEN, "NUM_GROUPS": 1, "BLOCK": _TAKE_BLOCK},
            aligned=tuple(offsets),
        ),
        CompileCase(
            _publish_kernel,
            published,
            {"MAX_LOGPROBS": 20, "TOP": 32, "PARAM_LEN": PARAM_LEN, "ROWS": _PUBLISH_ROWS, "NUM_ARENAS": NUM_ARENAS},
        ),
        CompileCase(_count_history_kernel, counted, {"PROMPT_BIT": PROMPT_BIT, "BLOCK": _HISTORY_BLOCK}, num_warps=8),
    ]
