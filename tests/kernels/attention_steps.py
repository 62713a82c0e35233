"""Steps for the attention kernels: rows over a paged cache whose unused places would show if they were read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import reference_kernels as reference
import torch
from octavo.kernels.attention import AttentionShape
from octavo.kernels.attention_plan import plan_attention
from octavo.kernels.attention_work import AttentionWork
from torch import Tensor


@dataclasses.dataclass
class Step:
    """Inputs of one step. Rows with one query come first."""

    shape: AttentionShape
    qkv: Tensor
    cache: Tensor
    tables: Tensor
    slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    counts: Tensor
    group_rows: Tensor
    group_starts: Tensor
    group_blocks: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.counts[0])

    def plan(self, work: AttentionWork, *, grouped: bool = False, mixed: bool = False) -> None:
        plan_attention(
            self.counts,
            self.slots,
            self.query_start,
            self.seq_lens,
            self.group_rows,
            self.group_starts,
            self.group_blocks,
            work,
            rows=len(self.slots),
            grouped=grouped,
            mixed=mixed,
        )

    def work(self, window: int = 0, **options: int) -> AttentionWork:
        """An `AttentionWork` just large enough."""
        longest = int(self.seq_lens[: self.counts[1]].max())
        return AttentionWork(len(self.slots), longest, len(self.qkv), self.shape, window, self.qkv.device, **options)

    def expected(self, window: int = 0) -> Tensor:
        """float64 [num_tokens, num_heads * head_dim] of the reference."""
        shape, tokens, rows = self.shape, self.num_tokens, int(self.counts[1])
        q = self.qkv[:tokens, : shape.num_heads * shape.head_dim].view(tokens, shape.num_heads, shape.head_dim)
        return reference.attention(
            q.cpu(),
            self.cache.cpu().double(),
            self.tables.cpu(),
            self.slots[:rows].cpu(),
            self.query_start[: rows + 1].cpu(),
            self.seq_lens[:rows].cpu(),
            shape.scale,
            window=window,
            softcap=shape.softcap,
        ).flatten(1)


def make_step(
    shape: AttentionShape,
    rows: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    groups: Sequence[tuple[Sequence[int], int]] = (),
    padding: int = 0,
    seed: int = 0,
) -> Step:
    """A step of rows (keys, queries); groups are (rows, shared blocks).

    Blocks lie anywhere in the cache, slots in any order. Every place that no row may read is NaN, as are the queries
    of `padding` further tokens; `padding` further rows hold nonsense.
    """
    random = torch.Generator().manual_seed(seed)
    size = shape.block_size
    needed = [-(-length // size) for length, _ in rows]
    num_blocks = sum(needed) + 3
    free = torch.randperm(num_blocks, generator=random).tolist()
    slots = torch.randperm(len(rows) + 2, generator=random)[: len(rows)].int()
    tables = torch.full((len(rows) + 2, max(needed) + 5), num_blocks - 1, dtype=torch.int32)
    cache = torch.full((num_blocks, 2, shape.num_kv_heads, size, shape.head_dim), math.nan)
    chains = [[free.pop() for _ in range(count)] for count in needed]
    for members, shared in groups:
        for row in members:
            chains[row][:shared] = chains[members[0]][:shared]
    for (length, _), slot, chain in zip(rows, slots.tolist(), chains, strict=True):
        tables[slot, : len(chain)] = torch.tensor(chain, dtype=torch.int32)
        for i, block in enumerate(chain):
            filled = min(size, length - i * size)
            if math.isnan(float(cache[block, 0, 0, filled - 1, 0])):
                cache[block, :, :, :filled] = torch.randn(
                    2, shape.num_kv_heads, filled, shape.head_dim, generator=random
                )
    queries = [count for _, count in rows]
    tokens = sum(queries)
    qkv = torch.randn(tokens + padding, shape.width, generator=random)
    qkv[tokens:] = math.nan
    start = torch.tensor([0, *queries]).cumsum(0).int()
    decode = next((i for i, count in enumerate(queries) if count > 1), len(rows))
    counts = torch.zeros(16, dtype=torch.int32)
    counts[:3] = torch.tensor([tokens, len(rows), decode])
    counts[8] = len(groups)
    junk = torch.full((padding,), 1 << 20, dtype=torch.int32)
    members = [row for group, _ in groups for row in group]
    starts = torch.tensor([0, *(len(group) for group, _ in groups)]).cumsum(0)
    stored = cache.to(dtype)
    if shape.kv_fp8:
        stored = stored.to(torch.float8_e4m3fn)

    def padded(values: Sequence[int]) -> Tensor:
        room = torch.full((len(rows) + padding + 1,), 1 << 20, dtype=torch.int32)
        room[: len(values)] = torch.tensor(values, dtype=torch.int32)
        return room.to(device)

    return Step(
        shape,
        qkv.to(device, dtype),
        stored.to(device),
        tables.to(device),
        torch.cat([slots, junk]).to(device),
        torch.cat([start, junk]).to(device),
        torch.cat([torch.tensor([length for length, _ in rows], dtype=torch.int32), junk]).to(device),
        counts.to(device),
        padded(members),
        padded(starts.tolist()),
        padded([shared for _, shared in groups]),
    )
