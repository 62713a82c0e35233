"""The decoder's operations on a GPU: Triton kernels and cuBLAS on torch's tensors, which are memory and buffer in one.

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
from octavo.layers.cuda_inputs import has_groups, has_prompts
from octavo.layers.operations import StepInputs
from octavo.layers.spec import DecoderSpec
from octavo.layers.upload import stacked_weight
from octavo.layers.weights import Weights

if TYPE_CHECKING:
    from octavo.layers.cuda_inputs import CudaStepInputs

__all__ = ["KV_CACHE_DTYPES", "MLP_ROWS", "CudaKvCache", "CudaLinear", "CudaOperations", "check_kernels"]

MLP_ROWS = 4096
"""Enough that a product of a slice keeps every multiprocessor busy; more would only cost memory."""

KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
"""What `kv_cache_dtype` may name besides `auto`, which is the model's dtype."""


def check_kernels(spec: DecoderSpec) -> None:
    """Refuse shapes that the kernels do not have.

    Raises:
        UnsupportedModel: naming the shape and what would do.
    """
    if spec.head_dim not in HEAD_DIMS:
        raise UnsupportedModel(
            f"head_dim: heads of {spec.head_dim} channels are not supported on a GPU, which takes "
            f"{', '.join(map(str, HEAD_DIMS))}; run the model with `device: cpu`"
        )


class CudaLinear:
    """As `Linear`, of a stacked weight.

    Args:
        dense: computes it.
    """

    def __init__(self, dense: Dense) -> None:
        self.dense = dense

    @property
    def num_bytes(self) -> int:
        """As `Linear.num_bytes`."""
        return self.dense.num_bytes

    def forward(self, x: torch.Tensor, out: torch.Tensor, rows: int, *, out_float32: bool = False) -> None:
        """As `Linear.forward`; the dtype of `out` says whether sums are rounded."""
        self.dense.forward(x, out, rows)

    def embed(self, token_ids: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """As `Linear.embed`."""
        gather_rows(self.dense.weight, token_ids, out, rows)


class CudaKvCache:
    """The KV cache of all layers in one tensor, so that one launch copies blocks in all of them.

    Attributes:
        memory: [layers, num_blocks, 2, num_kv_heads, block_size, head_dim].
        layers: a view of it a layer.
        num_bytes: of all layers.
    """

    def __init__(
        self, spec: DecoderSpec, dtype: torch.dtype, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self.memory = torch.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=device)
        self.memory = self.memory.view(dtype)
        self.layers = list(self.memory)
        self.num_bytes = self.memory.nbytes

    def copy_blocks(
        self, sources: torch.Tensor, destinations: torch.Tensor, counts: torch.Tensor | None = None
    ) -> None:
        """As `KvCache.copy_blocks`; ids and counts may lie in pinned memory of the host.

        Raises:
            ValueError: without counts; a launch must not wait to hear how many there are.
        """
        if counts is None:
            raise ValueError("the number of copies is read from a plan's counts")
        copy_blocks(self.memory, sources, destinations, counts)

    def close(self) -> None:
        """Nothing to do."""


class CudaOperations:
    """As `Operations`; memory and buffer are the same tensor.

    Args:
        spec: the family.
        dtype: of weights and activations: bfloat16, float16, or float32 (for tests: it is slow).
        block_size: tokens a block of the KV cache, a multiple of 16.
        device: where everything lies; on `meta`, launches can be compiled and not run.
        kv_cache_dtype: `auto` for the model's dtype, or a name of `KV_CACHE_DTYPES`.

    Raises:
        UnsupportedModel: the kernels do not have a shape of the model.
    """

    mlp_rows = MLP_ROWS

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        block_size: int,
        device: torch.device,
        kv_cache_dtype: str = "auto",
    ) -> None:
        check_kernels(spec)
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.kv_cache_dtype = self.dtype if kv_cache_dtype == "auto" else KV_CACHE_DTYPES[kv_cache_dtype]
        self.attention_shape = AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
            kv_fp8=self.kv_cache_dtype != self.dtype,
        )

    def memory(self, rows: int, columns: int, *, float32: bool = False) -> torch.Tensor:
        """As `Operations.memory`."""
        return torch.empty((rows, columns), dtype=torch.float32 if float32 else self.dtype, device=self.device)

    def place(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A copy of the array on the device."""
        return torch.from_numpy(array).to(self.device)

    def buffer(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        if not memory.is_contiguous():
            raise ValueError("a buffer is contiguous")
        return memory

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> CudaLinear:
        """As `Operations.linear`."""

        def stacked(suffix: str) -> torch.Tensor:
            return stacked_weight(weights, [name + suffix for name in names], self.dtype, self.device)

        return CudaLinear(Dense(stacked(".weight"), stacked(".bias") if bias else None))

    def kv_cache(self, num_blocks: int, block_size: int) -> CudaKvCache:
        """As `Operations.kv_cache`."""
        return CudaKvCache(self.spec, self.kv_cache_dtype, num_blocks, block_size, self.device)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """As `Operations.norm`."""
        rms_norm(x, weight, out, self.spec.norm_eps, rows)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int
    ) -> None:
        """As `Operations.add_norm`."""
        add_rms_norm(x, residual, weight, out, self.spec.norm_eps, rows)

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
        rope_and_cache(
            qkv,
            cache,
            inputs.positions,
            inputs.slot_mappings[0],
            cos_sin,
            self.spec.num_heads,
            inputs.num_tokens,
            interleaved=self.spec.rotary.interleaved,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.spec.norm_eps,
        )

    def attention(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, window: int, inputs: StepInputs
    ) -> None:
        """As `Operations.attention`, after `plan_attention` for the window; inputs are `CudaStepInputs`."""
        step = cast("CudaStepInputs", inputs)
        work, shape, tokens = step.works[window], self.attention_shape, step.num_tokens
        grouped = has_groups(step.kind)
        decode_attention(qkv, out, cache, step.block_tables[0], work, shape, tokens=tokens, grouped=grouped)
        if has_prompts(step.kind):
            prefill_attention(qkv, out, cache, step.block_tables[0], work, shape, tokens=tokens)

    def gated(
        self, linear: CudaLinear, source: torch.Tensor, scratch: torch.Tensor, activated: torch.Tensor, rows: int
    ) -> None:
        """As `Operations.gated`."""
        linear.dense.gated(source, scratch, activated, rows, self.spec.activation)

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """As `Operations.scale`."""
        scale(x, factor)

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        """As `Operations.softcap`."""
        softcap(x, cap)

    def gather(self, x: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        """As `Operations.gather`."""
        gather_rows(x, indices, out, out.shape[0])
