"""The kernel that writes the attention kernels' item lists for a step."""

from __future__ import annotations

import triton
import triton.language as tl
from octavo.kernels.attention import CHUNK
from octavo.kernels.attention_work import SORTED_ROWS, SPLIT_ROUNDS, AttentionWork, decode_launch, takes_whole
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import await_previous
from torch import Tensor

__all__ = ["compile_cases", "plan_attention"]


def plan_attention(
    counts: Tensor,
    slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    group_rows: Tensor,
    group_starts: Tensor,
    group_blocks: Tensor,
    work: AttentionWork,
    *,
    rows: int,
    grouped: bool,
    mixed: bool,
) -> None:
    """Write the lists of a step.

    Args:
        counts: int32[16], the plan's.
        slots: int32 [rows], the slot of each row: the plan's `rows`.
        query_start: int32 [rows + 1], first token of each row.
        seq_lens: int32 [rows], keys of each row.
        group_rows: int32, rows of the groups, one group after the other.
        group_starts: int32, first of each group's rows, and the end.
        group_blocks: int32, blocks each group shares.
        work: the lists.
        rows: the most rows that this launch may be given.
        grouped: whether groups are to be used.
        mixed: whether there are prompt rows.
    """
    decode = decode_launch(work, rows)
    sizes = (work.max_num_seqs, work.window, work.block_size, work.members, work.queries)
    launch(
        _plan_kernel,
        (rows,),
        counts,
        slots,
        query_start,
        seq_lens,
        group_rows,
        group_starts,
        group_blocks,
        work.decode_items,
        work.group_items,
        work.prompt_items,
        work.totals,
        work.row_partials,
        work.member_rows,
        work.chunks,
        work.decode_parts,
        work.processors * decode.programs,
        **_constants(*sizes, grouped, mixed, takes_whole(work, decode, grouped)),
        num_warps=4,
        enable_fp_fusion=False,
    )


def _constants(
    max_num_seqs: int,
    window: int,
    block_size: int,
    members: int,
    queries: int,
    grouped: bool,
    mixed: bool,
    whole: bool,
) -> dict[str, int | bool]:
    return {
        "ROWS": triton.next_power_of_2(max(16, max_num_seqs)),
        "STEPS": max(1, max_num_seqs).bit_length(),
        "WINDOW": window,
        "BLOCK_SIZE": block_size,
        "CHUNK": CHUNK,
        "MEMBERS": members,
        "QUERIES": queries,
        "GROUPED": grouped and members > 0,
        "MIXED": mixed,
        "SORTED_ROWS": SORTED_ROWS,
        "WHOLE": whole,
        "SPLIT_ROUNDS": SPLIT_ROUNDS,
    }


@triton.jit(do_not_specialize=["most_chunks", "per_item", "programs"])
def _plan_kernel(
    counts,
    slots,
    query_start,
    seq_lens,
    group_rows,
    group_starts,
    group_blocks,
    decode_items,
    group_items,
    prompt_items,
    totals,
    row_partials,
    member_rows,
    most_chunks,
    per_item,
    programs,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    MEMBERS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUPED: tl.constexpr,
    MIXED: tl.constexpr,
    SORTED_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT_ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r writes the items of row r and of group r; each sums up for itself what lies before.

    It starts nothing early, so that all later kernels find its lists, and the plan, without waiting.
    """
    await_previous(PDL)
    r = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    num_rows = tl.load(counts + 1)
    num_decode = tl.load(counts + 2)

    length = tl.load(seq_lens + lane, mask=lane < num_decode, other=0)
    first = tl.maximum(length - WINDOW, 0) // CHUNK if WINDOW > 0 else lane * 0
    chunks = (length + CHUNK - 1) // CHUNK - first
    whole = False
    moved = 0
    if WHOLE and num_decode > SORTED_ROWS:
        # Of the first rows every chunk is an item, enough that programs end together. The others need no merge; their
        # items come first.
        is_whole = (lane < num_decode) & ((tl.cumsum(chunks) - chunks) * per_item >= programs * SPLIT_ROUNDS)
        whole = tl.sum(tl.where(is_whole & (lane == r), 1, 0)) > 0
        moved = tl.where(whole, -tl.sum(tl.where(is_whole, 0, chunks)), tl.sum(tl.where(is_whole, 1, 0)))
        chunks = tl.where(is_whole, 1, chunks)
    before = tl.sum(tl.where(lane < r, chunks, 0)) + moved
    total = tl.sum(chunks)
    shared = 0
    if GROUPED:
        num_groups = tl.load(counts + 8)
        group = _group_of(lane, group_starts, num_groups, STEPS)
        member = group < num_groups
        member_row = tl.load(group_rows + lane, mask=member, other=ROWS)
        member_shared = tl.load(group_blocks + group, mask=member, other=0) * BLOCK_SIZE // CHUNK
        before -= tl.sum(tl.where(member_row < r, member_shared, 0))
        total -= tl.sum(member_shared)
        shared = tl.sum(tl.where(member_row == r, member_shared, 0))
        if r == 0:
            tl.store(member_rows + lane, member_row, mask=member)
        _plan_group(
            r,
            lane,
            slots,
            group_rows,
            group_starts,
            group_blocks,
            num_groups,
            group_items,
            totals,
            BLOCK_SIZE,
            CHUNK,
            MEMBERS,
        )
    elif r == 0:
        tl.store(totals + 1, 0)
    if r == 0:
        tl.store(totals, total)
        tl.store(totals + 3, num_decode)
    if r < num_decode:
        own_length = tl.load(seq_lens + r)
        own_first = tl.maximum(own_length - WINDOW, 0) // CHUNK if WINDOW > 0 else 0
        count = (own_length + CHUNK - 1) // CHUNK - own_first
        count = tl.where(whole, 1, count)
        tl.store(row_partials + r, tl.where(count > 1, count, 0))
        slot = tl.load(slots + r)
        visible = tl.maximum(own_length - WINDOW, 0) if WINDOW > 0 else 0
        for start in range(shared, count, 64):
            c = start + tl.arange(0, 64)
            here = c < count
            place = before - shared + c
            if num_decode <= SORTED_ROWS:
                # The last chunk of each row, which is short, before all others or after them: where the programs'
                # last full chunks leave many of them idle, short ones fill the gap, and else they would make one.
                left = (total - num_decode) * per_item % programs
                first_of_full = tl.where((left == 0) | (2 * left >= programs), num_decode, 0)
                short = tl.where(first_of_full > 0, r, total - num_decode + r)
                place = tl.where(c < count - 1, first_of_full + before - r - shared + c, short)
            record = decode_items + place * 8
            begin = (own_first + c) * CHUNK
            tl.store(record, r, mask=here)
            tl.store(record + 1, slot, mask=here)
            tl.store(record + 2, tl.maximum(begin, visible), mask=here)
            tl.store(record + 3, tl.where(whole, own_length, tl.minimum(begin + CHUNK, own_length)), mask=here)
            tl.store(record + 4, tl.where(count > 1, r * most_chunks + c, -1), mask=here)
            tl.store(record + 5, own_length - 1, mask=here)
    if MIXED:
        _plan_prompt(r, lane, num_decode, num_rows, slots, query_start, seq_lens, prompt_items, totals, QUERIES)
    elif r == 0:
        tl.store(totals + 2, 0)


@triton.jit
def _group_of(member, group_starts, num_groups, STEPS: tl.constexpr):
    """The group whose rows hold place `member` of all groups' rows: the first that ends after it, by bisection."""
    low = member * 0
    high = low + num_groups
    for _ in range(STEPS):
        middle = (low + high) // 2
        open = low < high
        ended = tl.load(group_starts + middle + 1, mask=open, other=0) <= member
        low = tl.where(open & ended, middle + 1, low)
        high = tl.where(open & (ended == 0), middle, high)
    return low


@triton.jit
def _plan_group(
    r,
    lane,
    slots,
    group_rows,
    group_starts,
    group_blocks,
    num_groups,
    group_items,
    totals,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Items of group r: its shared chunks, each for all of its rows, MEMBERS at a time."""
    here = lane < num_groups
    begin = tl.load(group_starts + lane, mask=here, other=0)
    size = tl.load(group_starts + lane + 1, mask=here, other=0) - begin
    chunks = tl.load(group_blocks + lane, mask=here, other=0) * BLOCK_SIZE // CHUNK
    items = chunks * ((size + MEMBERS - 1) // MEMBERS)
    if r == 0:
        tl.store(totals + 1, tl.sum(items))
    if r < num_groups:
        before = tl.sum(tl.where(lane < r, items, 0))
        own_begin = tl.load(group_starts + r)
        own_size = tl.load(group_starts + r + 1) - own_begin
        subsets = (own_size + MEMBERS - 1) // MEMBERS
        count = tl.load(group_blocks + r) * BLOCK_SIZE // CHUNK * subsets
        slot = tl.load(slots + tl.load(group_rows + own_begin))
        for start in range(0, count, 64):
            i = start + tl.arange(0, 64)
            inside = i < count
            skipped = i % subsets * MEMBERS
            record = group_items + (before + i) * 8
            tl.store(record, own_begin + skipped, mask=inside)
            tl.store(record + 1, tl.minimum(own_size - skipped, MEMBERS), mask=inside)
            tl.store(record + 2, slot, mask=inside)
            tl.store(record + 3, i // subsets, mask=inside)


@triton.jit
def _plan_prompt(
    r, lane, num_decode, num_rows, slots, query_start, seq_lens, prompt_items, totals, QUERIES: tl.constexpr
):
    """Items of prompt row r, at their rank among all: by falling position of the first query, then by row."""
    here = (lane >= num_decode) & (lane < num_rows)
    tokens = tl.load(query_start + lane + 1, mask=here, other=0) - tl.load(query_start + lane, mask=here, other=0)
    position = tl.load(seq_lens + lane, mask=here, other=0) - tokens
    blocks = (tokens + QUERIES - 1) // QUERIES
    if r == 0:
        tl.store(totals + 2, tl.sum(blocks))
    if (r >= num_decode) & (r < num_rows):
        first = tl.load(query_start + r)
        own_tokens = tl.load(query_start + r + 1) - first
        own_position = tl.load(seq_lens + r) - own_tokens
        count = (own_tokens + QUERIES - 1) // QUERIES
        slot = tl.load(slots + r)
        for start in range(0, count, 16):
            b = start + tl.arange(0, 16)
            inside = b < count
            key = own_position + b * QUERIES
            # Of another row's blocks, those before this one are not ahead in the list; nor is its equal, if further on.
            reach = tl.maximum(key[:, None] - position[None, :] + QUERIES, 0)
            behind = tl.where((lane < r)[None, :], (reach - 1) // QUERIES, reach // QUERIES)
            behind = tl.minimum(tl.maximum(behind, 0), blocks[None, :])
            rank = tl.sum(blocks[None, :] - behind, 1)
            record = prompt_items + rank * 4
            tl.store(record, slot, mask=inside)
            tl.store(record + 1, first + b * QUERIES, mask=inside)
            tl.store(record + 2, key, mask=inside)
            tl.store(record + 3, tl.minimum(own_tokens - b * QUERIES, QUERIES), mask=inside)


def compile_cases(capability: int) -> list[CompileCase]:
    """The planning kernel of each kind of step."""
    del capability
    names = (
        "counts slots query_start seq_lens group_rows group_starts group_blocks decode_items group_items prompt_items"
        " totals row_partials member_rows"
    )
    return [
        CompileCase(
            _plan_kernel,
            dict.fromkeys(names.split(), "*i32") | dict.fromkeys(("most_chunks", "per_item", "programs"), "i32"),
            _constants(256, window, 16, 32, 64, grouped, mixed, whole),
        )
        for window, grouped, mixed, whole in (
            (0, False, False, True),
            (0, True, True, False),
            (4096, False, True, True),
        )
    ]
