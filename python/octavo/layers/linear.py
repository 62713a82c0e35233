"""Dense layers: the one place where weight formats, shards and adapters meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from octavo.layers.parameter import Parameter

if TYPE_CHECKING:
    from octavo.layers.backend import Backend, Buffer, Product
    from octavo.layers.parameter import Weights

__all__ = ["Linear", "Projection"]


@dataclasses.dataclass(frozen=True, slots=True)
class Projection:
    """One projection of a merged dense layer.

    Attributes:
        name: of the module in Hugging Face's files, without `.weight`.
        gguf_name: in GGUF files, likewise.
        size: outputs.
        gguf_heads: see `Parameter.gguf_heads`.
    """

    name: str
    gguf_name: str
    size: int
    gguf_heads: int = 0


class Linear:
    """y = x @ W.T + b, of one projection or of several stacked along the output (q, k, v; gate, up).

    Args:
        projections: stacked in this order.
        in_size: inputs.
        bias: every projection has one.
        shard_axis: 0 where ranks divide the outputs, 1 where they divide the inputs.
    """

    def __init__(
        self, projections: Sequence[Projection], in_size: int, *, bias: bool = False, shard_axis: int = 0
    ) -> None:
        self.projections = tuple(projections)
        self.in_size = in_size
        self.out_size = sum(projection.size for projection in projections)
        self.bias = bias
        self.shard_axis = shard_axis
        self.product: Product

    def parameters(self) -> Iterator[Parameter]:
        """Weights, then biases."""
        for each in self.projections:
            yield Parameter(
                f"{each.name}.weight",
                f"{each.gguf_name}.weight",
                (each.size, self.in_size),
                shard_axis=self.shard_axis,
                quantizable=True,
                gguf_heads=each.gguf_heads,
            )
        if self.bias:
            for each in self.projections:
                shard_axis = 0 if self.shard_axis == 0 else None
                yield Parameter(
                    f"{each.name}.bias",
                    f"{each.gguf_name}.bias",
                    (each.size,),
                    shard_axis=shard_axis,
                    gguf_heads=each.gguf_heads,
                )

    def load(self, weights: Weights, backend: Backend) -> None:
        """Bring the tensors to the device."""
        self.product = backend.linear(weights, [projection.name for projection in self.projections], self.bias)

    def forward(self, x: Buffer, out: Buffer, rows: int) -> None:
        """out[:rows] = x[:rows] @ W.T + b; x [rows, in_size], out [rows, out_size]."""
        self.product.forward(x, out, rows)
