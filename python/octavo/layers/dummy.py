"""Random weights from a model's description alone, for speed and memory without a checkpoint."""

from __future__ import annotations

import dataclasses
import zlib

import torch

from octavo.errors import ModelError
from octavo.layers.spec import DecoderSpec
from octavo.layers.weights import expected_tensors

__all__ = ["DummyWeights"]

_DEVIATION = 0.02


@dataclasses.dataclass(frozen=True)
class _Part:
    kind: str
    shape: tuple[int, ...]
    pointer: int
    num_bytes: int
    owner: torch.Tensor = dataclasses.field(repr=False)


class DummyWeights:
    """As `Weights`; a tensor's values depend on the seed and its name only.

    Matrices are normal with deviation 0.02, norms and rotary divisors are ones, biases are zeros.
    """

    def __init__(self, spec: DecoderSpec, seed: int) -> None:
        self._shapes = expected_tensors(spec)
        self._seed = seed

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._shapes)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape)."""
        if name not in self._shapes:
            raise ModelError(f"there is no tensor {name!r}")
        return "BF16" if len(self._shapes[name]) == 2 else "F32", self._shapes[name]

    def get(self, name: str) -> _Part:
        """One tensor, drawn anew."""
        kind, shape = self.describe(name)
        tensor = self._draw(name, shape)
        return _Part(kind, shape, tensor.data_ptr(), tensor.nbytes, tensor)

    def to_torch(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, drawn anew."""
        tensor = self._draw(name, self.describe(name)[1])
        return tensor if dtype is None else tensor.to(dtype)

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 2:
            # Torch's generator takes 32 bits of a seed into account.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
            return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, _DEVIATION, generator=generator)
        fill = torch.zeros if name.endswith(".bias") else torch.ones
        return fill(shape, dtype=torch.float32)
