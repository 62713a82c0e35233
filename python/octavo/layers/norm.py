"""RMS norms, alone and together with the residual's sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from octavo.layers.parameter import Parameter, to_float32

if TYPE_CHECKING:
    from octavo.layers.backend import Backend, Buffer, Memory
    from octavo.layers.parameter import Weights

__all__ = ["Norm"]


class Norm:
    """rms_norm(x) * weight over the last axis, in float32.

    Args:
        name: of the module in Hugging Face's files, without `.weight`.
        gguf_name: in GGUF files, likewise.
        size: of the last axis.
        eps: added to the mean square.
        offset: added to the stored weight; 1 for Gemma's norms.
    """

    def __init__(self, name: str, gguf_name: str, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.parameter = Parameter(f"{name}.weight", f"{gguf_name}.weight", (size,), offset=offset)
        self.size = size
        self.eps = eps
        self.weight: Buffer = None
        self._memory: Memory = None
        self._backend: Backend

    def parameters(self) -> Iterator[Parameter]:
        """The weight."""
        yield self.parameter

    def load(self, weights: Weights, backend: Backend) -> None:
        """Bring the weight to the device, as float32 [size], the offset added."""
        values = to_float32(weights.get(self.parameter.name))
        if self.parameter.offset and not weights.has_offsets:
            values += np.float32(self.parameter.offset)
        self._backend = backend
        self._memory = backend.to_device(values)
        self.weight = backend.buffer(self._memory)

    def forward(self, x: Buffer, out: Buffer, rows: int) -> None:
        """Out = rms_norm(x) * weight, [rows, size]."""
        self._backend.norm(x, self.weight, out, rows, self.size, self.eps)

    def add(self, x: Buffer, residual: Buffer, out: Buffer, rows: int, output_norm: Norm | None = None) -> None:
        """Residual += x, rounded to the model's dtype; out = rms_norm(residual) * weight. All [rows, size].

        Args:
            x: what a sublayer computed.
            residual: the stream.
            out: the next sublayer's input.
            rows: to compute.
            output_norm: applied to x before the sum; both have one eps.
        """
        post_weight = None if output_norm is None else output_norm.weight
        self._backend.add_norm(x, residual, self.weight, out, rows, self.size, self.eps, post_weight)
