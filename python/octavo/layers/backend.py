"""Interface of a device to the layers.

`Memory` is a device's array: numpy's on a CPU, which needs no torch and so starts a second sooner, and a tensor
elsewhere. A `Buffer` is what the device's kernels take: an address on a CPU. Layers never look inside either. Shapes
below are of the rows in use; buffers hold the most rows a step may have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.layers.kv_cache import KvCacheLayout, KvCacheSpec

if TYPE_CHECKING:
    from octavo.layers.parameter import Weights

__all__ = [
    "AttentionKernels",
    "AttentionSpec",
    "Backend",
    "Buffer",
    "IntArray",
    "KvCache",
    "Memory",
    "Product",
    "StepInputs",
]

Memory: TypeAlias = Any
Buffer: TypeAlias = Any
IntArray: TypeAlias = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of a layer, for the kernels.

    Attributes:
        num_heads: of queries.
        num_kv_heads: of keys, and of values.
        head_dim: channels of a head.
        rotary_dim: channels of a head that are rotated.
        scale: of the scores.
        softcap: scores become cap * tanh(score / cap); 0 for none.
        window: tokens that a query can see, itself included; 0 for all before it.
        norm_eps: of the norms of query and key heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    norm_eps: float = 0.0

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of queries, keys and values together."""
        return self.q_size + 2 * self.num_kv_heads * self.head_dim

    @property
    def cache(self) -> KvCacheSpec:
        """The layer's KV cache."""
        return KvCacheSpec(self.num_kv_heads, self.head_dim, self.window)


@dataclasses.dataclass(slots=True)
class StepInputs:
    """The plan arrays of one arena as the kernels take them, and how much of each the step fills.

    Attributes:
        token_ids, positions: int32[num_tokens].
        slot_mappings: int32[num_tokens] of each cache group.
        rows, seq_lens: int32[num_rows].
        query_start: int32[num_rows + 1].
        block_tables: int32[max_num_seqs, table_stride] of each cache group.
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


class Product(Protocol):
    """A dense layer's product on its device, bias included; one arithmetic at every number of rows."""

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
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
        layers: each layer's buffer, [num_blocks, 2, num_kv_heads, block_size, head_dim]. Layers of different cache
            groups share buffers; their blocks never coincide.
        num_bytes: of the whole cache.
    """

    layers: list[Buffer]
    num_bytes: int

    def copy_blocks(self, sources: Memory, destinations: Memory, counts: Memory | None = None) -> None:
        """Copy whole blocks, int32 ids; no destination is a source.

        Given a plan's counts, the device reads there how many of them to copy.
        """
        ...

    def close(self) -> None:
        """Call before the memory is released."""
        ...


class AttentionKernels(Protocol):
    """The kernels of one layer's attention; `group` is its cache group."""

    def rope_and_cache(
        self,
        qkv: Buffer,
        cache: Buffer,
        cos_sin: Buffer,
        q_norm: Buffer | None,
        k_norm: Buffer | None,
        inputs: StepInputs,
        group: int,
    ) -> None:
        """Apply head norms (where given), rotate q in place and k, and write k and v to their slots."""
        ...

    def attend(self, qkv: Buffer, out: Buffer, cache: Buffer, inputs: StepInputs, group: int) -> None:
        """Out [num_tokens, num_heads * head_dim] = causal attention of q over the cached blocks."""
        ...


class Backend(Protocol):
    """The memory and kernels of one device.

    Attributes:
        mlp_rows: rows the MLP takes at once; fewer than a step has where its wide activations should stay in a cache.
        loaded_bytes: of everything brought to the device so far.
    """

    mlp_rows: int
    loaded_bytes: int

    def empty(self, size: int, *, float32: bool = False) -> Memory:
        """An undefined array of `size` elements on the device, in the model's dtype or in float32."""
        ...

    def to_device(self, array: npt.NDArray[Any]) -> Memory:
        """A host array on the device; the array itself where the device is the host."""
        ...

    def buffer(self, memory: Memory) -> Buffer:
        """The buffer of contiguous memory, for kernels; the caller keeps the memory alive."""
        ...

    def round(self, value: float) -> float:
        """The nearest value that the model's dtype holds."""
        ...

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> Product:
        """A dense layer of the tensors `NAME.weight` [N_i, K] stacked along N, and likewise `NAME.bias`."""
        ...

    def attention(self, spec: AttentionSpec) -> AttentionKernels:
        """The kernels of a layer's attention."""
        ...

    def kv_cache(self, layout: KvCacheLayout, num_blocks: int, block_size: int) -> KvCache:
        """Zeroed blocks."""
        ...

    def norm(self, x: Buffer, weight: Buffer, out: Buffer, rows: int, size: int, eps: float) -> None:
        """Out = rms_norm(x) * weight; x [rows, size], weight float32."""
        ...

    def add_norm(
        self,
        x: Buffer,
        residual: Buffer,
        weight: Buffer,
        out: Buffer,
        rows: int,
        size: int,
        eps: float,
        post_weight: Buffer | None = None,
    ) -> None:
        """Residual += x, rounded to the model's dtype; out = rms_norm(residual) * weight.

        With `post_weight`, x is first replaced by rms_norm(x) * post_weight, rounded.
        """
        ...

    def gated_mlp(
        self, product: Any, source: Buffer, scratch: Buffer, activated: Buffer, rows: int, size: int, activation: str
    ) -> None:
        """Activated = activation(gate) * up of the product, whose halves gate and up are rounded first.

        Source [rows, K], scratch [rows, 2 * size] (undefined afterwards), activated [rows, size].
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
