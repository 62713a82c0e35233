"""What a decoder asks of a device: the few operations its forward is made of.

`Memory` is a device's array: numpy's on a CPU (which needs no torch, and starts a second sooner for it), a tensor
elsewhere. A `Buffer` is what the device's kernels take of it: an address on a CPU. The decoder never looks inside.
Shapes below are of the rows in use; buffers hold the most rows a step may have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.layers.weights import Weights

__all__ = ["Buffer", "IntArray", "KvCache", "Linear", "Memory", "Operations", "StepInputs"]

Memory: TypeAlias = Any
Buffer: TypeAlias = Any
IntArray: TypeAlias = npt.NDArray[np.int32]


@dataclasses.dataclass(slots=True)
class StepInputs:
    """The plan arrays of one arena as the kernels take them, and how much of each the step fills.

    Attributes:
        token_ids, positions: int32[num_tokens].
        slot_mappings: int32[num_tokens], one a cache group.
        rows, seq_lens: int32[num_rows].
        query_start: int32[num_rows + 1].
        block_tables: int32[max_num_seqs, table_stride], one a cache group.
    """

    token_ids: Buffer
    positions: Buffer
    slot_mappings: list[Buffer]
    rows: Buffer
    seq_lens: Buffer
    query_start: Buffer
    block_tables: list[Buffer]
    table_stride: int
    num_tokens: int = 0
    num_rows: int = 0
    num_decode_rows: int = 0


class Linear(Protocol):
    """A dense layer on its device, bias included; one arithmetic at every row count."""

    @property
    def num_bytes(self) -> int:
        """Memory the layer takes."""
        ...

    def forward(self, x: Buffer, out: Buffer, rows: int, *, out_float32: bool = False) -> None:
        """out[rows, N] = x[rows, K] @ weight.T + bias."""
        ...

    def embed(self, token_ids: Buffer, out: Buffer, rows: int) -> None:
        """out[rows, K] = weight[token_ids]."""
        ...


class KvCache(Protocol):
    """The KV cache of all layers.

    Attributes:
        layers: a buffer a layer, [num_blocks, 2, num_kv_heads, block_size, head_dim].
        num_bytes: of all layers.
    """

    layers: list[Buffer]
    num_bytes: int

    def copy_blocks(self, sources: Memory, destinations: Memory, counts: Memory | None = None) -> None:
        """Copy whole blocks, int32 ids, in every layer; no destination is a source.

        Given a plan's counts, the device reads there how many of them to copy.
        """
        ...

    def close(self) -> None:
        """Before the memory goes."""
        ...


class Operations(Protocol):
    """The kernels of one device, bound to one `DecoderSpec`.

    Attributes:
        mlp_rows: rows the MLP takes at once; fewer than a step has where its wide activations should stay in a cache.
    """

    mlp_rows: int

    def memory(self, rows: int, columns: int, *, float32: bool = False) -> Memory:
        """An array on the device, in the model's dtype or in float32; its values are not defined."""
        ...

    def place(self, array: npt.NDArray[Any]) -> Memory:
        """A host array on the device; itself where the device is the host."""
        ...

    def buffer(self, memory: Memory) -> Buffer:
        """What the kernels take for contiguous memory; whoever calls keeps it alive."""
        ...

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> Linear:
        """A dense layer of the tensors `NAME.weight` [N_i, K] stacked along N, and likewise `NAME.bias`."""
        ...

    def kv_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """Zeroed blocks."""
        ...

    def norm(self, x: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """Out = rms_norm(x) * weight; x [rows, hidden_size], weight float32."""
        ...

    def add_norm(self, x: Buffer, residual: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """Residual += x, rounded to the model's dtype, and out = rms_norm(residual) * weight."""
        ...

    def rope_and_cache(
        self, qkv: Buffer, cache: Buffer, cos_sin: Buffer, q_norm: Buffer, k_norm: Buffer, inputs: StepInputs
    ) -> None:
        """Head norms (where given), rotation of q in place and of k, and k and v into their slots."""
        ...

    def attention(self, qkv: Buffer, out: Buffer, cache: Buffer, window: int, inputs: StepInputs) -> None:
        """Out [num_tokens, num_heads * head_dim] = causal attention of q over the cached blocks."""
        ...

    def gated(self, linear: Any, source: Buffer, scratch: Buffer, activated: Buffer, rows: int) -> None:
        """Activated = activation(gate) * up of linear's product, whose halves gate and up are rounded first.

        Source [rows, K], scratch [rows, 2 * intermediate_size] (of no defined value afterwards), activated
        [rows, intermediate_size].
        """
        ...

    def scale(self, x: Memory, factor: float) -> None:
        """X *= factor, in place."""
        ...

    def softcap(self, x: Memory, cap: float) -> None:
        """X = cap * tanh(x / cap), in place."""
        ...

    def gather(self, x: Memory, indices: Memory, out: Memory) -> None:
        """out[i] = x[indices[i]], int32 indices."""
        ...
