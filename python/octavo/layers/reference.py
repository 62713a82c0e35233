"""The decoder's operations in plain torch: slow, short and plain to see; what the kernels are held against.

Everything is computed in float32 and rounded to the model's dtype where a kernel would store it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.layers.operations import StepInputs
from octavo.layers.spec import DecoderSpec
from octavo.layers.weights import Weights

__all__ = ["ReferenceKvCache", "ReferenceLinear", "ReferenceOperations"]

_APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


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

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """As `KvCache.copy_blocks`."""
        for layer in self.layers:
            layer[destinations] = layer[sources]


class ReferenceOperations:
    """As `Operations`; a buffer is a tensor.

    Args:
        spec: the family.
        dtype: of weights, activations and KV cache.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        self.spec = spec
        self.dtype = dtype

    def tensor(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `Operations.tensor`."""
        return torch.zeros((rows, columns), dtype=dtype or self.dtype)

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def linear(self, weights: Weights, names: Sequence[str], bias: bool) -> ReferenceLinear:
        """As `Operations.linear`."""
        weight = torch.cat([weights.to_torch(f"{name}.weight", self.dtype) for name in names])
        stacked = [weights.to_torch(f"{name}.bias", torch.float32) for name in names] if bias else []
        return ReferenceLinear(weight, torch.cat(stacked) if stacked else None)

    def kv_cache(self, num_blocks: int, block_size: int) -> ReferenceKvCache:
        """As `Operations.kv_cache`."""
        return ReferenceKvCache(self.spec, self.dtype, num_blocks, block_size)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """As `Operations.norm`."""
        out[:rows] = self._rms_norm(x[:rows].float(), weight)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int
    ) -> None:
        """As `Operations.add_norm`."""
        residual[:rows] = residual[:rows].float() + x[:rows].float()
        self.norm(residual, weight, out, rows)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | int,
        k_norm: torch.Tensor | int,
        inputs: StepInputs,
    ) -> None:
        """As `Operations.rope_and_cache`."""
        spec, count = self.spec, inputs.num_tokens
        heads = qkv[:count].view(count, -1, spec.head_dim)
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        angles = cos_sin[inputs.positions[:count].long()].unsqueeze(1)
        k = self._rotate(self._head_norm(k, k_norm), angles)
        q.copy_(self._rotate(self._head_norm(q, q_norm), angles))
        slots = inputs.slot_mapping[:count].long()
        block_size = cache.shape[3]
        blocks, offsets = slots // block_size, slots % block_size
        cache[blocks, 0, :, offsets] = k.to(cache.dtype)
        cache[blocks, 1, :, offsets] = v

    def attention(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, window: int, inputs: StepInputs
    ) -> None:
        """As `Operations.attention`."""
        spec = self.spec
        for row in range(inputs.num_rows):
            start, stop = inputs.query_start[row : row + 2].tolist()
            length = int(inputs.seq_lens[row])
            table = inputs.block_tables[int(inputs.rows[row])]
            blocks = table[: -(-length // cache.shape[3])].long()
            keys, values = cache[blocks].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            q = qkv[start:stop, : spec.q_size].float().view(stop - start, spec.num_kv_heads, -1, spec.head_dim)
            scores = torch.einsum("qhgd,hkd->hgqk", q, keys) * spec.attention_scale
            if spec.attention_softcap:
                scores = spec.attention_softcap * torch.tanh(scores / spec.attention_softcap)
            distance = torch.arange(length - (stop - start), length).unsqueeze(1) - torch.arange(length)
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[start:stop] = torch.einsum("hgqk,hkd->qhgd", weights, values).flatten(1)

    def act_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """As `Operations.act_and_mul`."""
        gate, up = gate_up[:rows].float().chunk(2, dim=1)
        functional = torch.nn.functional
        activation = self.spec.activation
        if activation == "silu":
            out[:rows] = functional.silu(gate) * up
        else:
            out[:rows] = functional.gelu(gate, approximate=_APPROXIMATIONS[activation]) * up

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """As `Operations.scale`."""
        x.mul_(factor)

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        """As `Operations.softcap`."""
        x.div_(cap).tanh_().mul_(cap)

    def gather(self, x: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        """As `Operations.gather`."""
        out.copy_(x[indices.long()])

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps) * weight

    def _head_norm(self, x: torch.Tensor, weight: torch.Tensor | int) -> torch.Tensor:
        return x.float() if isinstance(weight, int) else self._rms_norm(x.float(), weight)

    def _rotate(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        rotary = self.spec.rotary
        turned, kept = x[..., : rotary.dim], x[..., rotary.dim :]
        cos, sin = cos_sin.chunk(2, dim=-1)
        if rotary.interleaved:
            left, right = turned[..., 0::2], turned[..., 1::2]
        else:
            left, right = turned.chunk(2, dim=-1)
        pair = (left * cos - right * sin, right * cos + left * sin)
        joined = torch.stack(pair, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(pair, dim=-1)
        return torch.cat((joined, kept), dim=-1)
