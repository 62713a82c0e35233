"""The lists of what the attention kernels have to do in a step, made on the device, and the room for their partials.

A step's graph is replayed with other rows each time, so the launches' grids say nothing of them: programs take items
off a list that `plan_attention` writes once a step for all layers of one window. Records are int32:

* decode, 8 a record: row, slot of its block table, first position, position past the last, place of its partial (-1:
  all of the row, which goes straight to the output), position of the query, 0, 0. An item is a chunk, or on Hopper all
  chunks of a row;
* shared prefix, 8 a record: first of its rows in `group_rows`, number of rows, slot of a block table that holds the
  blocks, chunk, 0, 0, 0, 0;
* prompt, 4 a record: slot of its block table, first token, that token's position, number of tokens; items that see
  most keys come first, so that the short ones fill the gaps at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.attention import CHUNK, AttentionShape
from octavo.kernels.attention_decode_tables import DecodeConfig, decode_config, hopper_decode_config
from octavo.kernels.attention_prefill_tables import prefill_config
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import await_previous
from torch import Tensor

__all__ = [
    "DECODE_ROWS",
    "AttentionWork",
    "compile_cases",
    "decode_launch",
    "device_limits",
    "group_rows",
    "plan_attention",
    "split_rows",
    "work_bytes",
]

DECODE_ROWS = 16
"""Query heads of a decode item, one tensor-core product's rows."""

_DECODE, _GROUP, _PROMPT = 8, 8, 4

_SORTED_ROWS = 32
"""Up to so many decode rows have their last chunks apart from the others. With more, each program has many items, and
short ones among long ones keep the memory busy."""

_SPLIT_ROUNDS = 3
"""Of single chunks each program gets so many in the mean, after the rows taken whole."""

_HOPPER_SHARED_BYTES = 160 << 10
"""A program's shared memory from which on a GPU is launched on as Hopper is, which has 227 KB."""


class AttentionWork:
    """Item lists and partials of the layers of one window.

    Attributes:
        decode_items: int32 [items, 8].
        group_items: int32 [items, 8].
        prompt_items: int32 [items, 4].
        totals: int32[4], how many of each of these, then how many decode rows.
        row_partials: int32 [max_num_seqs], partials of each decode row; 0: none.
        turns: int32[2], decode items taken after each program's first, programs that have ended; zero between launches.
        member_rows: int32 [max_num_seqs], the plan's `group_rows`.
        values: float32 [max_num_seqs * chunks, num_heads, head_dim], weighted values of each row's chunks.
        stats: float32 [max_num_seqs * chunks, num_heads, 2], maximum and sum of the weights of each.
        chunks: most chunks of a row.
        group_rows: rows of the shared-prefix kernel's products.
        members: sequences of a shared-prefix item; 0 where prefixes are not shared.
        queries: tokens of a prompt item.
        capability: compute capability of the device, 90 for 9.0.
        processors: its multiprocessors.
        shape: of the layers.
        decode_parts: programs that share a decode item, each its heads.
        on_hopper: as given.
        launch: how the decode kernel is launched, where not as the tables say.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int,
        shape: AttentionShape,
        window: int,
        device: torch.device,
        *,
        prompt_rows: int | None = None,
        on_hopper: bool = False,
    ) -> None:
        """Make the buffers.

        Args:
            max_num_seqs: rows of a step.
            max_model_len: positions of a sequence.
            max_tokens: tokens of a step.
            shape: of the layers.
            window: last positions that a query sees; 0 for all.
            device: of the buffers.
            prompt_rows: query heads of all tokens of a prompt item together; None for what suits the device.
            on_hopper: whether Hopper's own kernels serve (`attention_decode.serves_on_hopper`).
        """
        self.on_hopper = on_hopper
        self.launch: DecodeConfig | None = None
        self.window = window
        self.max_num_seqs = max_num_seqs
        self.shape = shape
        self.block_size = shape.block_size
        self.capability, self.processors = device_limits(device)
        self.group_rows = group_rows(self.capability)
        self.members = self.group_rows // shape.group if window == 0 else 0
        prompt_rows = prompt_rows or prefill_config(self.capability, shape.head_dim, on_hopper=on_hopper).rows
        self.queries = max(1, prompt_rows // shape.group)
        self.chunks = _chunks(max_model_len, window)
        self.decode_parts = shape.num_kv_heads * -(-shape.group // DECODE_ROWS)
        partials = max_num_seqs * self.chunks
        groups = max_num_seqs // 2 * self.chunks if self.members else 0

        def room(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.decode_items = room(torch.int32, partials, _DECODE)
        self.group_items = room(torch.int32, max(1, groups), _GROUP)
        self.prompt_items = room(torch.int32, max_tokens // self.queries + max_num_seqs, _PROMPT)
        self.totals = room(torch.int32, 4)
        self.row_partials = room(torch.int32, max_num_seqs)
        self.turns = room(torch.int32, 2)
        self.member_rows = room(torch.int32, max_num_seqs)
        self.values = room(torch.float32, partials, shape.num_heads, shape.head_dim)
        self.stats = room(torch.float32, partials, shape.num_heads, 2)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))


def work_bytes(max_num_seqs: int, max_model_len: int, max_tokens: int, shape: AttentionShape, window: int) -> int:
    """Bytes of an `AttentionWork` of these arguments, without making it."""
    return AttentionWork(max_num_seqs, max_model_len, max_tokens, shape, window, torch.device("meta")).num_bytes


def device_limits(device: torch.device) -> tuple[int, int]:
    """Compute capability (90 for 9.0) and number of multiprocessors; of the GPU in use for the meta device.

    Later GPUs whose programs have no more shared memory than 8.9's (compute capability 12) are launched on as these.
    Without a GPU Triton's interpreter stands in, which knows no more than the least of them.
    """
    if device.type == "cpu" or not torch.cuda.is_available():
        return 80, 2
    properties = torch.cuda.get_device_properties(device if device.type == "cuda" else None)
    capability = 10 * properties.major + properties.minor
    if capability > 90 and properties.shared_memory_per_block_optin < _HOPPER_SHARED_BYTES:  # type: ignore[attr-defined]
        capability = 89
    return capability, properties.multi_processor_count


def decode_launch(work: AttentionWork, tokens: int) -> DecodeConfig:
    """How the decode kernel is launched for so many rows, at most."""
    if work.launch is not None:
        return work.launch
    if work.on_hopper:
        return hopper_decode_config(work.shape.head_dim, tokens)
    return decode_config(work.capability, work.shape, tokens)


def split_rows(work: AttentionWork, tokens: int, *, grouped: bool) -> int:
    """Of so many rows at most, how many of the first there are that may have partials."""
    rows = min(tokens, work.max_num_seqs)
    decode = decode_launch(work, rows)
    if not _takes_whole(work, decode, grouped):
        return rows
    # Each row has a chunk at least.
    return min(rows, max(_SORTED_ROWS, -(-work.processors * decode.programs * _SPLIT_ROUNDS // work.decode_parts)))


def _takes_whole(work: AttentionWork, decode: DecodeConfig, grouped: bool) -> bool:
    return decode.hopper_stages > 0 and not (grouped and work.members > 0)


def group_rows(capability: int) -> int:
    """Query heads of all sequences together that one shared-prefix item takes, as the registers allow."""
    return 64 if capability >= 90 else 32


def _chunks(max_model_len: int, window: int) -> int:
    """Most chunks that one query sees."""
    chunks = -(-max_model_len // CHUNK)
    return min(chunks, (window + CHUNK - 2) // CHUNK + 1) if window else chunks


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
        **_constants(
            work.max_num_seqs,
            work.window,
            work.block_size,
            work.members,
            work.queries,
            grouped,
            mixed,
            _takes_whole(work, decode, grouped),
        ),
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
        "SORTED_ROWS": _SORTED_ROWS,
        "WHOLE": whole,
        "SPLIT_ROUNDS": _SPLIT_ROUNDS,
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
