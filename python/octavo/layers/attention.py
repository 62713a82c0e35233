"""Self-attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.layers.backend import AttentionKernels, AttentionSpec, Backend, Buffer, StepInputs
    from octavo.layers.linear import Linear
    from octavo.layers.norm import Norm
    from octavo.layers.parameter import Parameter, Weights
    from octavo.layers.rope import Rope
    from octavo.layers.workspace import Workspace

__all__ = ["Attention"]


class Attention:
    """Grouped-query attention with rotary positions.

    Args:
        spec: shapes and scores.
        qkv: queries, keys and values stacked.
        o: the output projection.
        rope: the rotary table, which layers share.
        q_norm: over each query head, before the rotation; None for none.
        k_norm: over each key head, likewise.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        qkv: Linear,
        o: Linear,
        rope: Rope,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> None:
        self.spec = spec
        self.qkv = qkv
        self.o = o
        self.rope = rope
        self.q_norm = q_norm
        self.k_norm = k_norm
        self._kernels: AttentionKernels

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of projections and head norms; the rotary table belongs to the model."""
        for part in (self.qkv, self.q_norm, self.k_norm, self.o):
            if part is not None:
                yield from part.parameters()

    def load(self, weights: Weights, backend: Backend) -> None:
        """Bring the weights to the device."""
        for part in (self.qkv, self.q_norm, self.k_norm, self.o):
            if part is not None:
                part.load(weights, backend)
        self._kernels = backend.attention(self.spec)

    def bind(self, workspace: Workspace, rows: int, group: int) -> None:
        """Take the scratch of `rows` rows; `group` is the layer's cache group."""
        self._group = group
        self._qkv = workspace.buffer("qkv", rows, self.spec.qkv_size)

    def attend(self, x: Buffer, out: Buffer, cache: Buffer, inputs: StepInputs) -> None:
        """Write keys and values of the step's tokens to the cache, then attend over it.

        Args:
            x: [num_tokens, hidden_size].
            out: [num_tokens, num_heads * head_dim].
            cache: the layer's part of the KV cache.
            inputs: the step.
        """
        qkv, kernels, group = self._qkv, self._kernels, self._group
        self.qkv.product.forward(x, qkv, inputs.num_tokens)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        kernels.rope_and_cache(qkv, cache, self.rope.table, q_norm, k_norm, inputs, group)
        kernels.attend(qkv, out, cache, inputs, group)
