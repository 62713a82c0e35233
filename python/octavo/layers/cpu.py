"""The decoder's operations on a CPU: the extension's kernels, called by address."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from octavo import _core
from octavo.layers.operations import StepInputs, dtype_name
from octavo.layers.spec import DecoderSpec
from octavo.layers.weights import Weights

__all__ = ["CpuKvCache", "CpuOperations", "mapped_zeros"]


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros whose pages become resident only when they are written."""
    count = 1
    for size in shape:
        count *= size
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1))
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))


class CpuKvCache:
    """Blocks of all layers; the order within a tile is the kernels' own.

    Attributes:
        layers: a layer's address.
        num_bytes: of all layers.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, num_blocks: int, block_size: int) -> None:
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self._memory = mapped_zeros(shape, dtype)
        self.layers = [layer.data_ptr() for layer in self._memory]
        self.num_bytes = self._memory.nbytes

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """As `KvCache.copy_blocks`."""
        self._memory[:, destinations] = self._memory[:, sources]


class CpuOperations:
    """As `Operations`; a buffer is an address.

    Args:
        spec: the family.
        dtype: bfloat16 or float32.
        block_size: tokens a block of the KV cache.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, block_size: int) -> None:
        self.spec = spec
        self.dtype = dtype
        self._dtype_name = dtype_name(dtype)
        self._hidden_size = spec.hidden_size
        self._eps = spec.norm_eps
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._block_size = block_size
        self._qkv_size = spec.qkv_size
        self._intermediate_size = spec.intermediate_size

    def tensor(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `Operations.tensor`, with pages resident once they are written."""
        return mapped_zeros((rows, columns), dtype or self.dtype)

    def buffer(self, tensor: torch.Tensor) -> int:
        """The tensor's address."""
        if not tensor.is_contiguous():
            raise ValueError("a buffer is contiguous")
        return tensor.data_ptr()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> _core.PackedLinear:
        """As `Operations.linear`; the parts' memory is let go once they are packed."""
        parts = [weights.get(f"{name}.weight") for name in names]
        packed = [(part.pointer, part.num_bytes, part.kind, part.shape[0]) for part in parts]
        pointer, stacked = 0, None
        if bias:
            stacked = torch.cat([weights.to_torch(f"{name}.bias", torch.float32) for name in names])
            pointer = stacked.data_ptr()
        return _core.PackedLinear(packed, parts[0].shape[1], self._dtype_name, bias=pointer)

    def kv_cache(self, num_blocks: int, block_size: int) -> CpuKvCache:
        """As `Operations.kv_cache`."""
        return CpuKvCache(self.spec, self.dtype, num_blocks, block_size)

    def norm(self, x: int, weight: int, out: int, rows: int) -> None:
        """As `Operations.norm`."""
        _core.cpu_rms_norm(x, weight, out, rows, self._hidden_size, self._eps, self._dtype_name)

    def add_norm(self, x: int, residual: int, weight: int, out: int, rows: int) -> None:
        """As `Operations.add_norm`."""
        _core.cpu_rms_norm(x, weight, out, rows, self._hidden_size, self._eps, self._dtype_name, residual=residual)

    def rope_and_cache(
        self, qkv: int, cache: int, cos_sin: int, q_norm: int | None, k_norm: int | None, inputs: StepInputs
    ) -> None:
        """As `Operations.rope_and_cache`."""
        rotary = self.spec.rotary
        _core.cpu_rope_and_cache(
            qkv,
            cache,
            inputs.positions,
            inputs.slot_mapping,
            cos_sin,
            inputs.num_tokens,
            *self._heads,
            rotary.dim,
            self._block_size,
            self._dtype_name,
            interleaved=rotary.interleaved,
            q_norm=q_norm or 0,
            k_norm=k_norm or 0,
            eps=self._eps,
        )

    def attention(self, qkv: int, out: int, cache: int, window: int, inputs: StepInputs) -> None:
        """As `Operations.attention`."""
        _core.cpu_attention(
            qkv,
            self._qkv_size,
            out,
            cache,
            inputs.block_tables,
            inputs.table_stride,
            inputs.rows,
            inputs.query_start,
            inputs.seq_lens,
            inputs.num_rows,
            *self._heads,
            self._block_size,
            self.spec.attention_scale,
            self._dtype_name,
            window=window,
            softcap=self.spec.attention_softcap,
        )

    def act_and_mul(self, gate_up: int, out: int, rows: int) -> None:
        """As `Operations.act_and_mul`."""
        _core.cpu_act_and_mul(gate_up, out, rows, self._intermediate_size, self.spec.activation, self._dtype_name)

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """As `Operations.scale`."""
        x.mul_(factor)

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        """As `Operations.softcap`."""
        x.div_(cap).tanh_().mul_(cap)

    def gather(self, x: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        """As `Operations.gather`."""
        torch.index_select(x, 0, indices, out=out)
