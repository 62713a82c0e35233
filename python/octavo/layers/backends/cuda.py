"""The CUDA backend: Triton kernels and cuBLAS on torch tensors, which are memory and buffer in one.

Every call only launches, on the current stream: what it is given decides what runs, never a value on the device. So a
step may be captured in a graph. `rows` are then those of the graph; what varies from step to step lies in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt
import torch

from octavo.errors import UnsupportedModel
from octavo.kernels.attention import HEAD_DIMS, AttentionShape
from octavo.kernels.attention_decode import decode_attention
from octavo.kernels.attention_prefill import prefill_attention
from octavo.kernels.blocks import copy_blocks
from octavo.kernels.embedding import gather_rows, scale, softcap
from octavo.kernels.linear import Dense
from octavo.kernels.norm import add_rms_norm, rms_norm
from octavo.kernels.rope_and_cache import rope_and_cache
from octavo.layers.backend import AttentionSpec, StepInputs
from octavo.layers.backends.cuda_inputs import has_groups, has_prompts
from octavo.layers.backends.cuda_upload import stacked_weight
from octavo.layers.decoder import Decoder
from octavo.layers.kv_cache import KvCacheLayout
from octavo.layers.parameter import Weights

if TYPE_CHECKING:
    from octavo.layers.backends.cuda_inputs import CudaStepInputs

__all__ = [
    "KV_CACHE_DTYPES",
    "MLP_ROWS",
    "CudaBackend",
    "CudaKvCache",
    "CudaProduct",
    "attention_shape",
    "check_kernels",
]

MLP_ROWS = 4096
"""Enough that a product of a slice keeps every multiprocessor busy; more would only cost memory."""

KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
"""Values of `kv_cache_dtype` besides `auto`, the model's dtype."""


def check_kernels(decoder: Decoder) -> None:
    """Refuse shapes that the kernels do not have.

    Raises:
        UnsupportedModel: names the shape and what would do.
    """
    for block in decoder.blocks:
        head_dim = block.attention.spec.head_dim
        if head_dim not in HEAD_DIMS:
            raise UnsupportedModel(
                f"head_dim: heads of {head_dim} channels are not supported on a GPU, which takes "
                f"{', '.join(map(str, HEAD_DIMS))}; run the model with `device: cpu`"
            )


def attention_shape(spec: AttentionSpec, block_size: int, *, kv_fp8: bool) -> AttentionShape:
    """A layer's attention as the kernels know it; the window is an argument of its own."""
    return AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        scale=spec.scale,
        softcap=spec.softcap,
        kv_fp8=kv_fp8,
    )


class CudaProduct:
    """A dense layer of a stacked weight; see `Product`.

    Args:
        dense: computes it.
    """

    def __init__(self, dense: Dense) -> None:
        self.dense = dense

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.dense.num_bytes

    def forward(self, x: torch.Tensor, out: torch.Tensor, rows: int, *, out_float32: bool = False) -> None:
        """out[rows] = x[rows] @ weight.T + bias; the dtype of `out` says whether sums are rounded."""
        self.dense.forward(x, out, rows)

    def embed(self, token_ids: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """out[rows] = weight[token_ids]."""
        gather_rows(self.dense.weight, token_ids, out, rows)


class CudaKvCache:
    """The KV cache in one tensor, so that one launch copies blocks in all layers.

    Attributes:
        memory: [layers_per_block, num_blocks, 2, num_kv_heads, block_size, head_dim].
        layers: each layer's view of it.
        num_bytes: of the whole cache.
    """

    def __init__(
        self, layout: KvCacheLayout, dtype: torch.dtype, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        shape = layout.shape(num_blocks, block_size)
        self.memory = torch.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=device)
        self.memory = self.memory.view(dtype)
        self.layers = [self.memory[place] for _, place in layout.places]
        self.num_bytes = self.memory.nbytes

    def copy_blocks(
        self, sources: torch.Tensor, destinations: torch.Tensor, counts: torch.Tensor | None = None
    ) -> None:
        """Copy whole blocks; ids and counts may lie in pinned memory of the host.

        Raises:
            ValueError: no counts; a launch must not wait for the number of copies.
        """
        if counts is None:
            raise ValueError("the number of copies is read from a plan's counts")
        copy_blocks(self.memory, sources, destinations, counts)

    def close(self) -> None:
        """Nothing to do."""


class CudaAttention:
    """The kernels of one layer's attention; see `AttentionKernels`."""

    def __init__(self, spec: AttentionSpec, shape: AttentionShape) -> None:
        self._spec = spec
        self._shape = shape

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
        """Head norms, rotation, and keys and values into their slots."""
        rope_and_cache(
            qkv,
            cache,
            inputs.positions,
            inputs.slot_mappings[group],
            cos_sin,
            self._spec.num_heads,
            inputs.num_tokens,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self._spec.norm_eps,
        )

    def attend(self, qkv: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, inputs: StepInputs, group: int) -> None:
        """Causal attention over the cached blocks, after `plan_attention` for the window."""
        step = cast("CudaStepInputs", inputs)
        work, tables, tokens = step.works[self._spec.window], step.block_tables[group], step.num_tokens
        decode_attention(qkv, out, cache, tables, work, self._shape, tokens=tokens, grouped=has_groups(step.kind))
        if has_prompts(step.kind):
            prefill_attention(qkv, out, cache, tables, work, self._shape, tokens=tokens)


class CudaBackend:
    """A GPU as a backend; memory and buffer are the same tensor.

    Args:
        dtype: of weights and activations: bfloat16, float16, or float32 (for tests: it is slow).
        block_size: tokens a block of the KV cache, a multiple of 16.
        device: where everything lies; on `meta`, launches are compiled and not run.
        kv_cache_dtype: `auto` for the model's dtype, or a name of `KV_CACHE_DTYPES`.
    """

    mlp_rows = MLP_ROWS

    def __init__(self, dtype: torch.dtype, block_size: int, device: torch.device, kv_cache_dtype: str = "auto") -> None:
        self.dtype = dtype
        self.device = device
        self.loaded_bytes = 0
        self.kv_cache_dtype = self.dtype if kv_cache_dtype == "auto" else KV_CACHE_DTYPES[kv_cache_dtype]
        self._block_size = block_size

    def empty(self, size: int, *, float32: bool = False) -> torch.Tensor:
        """An undefined tensor."""
        return torch.empty(size, dtype=torch.float32 if float32 else self.dtype, device=self.device)

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A copy of the array on the device."""
        self.loaded_bytes += array.nbytes
        return torch.from_numpy(array).to(self.device)

    def buffer(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        if not memory.is_contiguous():
            raise ValueError("a buffer is contiguous")
        return memory

    def round(self, value: float) -> float:
        """The nearest value that the model's dtype holds."""
        return float(torch.tensor(value, dtype=self.dtype))

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> CudaProduct:
        """A dense layer of stacked tensors."""

        def stacked(suffix: str) -> torch.Tensor:
            return stacked_weight(weights, [name + suffix for name in names], self.dtype, self.device)

        product = CudaProduct(Dense(stacked(".weight"), stacked(".bias") if bias else None))
        self.loaded_bytes += product.num_bytes
        return product

    def attention(self, spec: AttentionSpec) -> CudaAttention:
        """The kernels of a layer's attention."""
        kv_fp8 = self.kv_cache_dtype != self.dtype
        return CudaAttention(spec, attention_shape(spec, self._block_size, kv_fp8=kv_fp8))

    def kv_cache(self, layout: KvCacheLayout, num_blocks: int, block_size: int) -> CudaKvCache:
        """Zeroed blocks."""
        return CudaKvCache(layout, self.kv_cache_dtype, num_blocks, block_size, self.device)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int, size: int, eps: float) -> None:
        """Out = rms_norm(x) * weight."""
        rms_norm(x, weight, out, eps, rows)

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
        """Residual += x, out = rms_norm(residual) * weight; x is normed first where `post_weight` is given."""
        add_rms_norm(x, residual, weight, out, eps, rows, post_weight)

    def gated_mlp(
        self,
        product: CudaProduct,
        source: torch.Tensor,
        scratch: torch.Tensor,
        activated: torch.Tensor,
        rows: int,
        size: int,
        activation: str,
    ) -> None:
        """Activated = activation(gate) * up."""
        product.dense.gated(source, scratch, activated, rows, activation)

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """X *= factor, in place."""
        scale(x, factor)

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        """X = cap * tanh(x / cap), in place."""
        softcap(x, cap)

    def gather(self, x: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = x[indices[i]]."""
        gather_rows(x, indices, out, out.shape[0])
