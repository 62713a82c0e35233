"""The first kernel of a step: it copies the plan from its arena in host memory to the device."""

from __future__ import annotations

import triton
import triton.language as tl
from octavo._core import PARAM_LEN
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow
from octavo.kernels.step import DeviceState, PlanLayout
from torch import Tensor

__all__ = ["compile_cases", "take_plan"]

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


def compile_cases(capability: int) -> list[CompileCase]:
    """The kernel once: what it compiles to does not depend on the model."""
    del capability
    offsets = dict.fromkeys([f"{name}_at" for name in _TAKEN], "i32") | {"length": "i32"}
    device = dict.fromkeys(("arenas", "turn", "plan", "block_tables", "slot_params", "last_token"), "*i32")
    bounds = dict.fromkeys(("tokens", "rows", "table_stride", "group_stride"), "i32")
    constants = {"PARAM_LEN": PARAM_LEN, "NUM_GROUPS": 1, "BLOCK": _TAKE_BLOCK}
    return [CompileCase(_take_plan_kernel, device | offsets | bounds, constants, aligned=tuple(offsets))]
