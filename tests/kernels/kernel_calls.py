"""The extension's kernels called on tensors."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch
from octavo import _core
from torch import Tensor

NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
ISAS: list[str] = _core.cpu_info()["isas"]


@contextlib.contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Force an instruction set for a while."""
    before = _core.cpu_info()["isa"]
    _core.cpu_set_isa(name)
    try:
        yield
    finally:
        _core.cpu_set_isa(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of threads for a while."""
    before = _core.cpu_info()["num_threads"]
    _core.cpu_set_num_threads(count)
    try:
        yield
    finally:
        _core.cpu_set_num_threads(before)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x)
    _core.cpu_rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        NAMES[x.dtype],
        residual=0 if residual is None else residual.data_ptr(),
    )
    return out


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _core.cpu_act_and_mul(gate_up.data_ptr(), out.data_ptr(), *out.shape, activation, NAMES[gate_up.dtype])
    return out


def rope_and_cache(
    qkv: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    **options: Any,
) -> None:
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    for name in ("q_norm", "k_norm"):
        if options.get(name) is not None:
            options[name] = options[name].data_ptr()
    _core.cpu_rope_and_cache(
        qkv.data_ptr(),
        kv_cache.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        cos_sin.data_ptr(),
        qkv.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        cos_sin.shape[1],
        block_size,
        NAMES[qkv.dtype],
        **options,
    )


def attention(
    qkv: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    out = qkv.new_full((qkv.shape[0], num_heads, head_dim), float("nan"))
    _core.cpu_attention(
        qkv.data_ptr(),
        qkv.stride(0),
        out.data_ptr(),
        kv_cache.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        rows.data_ptr(),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        len(rows),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        scale,
        NAMES[qkv.dtype],
        window=window,
        softcap=softcap,
    )
    return out


class Paged:
    """Sequences with random q, k and v, their keys and values in a cache of shuffled blocks.

    Every slot of the cache that no sequence owns holds NaN, the tails of the last blocks among them.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_heads, self.lengths = num_heads, lengths
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = [torch.randn(n, width, generator=generator).to(dtype) for n in lengths]
        table_width = max(-(-n // block_size) for n in lengths) + 1
        num_blocks = sum(-(-n // block_size) for n in lengths) + 3
        free = list(range(1, num_blocks))
        random.Random(seed).shuffle(free)
        shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
        self.natural = torch.full(shape, float("nan"), dtype=dtype)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
        # A slot is not its row: the tables lie in another order.
        self.slots = list(range(len(lengths)))[::-1]
        self.block_tables = torch.full((len(lengths), table_width), num_blocks - 1, dtype=torch.int32)
        still = torch.ones(1, head_dim)
        still[:, head_dim // 2 :] = 0
        for slot, n, qkv in zip(self.slots, lengths, self.qkv, strict=True):
            blocks = [free.pop() for _ in range(-(-n // block_size))]
            self.block_tables[slot, : len(blocks)] = torch.tensor(blocks)
            position = torch.arange(n)
            mapping = torch.tensor(blocks)[position // block_size] * block_size + position % block_size
            zeros = torch.zeros(n, dtype=torch.int32)
            rope_and_cache(qkv.clone(), self.cache, zeros, mapping.int(), still, num_heads)
            k, v = qkv.view(n, -1, head_dim)[:, num_heads:].split(num_kv_heads, dim=1)
            block, offset = mapping // block_size, mapping % block_size
            self.natural[block, 0, :, offset] = k
            self.natural[block, 1, :, offset] = v

    def rows(self, parts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv, rows, query_start and seq_lens of (sequence, first query, end) parts."""
        qkv = torch.cat([self.qkv[s][first:end] for s, first, end in parts])
        counts = torch.tensor([0] + [end - first for _, first, end in parts])
        rows = torch.tensor([self.slots[s] for s, _, _ in parts], dtype=torch.int32)
        ends = torch.tensor([end for _, _, end in parts], dtype=torch.int32)
        return qkv, rows, counts.cumsum(0).int(), ends

    def attention(self, parts: list[tuple[int, int, int]], scale: float, **options: Any) -> Tensor:
        qkv, rows, query_start, seq_lens = self.rows(parts)
        return attention(
            qkv,
            self.cache,
            self.block_tables,
            rows,
            query_start,
            seq_lens,
            self.num_heads,
            scale,
            **options,
        )
