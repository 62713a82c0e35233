"""The decoder's operations in plain torch: slow, short and plain to see; what the kernels are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.kernels import reference
from octavo.layers.operations import IntArray, StepInputs
from octavo.layers.spec import DecoderSpec
from octavo.layers.weights import Weights, to_float32

__all__ = ["ReferenceKvCache", "ReferenceLinear", "ReferenceOperations"]


class ReferenceLinear:
    """As `Linear`; the weight is rounded to the model's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """As `Linear.num_bytes`."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: torch.Tensor, out: torch.Tensor, rows: int, *, out_float32: bool = False) -> None:
        """As `Linear.forward`."""
        product = x[:rows].float() @ self.weight.float().T
        out[:rows] = product if self.bias is None else product + self.bias

    def embed(self, token_ids: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """As `Linear.embed`."""
        out[:rows] = self.weight[token_ids[:rows].long()]


class ReferenceKvCache:
    """As `KvCache`; a layer is a tensor in the order of its shape."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype) for _ in range(spec.num_layers)]
        self.num_bytes = sum(layer.nbytes for layer in self.layers)

    def copy_blocks(self, sources: IntArray, destinations: IntArray, counts: None = None) -> None:
        """As `KvCache.copy_blocks`, of all that are given."""
        source, destination = torch.from_numpy(sources).long(), torch.from_numpy(destinations).long()
        for layer in self.layers:
            layer[destination] = layer[source]

    def close(self) -> None:
        """Nothing to do."""


class ReferenceOperations:
    """As `Operations`; a buffer is a tensor.

    Args:
        spec: the family.
        dtype: of weights, activations and KV cache.
    """

    mlp_rows = 1 << 30

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        self.spec = spec
        self.dtype = dtype

    def memory(self, rows: int, columns: int, *, float32: bool = False) -> torch.Tensor:
        """As `Operations.memory`."""
        return torch.zeros((rows, columns), dtype=torch.float32 if float32 else self.dtype)

    def place(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array as a tensor."""
        return torch.from_numpy(array)

    def buffer(self, memory: torch.Tensor | npt.NDArray[Any]) -> torch.Tensor:
        """The tensor itself."""
        return torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> ReferenceLinear:
        """As `Operations.linear`."""

        def stacked(suffix: str) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([to_float32(weights.get(name + suffix)) for name in names]))

        return ReferenceLinear(stacked(".weight").to(self.dtype), stacked(".bias") if bias else None)

    def kv_cache(self, num_blocks: int, block_size: int) -> ReferenceKvCache:
        """As `Operations.kv_cache`."""
        return ReferenceKvCache(self.spec, self.dtype, num_blocks, block_size)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """As `Operations.norm`."""
        out[:rows] = reference.rms_norm(x[:rows], weight, self.spec.norm_eps)[0]

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int
    ) -> None:
        """As `Operations.add_norm`."""
        normed, total = reference.rms_norm(x[:rows], weight, self.spec.norm_eps, residual[:rows])
        assert total is not None
        out[:rows] = normed
        residual[:rows] = total

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        inputs: StepInputs,
    ) -> None:
        """As `Operations.rope_and_cache`."""
        count = inputs.num_tokens
        reference.rope_and_cache(
            qkv[:count],
            cache,
            inputs.positions[:count],
            inputs.slot_mappings[0][:count],
            cos_sin,
            self.spec.num_heads,
            interleaved=self.spec.rotary.interleaved,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.spec.norm_eps,
        )

    def attention(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, window: int, inputs: StepInputs
    ) -> None:
        """As `Operations.attention`."""
        spec, count, rows = self.spec, inputs.num_tokens, inputs.num_rows
        out[:count] = reference.attention(
            qkv[:count, : spec.q_size].reshape(count, spec.num_heads, spec.head_dim),
            cache,
            inputs.block_tables[0],
            inputs.rows[:rows],
            inputs.query_start[: rows + 1],
            inputs.seq_lens[:rows],
            spec.attention_scale,
            window=window,
            softcap=spec.attention_softcap,
        ).flatten(1)

    def gated(
        self,
        linear: ReferenceLinear,
        source: torch.Tensor,
        scratch: torch.Tensor,
        activated: torch.Tensor,
        rows: int,
    ) -> None:
        """As `Operations.gated`."""
        linear.forward(source, scratch, rows)
        activated[:rows] = reference.act_and_mul(scratch[:rows], self.spec.activation)

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """As `Operations.scale`."""
        x.mul_(factor)

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        """As `Operations.softcap`."""
        x.div_(cap).tanh_().mul_(cap)

    def gather(self, x: torch.Tensor, indices: IntArray, out: torch.Tensor) -> None:
        """As `Operations.gather`."""
        out.copy_(x[torch.from_numpy(indices).long()])
