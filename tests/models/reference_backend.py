"""A backend in plain torch: slow and short, to hold the kernels against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import reference_kernels as reference
import torch
from octavo.layers.backend import AttentionSpec, IntArray, StepInputs
from octavo.layers.kv_cache import KvCacheLayout
from octavo.layers.parameter import Weights, to_float32


class ReferenceProduct:
    """As `Linear`; the weight is rounded to the model's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: torch.Tensor, out: torch.Tensor, rows: int, *, out_float32: bool = False) -> None:
        product = x[:rows].float() @ self.weight.float().T
        out[:rows] = product if self.bias is None else product + self.bias

    def embed(self, token_ids: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        out[:rows] = self.weight[token_ids[:rows].long()]


class ReferenceKvCache:
    """The KV cache as tensors in the order of their shape."""

    def __init__(self, layout: KvCacheLayout, dtype: torch.dtype, num_blocks: int, block_size: int) -> None:
        self.memory = torch.zeros(layout.shape(num_blocks, block_size), dtype=dtype)
        self.layers = [self.memory[place] for _, place in layout.places]
        self.num_bytes = self.memory.nbytes

    def copy_blocks(self, sources: IntArray, destinations: IntArray, counts: None = None) -> None:
        self.memory[:, torch.from_numpy(destinations).long()] = self.memory[:, torch.from_numpy(sources).long()]

    def close(self) -> None:
        pass


class ReferenceAttention:
    """One layer's attention."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        inputs: StepInputs,
        group: int,
    ) -> None:
        count = inputs.num_tokens
        reference.rope_and_cache(
            qkv[:count],
            cache,
            inputs.positions[:count],
            inputs.slot_mappings[group][:count],
            cos_sin,
            self.spec.num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.spec.norm_eps,
        )

    def attend(self, qkv: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, inputs: StepInputs, group: int) -> None:
        spec, count, rows = self.spec, inputs.num_tokens, inputs.num_rows
        out[:count] = reference.attention(
            qkv[:count, : spec.q_size].reshape(count, spec.num_heads, spec.head_dim),
            cache,
            inputs.block_tables[group],
            inputs.rows[:rows],
            inputs.query_start[: rows + 1],
            inputs.seq_lens[:rows],
            spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        ).flatten(1)


class ReferenceBackend:
    """Plain torch on the CPU; a buffer is a tensor.

    Args:
        dtype: of weights, activations and KV cache.
    """

    mlp_rows = 1 << 30

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.loaded_bytes = 0

    def empty(self, size: int, *, float32: bool = False) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float32 if float32 else self.dtype)

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array)

    def buffer(self, memory: torch.Tensor | npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory

    def round(self, value: float) -> float:
        return float(torch.tensor(value, dtype=self.dtype))

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> ReferenceProduct:
        def stacked(suffix: str) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([to_float32(weights.get(name + suffix)) for name in names]))

        return ReferenceProduct(stacked(".weight").to(self.dtype), stacked(".bias") if bias else None)

    def attention(self, spec: AttentionSpec) -> ReferenceAttention:
        return ReferenceAttention(spec)

    def kv_cache(self, layout: KvCacheLayout, num_blocks: int, block_size: int) -> ReferenceKvCache:
        return ReferenceKvCache(layout, self.dtype, num_blocks, block_size)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int, size: int, eps: float) -> None:
        out[:rows] = reference.rms_norm(x[:rows], weight, eps)[0]

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        rows: int,
        size: int,
        eps: float,
        post_weight: torch.Tensor | None = None,
    ) -> None:
        added = x[:rows] if post_weight is None else reference.rms_norm(x[:rows], post_weight, eps)[0]
        normed, total = reference.rms_norm(added, weight, eps, residual[:rows])
        assert total is not None
        out[:rows] = normed
        residual[:rows] = total

    def gated_mlp(
        self,
        product: ReferenceProduct,
        source: torch.Tensor,
        scratch: torch.Tensor,
        activated: torch.Tensor,
        rows: int,
        size: int,
        activation: str,
    ) -> None:
        product.forward(source, scratch, rows)
        activated[:rows] = reference.act_and_mul(scratch[:rows], activation)

    def scale(self, x: torch.Tensor, factor: float) -> None:
        x.mul_(factor)

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        x.div_(cap).tanh_().mul_(cap)

    def gather(self, x: torch.Tensor, indices: IntArray, out: torch.Tensor) -> None:
        out.copy_(x[torch.from_numpy(indices).long()])
