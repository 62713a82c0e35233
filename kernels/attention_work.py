"""The lists of what the attention kernels do in a step, and the memory for their partial results.

A step's graph is replayed with other rows each time, so a launch's grid cannot depend on them: programs take items from
a list that `attention_plan` writes once a step for all layers of one window. Records are int32:

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
from octavo.kernels.attention import CHUNK, AttentionShape
from octavo.kernels.attention_decode_tables import DecodeConfig, decode_config, hopper_decode_config
from octavo.kernels.attention_prefill_tables import prefill_config
from torch import Tensor

__all__ = [
    "DECODE_ROWS",
    "SORTED_ROWS",
    "SPLIT_ROUNDS",
    "AttentionWork",
    "decode_launch",
    "device_limits",
    "group_rows",
    "split_rows",
    "takes_whole",
    "work_bytes",
]

DECODE_ROWS = 16
"""Query heads of a decode item, one tensor-core product's rows."""

_DECODE, _GROUP, _PROMPT = 8, 8, 4

SORTED_ROWS = 32
"""Up to so many decode rows have their last chunks apart from the others. With more, each program has many items, and
short ones among long ones keep the memory busy."""

SPLIT_ROUNDS = 3
"""Single chunks that each program gets on average, after the rows taken whole."""

_HOPPER_SHARED_BYTES = 160 << 10
"""Shared memory of a program from which a GPU is launched like Hopper, which has 227 KB."""


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

    Later GPUs whose programs have no more shared memory than 8.9's (compute capability 12) are launched like 8.9.
    Without a GPU, Triton's interpreter is treated as the least of them.
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
    """How many of the first `tokens` rows may have partials."""
    rows = min(tokens, work.max_num_seqs)
    decode = decode_launch(work, rows)
    if not takes_whole(work, decode, grouped):
        return rows
    # Each row has a chunk at least.
    return min(rows, max(SORTED_ROWS, -(-work.processors * decode.programs * SPLIT_ROUNDS // work.decode_parts)))


def takes_whole(work: AttentionWork, decode: DecodeConfig, grouped: bool) -> bool:
    """Whether one program may take all chunks of a row, so that the row has no partials."""
    return decode.hopper_stages > 0 and not (grouped and work.members > 0)


def group_rows(capability: int) -> int:
    """Query heads of all sequences together that one shared-prefix item takes, as the registers allow."""
    return 64 if capability >= 90 else 32


def _chunks(max_model_len: int, window: int) -> int:
    """Most chunks that one query sees."""
    chunks = -(-max_model_len // CHUNK)
    return min(chunks, (window + CHUNK - 2) // CHUNK + 1) if window else chunks
