"""Memory plan of an engine, computed before loading. Imports no torch."""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from octavo._core import NUM_ARENAS, PARAM_LEN, max_blocks_per_sequence
from octavo.errors import ConfigError, NotEnoughMemory
from octavo.runner.interface import mask_words

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.layers.decoder import Decoder

__all__ = [
    "ITEM_SIZES",
    "DeviceNeeds",
    "MemoryPlan",
    "cpu_needs",
    "format_bytes",
    "head_rows",
    "plan_memory",
]

_LOG = logging.getLogger(__name__)

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}

HOST_BYTES = 64 << 20
"""Interpreter and libraries of an engine process, mapped file pages apart."""

DEFAULT_KV_BYTES = 1 << 30
_LOGITS_BYTES = 32 << 20
_MAX_TABLE_UPDATES = 1 << 17
_MAX_BIASES = 1 << 17
_ROW_BIASES = 1024 + 128
"""Entries of a request's logit bias, and of the tokens that `min_tokens` may ban, at most."""

_MIN_HEAD_ROWS, _MAX_HEAD_ROWS = 16, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceNeeds:
    """Memory that a device needs besides weights, activations and KV cache.

    Attributes:
        device: `cpu` or `cuda`.
        max_num_seqs: sequences that run at once.
        process_bytes: what its process and libraries take.
        process: of what that is, in words.
        mlp_rows: as of the device's `Operations`.
        head_rows: logits rows computed at once, by the size of the vocabulary.
        kv_itemsize: bytes of a number in the KV cache; None for the activations' own.
        default_kv_bytes: of the KV cache where the settings leave it open; None for all that is left.
        work_bytes: scratch of attention and sampling, by the length of the longest sequence.
        num_arenas: of the plan in the device's memory, its own copy included.
        num_mask_arenas: of rows' masks in the device's memory.
    """

    device: str
    max_num_seqs: int
    process_bytes: int
    process: str
    mlp_rows: int
    head_rows: Callable[[int], int]
    kv_itemsize: int | None = None
    default_kv_bytes: int | None = None
    work_bytes: Callable[[int], int] = lambda _length: 0
    num_arenas: int = NUM_ARENAS
    num_mask_arenas: int = NUM_ARENAS


class MemoryPlan(msgspec.Struct, kw_only=True, frozen=True):
    """Memory of one engine, in bytes.

    Attributes:
        model: its name.
        device: `cpu` or `cuda`.
        dtype: of weights, activations and, where it has none of its own, KV cache.
        free_bytes: what this process may take of the device's memory now.
        usable_bytes: the share of it that the settings allow.
        process_bytes: what the process takes beside the rest.
        process: of what that is, in words.
        weights_bytes: weights and the rotary table.
        workspace_bytes: activations, logits and scratch of the largest step.
        scratch_bytes: of that, what attention and sampling keep for themselves.
        state_bytes: block tables, plan arenas, sampling state; penalty counts as if every sequence had penalties.
        block_bytes: one block of the KV cache, all layers in it.
        block_size: tokens a block.
        cache_windows: the window of each cache group, 0 for full attention.
        num_blocks: blocks, the null block included.
        max_model_len: tokens of one sequence, at most.
        model_len_limit: what the model itself allows.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        head_rows: logits rows computed at once.
    """

    model: str
    device: str
    dtype: str
    free_bytes: int
    usable_bytes: int
    process_bytes: int
    process: str
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
    cache_windows: tuple[int, ...] = (0,)
    scratch_bytes: int = 0

    def sequence_blocks(self, length: int) -> int:
        """Blocks that one sequence of `length` tokens takes at most, in all cache groups together."""
        return max_blocks_per_sequence(length, self.block_size, list(self.cache_windows), self.max_num_batched_tokens)

    @property
    def kv_bytes(self) -> int:
        """The whole KV cache."""
        return self.num_blocks * self.block_bytes

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache."""
        return self.process_bytes + self.weights_bytes + self.workspace_bytes + self.state_bytes

    @property
    def total_bytes(self) -> int:
        """All of it, when every block is in use."""
        return self.fixed_bytes + self.kv_bytes

    def render(self) -> str:
        """The plan as lines of text for a terminal."""
        cache = f"{self.num_blocks:,} blocks of {self.block_size}"
        if len(self.cache_windows) == 1:
            cache += f": {(self.num_blocks - 1) * self.block_size:,} tokens"
        length = f"{self.max_model_len:,} tokens a sequence"
        if self.max_model_len < self.model_len_limit:
            length += f" (the model allows {self.model_len_limit:,})"
        rows = [
            ("weights", self.weights_bytes, self.dtype),
            (
                "activations",
                self.workspace_bytes - self.scratch_bytes,
                f"{self.max_num_batched_tokens:,} tokens a step",
            ),
            ("KV cache", self.kv_bytes, cache),
            ("step state", self.state_bytes, f"{self.max_num_seqs:,} sequences"),
            ("process", self.process_bytes, self.process),
            ("total", self.total_bytes, f"of {format_bytes(self.usable_bytes)} usable"),
            ("free now", self.free_bytes, ""),
        ]
        if self.scratch_bytes:
            note = "attention and sampling"
            if self.scratch_bytes > self.usable_bytes // 10:
                note += "; lower max_num_seqs or max_model_len for less"
            rows.insert(2, ("scratch", self.scratch_bytes, note))
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


def cpu_needs(mlp_rows: int, max_num_seqs: int) -> DeviceNeeds:
    """Needs of a CPU. The KV cache has 1 GiB by default, since others use the machine too."""
    return DeviceNeeds(
        device="cpu",
        max_num_seqs=max_num_seqs,
        process_bytes=HOST_BYTES,
        process="interpreter and libraries",
        mlp_rows=mlp_rows,
        head_rows=lambda vocab_size: head_rows(vocab_size, max_num_seqs),
        default_kv_bytes=DEFAULT_KV_BYTES,
    )


def plan_memory(
    config: EngineConfig, decoder: Decoder, *, name: str, dtype: str, free_bytes: int, needs: DeviceNeeds
) -> MemoryPlan:
    """Divide the memory that is free.

    The KV cache gets what the settings name, or else what all sequences could fill, but no more than the device's
    default (more where one sequence of an explicit `max_model_len` needs it). Where no length is set, it is lowered to
    what one sequence can have.

    Args:
        config: the settings.
        decoder: the model, without weights.
        name: the model's name, for messages.
        dtype: resolved; a key of `ITEM_SIZES`.
        free_bytes: what this process may take.
        needs: of the device.

    Raises:
        ConfigError: `max_model_len` beyond the model's positions.
        NotEnoughMemory: weights, or one sequence's blocks, do not fit; with the figures and the remedy.
    """
    limit = decoder.position_limit
    length = config.max_model_len or limit
    if length > decoder.stretched_limit:
        raise ConfigError(
            f"max_model_len: {length} is more than the {decoder.stretched_limit} positions that {name} knows; use "
            f"{decoder.stretched_limit} or less"
        )
    if length > limit:
        _LOG.warning(
            "max_model_len %s is taken: %s names %s positions and scales them linearly up to %s; output beyond its "
            "training length may be worse",
            length,
            name,
            limit,
            decoder.stretched_limit,
        )
    plan = _divide(config, decoder, name=name, dtype=dtype, free_bytes=free_bytes, needs=needs, length=length)
    if plan.sequence_blocks(length) < plan.num_blocks:
        return plan
    if config.max_model_len is not None:
        blocks = plan.sequence_blocks(length) + 1
        raise _too_small(plan, f"max_model_len {length} needs {blocks} blocks", plan.num_blocks, _raise_named(config))
    # Shorter sequences need less scratch, so as many blocks fit at least.
    longest = bisect.bisect_right(range(length), plan.num_blocks - 1, key=plan.sequence_blocks) - 1
    if longest < plan.block_size:
        least = plan.sequence_blocks(min(length, plan.block_size)) + 1
        raise _too_small(plan, f"the shortest sequence needs {least} blocks", plan.num_blocks, _raise_named(config))
    return _divide(config, decoder, name=name, dtype=dtype, free_bytes=free_bytes, needs=needs, length=longest)


def _divide(
    config: EngineConfig,
    decoder: Decoder,
    *,
    name: str,
    dtype: str,
    free_bytes: int,
    needs: DeviceNeeds,
    length: int,
) -> MemoryPlan:
    """The plan for sequences of a length, which one sequence may turn out not to fit."""
    itemsize = ITEM_SIZES[dtype]
    max_tokens = config.batched_tokens(needs.device)
    rows = needs.head_rows(decoder.vocab_size)
    scratch = needs.work_bytes(length)
    plan = MemoryPlan(
        model=name,
        device=needs.device,
        dtype=dtype,
        free_bytes=free_bytes,
        usable_bytes=int(free_bytes * config.gpu_memory_utilization),
        process_bytes=needs.process_bytes,
        process=needs.process,
        weights_bytes=decoder.weights_bytes(itemsize, length),
        workspace_bytes=decoder.workspace(max_tokens, rows, needs.mlp_rows).num_bytes(itemsize) + scratch,
        state_bytes=_state_bytes(config, decoder, length, max_tokens, needs),
        block_bytes=decoder.cache_layout.block_bytes(config.block_size, needs.kv_itemsize or itemsize),
        block_size=config.block_size,
        num_blocks=0,
        max_model_len=length,
        model_len_limit=decoder.position_limit,
        max_num_seqs=needs.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        head_rows=rows,
        cache_windows=decoder.cache_layout.windows,
        scratch_bytes=scratch,
    )
    return msgspec.structs.replace(plan, num_blocks=_num_blocks(config, plan, needs.default_kv_bytes))


def _num_blocks(config: EngineConfig, plan: MemoryPlan, default_kv_bytes: int | None) -> int:
    """Blocks of the KV cache, the null block included; at least two."""
    left = plan.usable_bytes - plan.fixed_bytes
    one_sequence = plan.sequence_blocks(plan.max_model_len) + 1
    if left < 2 * plan.block_bytes:
        raise _too_small(plan, "not even one block of KV cache fits", max(left // plan.block_bytes, 0))
    if config.num_blocks is not None:
        num_blocks, source = config.num_blocks, f"num_blocks {config.num_blocks}"
    elif config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // plan.block_bytes
        source = f"kv_cache_memory {format_bytes(config.kv_cache_memory)}"
    else:
        budget = left if default_kv_bytes is None else default_kv_bytes
        if config.max_model_len is not None:
            budget = max(budget, one_sequence * plan.block_bytes)
        most = plan.max_num_seqs * (one_sequence - 1) + 1
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
            f"lower {_named_cache(config)} or leave it out",
        )
    return num_blocks


def _named_cache(config: EngineConfig) -> str | None:
    """The setting that names the cache's size, if one does."""
    if config.num_blocks is not None:
        return "num_blocks"
    return None if config.kv_cache_memory is None else "kv_cache_memory"


def _raise_named(config: EngineConfig) -> str | None:
    """The remedy for a cache that a setting made too small."""
    named = _named_cache(config)
    return f"raise {named}" if named else None


def _too_small(plan: MemoryPlan, what: str, num_blocks: int, nearest: str | None = None) -> NotEnoughMemory:
    """The error that shows the sum.

    Args:
        plan: that does not work.
        what: does not fit.
        num_blocks: that there is room for.
        nearest: remedy, named before the general ones.
    """
    remedies = [nearest] if nearest else []
    remedies += ["lower max_model_len, max_num_batched_tokens or max_num_seqs", "raise gpu_memory_utilization"]
    remedy = ", ".join(remedies)
    return NotEnoughMemory(
        f"{plan.model}: {what}, and there is room for {num_blocks} of {format_bytes(plan.block_bytes)}. "
        f"Of {format_bytes(plan.free_bytes)} free, {format_bytes(plan.usable_bytes)} may be used; weights take "
        f"{format_bytes(plan.weights_bytes)}, activations {format_bytes(plan.workspace_bytes)}, the rest "
        f"{format_bytes(plan.process_bytes + plan.state_bytes)}. "
        f"{remedy[0].upper()}{remedy[1:]}, or use a smaller model"
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _state_bytes(config: EngineConfig, decoder: Decoder, length: int, max_tokens: int, needs: DeviceNeeds) -> int:
    """Block tables, sampling state, masks and the arenas; the arenas' small arrays are about 64 numbers a row."""
    rows, blocks, groups = needs.max_num_seqs, _blocks(length, config.block_size), len(decoder.cache_layout.windows)
    tables = rows * (groups * blocks + PARAM_LEN + 2)
    # As the core's `table_update_capacity`.
    least = blocks + 2 * rows + _blocks(max_tokens, config.block_size)
    updates = groups * max(least, min(rows * blocks, _MAX_TABLE_UPDATES))
    # As its `bias_capacity`, but for the end tokens of the model.
    biases = max(_ROW_BIASES, min(rows * _ROW_BIASES, _MAX_BIASES))
    arenas = needs.num_arenas * ((2 + groups) * max_tokens + 64 * rows + 3 * updates + 3 * biases)
    counts = rows * decoder.vocab_size
    masks = needs.num_mask_arenas * rows * mask_words(decoder.vocab_size)
    return 4 * (tables + arenas + counts + masks)
