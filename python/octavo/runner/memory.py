"""What an engine will take of the memory that is free, worked out before anything is loaded. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo.errors import ConfigError, NotEnoughMemory
from octavo.runner.interface import NUM_ARENAS, PARAM_WIDTH

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.layers.spec import DecoderSpec

__all__ = ["ITEM_SIZES", "MemoryPlan", "format_bytes", "head_rows", "model_len_limit", "plan_memory"]

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}

HOST_BYTES = 64 << 20
"""Interpreter and libraries of an engine process, mapped file pages apart."""

DEFAULT_KV_BYTES = 1 << 30
_LOGITS_BYTES = 32 << 20
_MIN_HEAD_ROWS, _MAX_HEAD_ROWS = 16, 256


class MemoryPlan(msgspec.Struct, kw_only=True, frozen=True):
    """Where the memory of one engine goes, in bytes.

    Attributes:
        model: its name.
        dtype: of weights, activations and KV cache.
        free_bytes: what this process may take now.
        usable_bytes: the share of it that the settings allow.
        host_bytes: interpreter and libraries.
        weights_bytes: weights and the rotary table.
        workspace_bytes: activations and logits of the largest step.
        state_bytes: block tables, plan arenas, sampling state; penalty counts as if every sequence had penalties.
        block_bytes: one block of the KV cache, all layers.
        block_size: tokens a block.
        num_blocks: blocks, the null block included.
        max_model_len: tokens of one sequence, at most.
        model_len_limit: what the model itself allows.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        head_rows: logits rows computed at once.
    """

    model: str
    dtype: str
    free_bytes: int
    usable_bytes: int
    host_bytes: int
    weights_bytes: int
    workspace_bytes: int
    state_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    model_len_limit: int
    max_num_seqs: int
    max_num_batched_tokens: int
    head_rows: int

    @property
    def kv_bytes(self) -> int:
        """The whole KV cache."""
        return self.num_blocks * self.block_bytes

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache."""
        return self.host_bytes + self.weights_bytes + self.workspace_bytes + self.state_bytes

    @property
    def total_bytes(self) -> int:
        """All of it, when every block is in use."""
        return self.fixed_bytes + self.kv_bytes

    def render(self) -> str:
        """The plan as lines of text for a terminal."""
        tokens = (self.num_blocks - 1) * self.block_size
        length = f"{self.max_model_len:,} tokens a sequence"
        if self.max_model_len < self.model_len_limit:
            length += f" (the model allows {self.model_len_limit:,})"
        rows = [
            ("weights", self.weights_bytes, self.dtype),
            ("activations", self.workspace_bytes, f"{self.max_num_batched_tokens:,} tokens a step"),
            ("KV cache", self.kv_bytes, f"{self.num_blocks:,} blocks of {self.block_size}: {tokens:,} tokens"),
            ("step state", self.state_bytes, f"{self.max_num_seqs:,} sequences"),
            ("process", self.host_bytes, "interpreter and libraries"),
            ("total", self.total_bytes, f"of {format_bytes(self.usable_bytes)} usable"),
            ("free now", self.free_bytes, ""),
        ]
        lines = [f"{self.model}: {length}"]
        lines += [f"  {label:<12}{format_bytes(size):>10}  {note}".rstrip() for label, size, note in rows]
        return "\n".join(lines)


def format_bytes(count: int) -> str:
    """Such as `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def head_rows(vocab_size: int, max_num_seqs: int) -> int:
    """Logits rows computed at once, so that their float32 buffer stays bounded whatever the vocabulary."""
    rows = min(max(_LOGITS_BYTES // (4 * vocab_size), _MIN_HEAD_ROWS), _MAX_HEAD_ROWS)
    return min(rows, max_num_seqs)


def model_len_limit(spec: DecoderSpec) -> int:
    """Tokens of one sequence that the model's positions allow."""
    rotary = spec.rotary
    if rotary.kind == "dynamic":
        return int(rotary.max_position * rotary.factor)
    if rotary.kind == "yarn":
        return max(rotary.max_position, int(rotary.original_max_position * rotary.factor))
    return rotary.max_position


def plan_memory(
    config: EngineConfig, spec: DecoderSpec, *, name: str, dtype: str, free_bytes: int, mlp_rows: int
) -> MemoryPlan:
    """Divide the memory that is free.

    The KV cache gets what the settings name, or else what all sequences could fill, 1 GiB at most (more where one
    sequence of an explicit `max_model_len` needs it). Where no length is set, it is lowered to what one sequence can
    have.

    Args:
        config: the settings.
        spec: the model.
        name: the model's name, for messages.
        dtype: resolved; a key of `ITEM_SIZES`.
        free_bytes: what this process may take.
        mlp_rows: as of the device's `Operations`.

    Raises:
        ConfigError: `max_model_len` beyond the model's positions.
        NotEnoughMemory: weights, or one sequence's blocks, do not fit; with the figures and the remedy.
    """
    itemsize = ITEM_SIZES[dtype]
    limit = model_len_limit(spec)
    length = config.max_model_len or limit
    if length > limit:
        raise ConfigError(
            f"max_model_len: {length} is more than the {limit} positions that {name} knows; use {limit} or less"
        )
    block_size, max_num_seqs = config.block_size, config.max_num_seqs
    block_bytes = block_size * spec.kv_bytes_per_token(itemsize)
    rows = head_rows(spec.vocab_size, max_num_seqs)
    plan = MemoryPlan(
        model=name,
        dtype=dtype,
        free_bytes=free_bytes,
        usable_bytes=int(free_bytes * config.gpu_memory_utilization),
        host_bytes=HOST_BYTES,
        weights_bytes=spec.num_parameters() * itemsize + length * spec.rotary.dim * 4,
        workspace_bytes=spec.workspace_bytes(config.max_num_batched_tokens, mlp_rows, rows, itemsize),
        state_bytes=_state_bytes(config, spec, length),
        block_bytes=block_bytes,
        block_size=block_size,
        num_blocks=0,
        max_model_len=length,
        model_len_limit=limit,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        head_rows=rows,
    )
    num_blocks = _num_blocks(config, plan)
    tokens = (num_blocks - 1) * block_size
    if tokens < length:
        if config.max_model_len is not None:
            raise _too_small(plan, f"max_model_len {length} needs {_blocks(length, block_size) + 1} blocks", num_blocks)
        length = tokens
    return msgspec.structs.replace(plan, num_blocks=num_blocks, max_model_len=length)


def _num_blocks(config: EngineConfig, plan: MemoryPlan) -> int:
    """Blocks of the KV cache, the null block included; at least two."""
    left = plan.usable_bytes - plan.fixed_bytes
    one_sequence = _blocks(plan.max_model_len, plan.block_size) + 1
    if left < 2 * plan.block_bytes:
        raise _too_small(plan, "not even one block of KV cache fits", max(left // plan.block_bytes, 0))
    if config.num_blocks is not None:
        num_blocks, source = config.num_blocks, f"num_blocks {config.num_blocks}"
    elif config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // plan.block_bytes
        source = f"kv_cache_memory {format_bytes(config.kv_cache_memory)}"
    else:
        budget = DEFAULT_KV_BYTES
        if config.max_model_len is not None:
            budget = max(budget, one_sequence * plan.block_bytes)
        most = config.max_num_seqs * (one_sequence - 1) + 1
        return min(most, min(budget, left) // plan.block_bytes)
    if num_blocks < 2:
        raise NotEnoughMemory(
            f"{source} makes {num_blocks} blocks of {format_bytes(plan.block_bytes)}; two are the least that can "
            "serve (one stays empty), so raise it"
        )
    if num_blocks * plan.block_bytes > left:
        raise _too_small(
            plan,
            f"{source} asks for {format_bytes(num_blocks * plan.block_bytes)} of KV cache",
            left // plan.block_bytes,
        )
    return num_blocks


def _too_small(plan: MemoryPlan, what: str, num_blocks: int) -> NotEnoughMemory:
    """The error that shows the sum."""
    return NotEnoughMemory(
        f"{plan.model}: {what}, and there is room for {num_blocks} of {format_bytes(plan.block_bytes)}. "
        f"Of {format_bytes(plan.free_bytes)} free, {format_bytes(plan.usable_bytes)} may be used; weights take "
        f"{format_bytes(plan.weights_bytes)}, activations {format_bytes(plan.workspace_bytes)}, the rest "
        f"{format_bytes(plan.host_bytes + plan.state_bytes)}. Lower max_model_len, max_num_batched_tokens or "
        "max_num_seqs, raise gpu_memory_utilization or kv_cache_memory, or use a smaller model"
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _state_bytes(config: EngineConfig, spec: DecoderSpec, length: int) -> int:
    """Block tables, sampling state and the arenas; the arenas' small arrays are about 64 numbers a row."""
    rows = config.max_num_seqs
    tables = rows * (_blocks(length, config.block_size) + PARAM_WIDTH + 2)
    arenas = NUM_ARENAS * (3 * config.max_num_batched_tokens + 64 * rows)
    counts = rows * spec.vocab_size
    return 4 * (tables + arenas + counts)
