"""The tensors a decoder needs, by name and shape, and how they are checked against what a model's files hold."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo import _core
from octavo.errors import ModelError
from octavo.layers.spec import DecoderSpec

__all__ = ["ROTARY_DIVISORS", "WeightPart", "Weights", "check_tensors", "expected_tensors", "to_float32"]

ROTARY_DIVISORS = "rope_freqs.weight"
_LISTED = 4


class WeightPart(Protocol):
    """A tensor as it lies in a file or in memory."""

    @property
    def kind(self) -> str:
        """`F32`, `F16`, `BF16`, or a GGUF block type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In torch's order."""
        ...

    @property
    def pointer(self) -> int:
        """Address of the first byte; the part keeps the memory alive."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored tensor."""
        ...


class Weights(Protocol):
    """A model's tensors under Hugging Face's names."""

    def names(self) -> list[str]:
        """Names of all tensors."""
        ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape), from headers alone."""
        ...

    def get(self, name: str) -> WeightPart:
        """One tensor as it is stored."""
        ...


def expected_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a decoder is made of, in the order in which they are loaded."""
    names, hidden, inner = spec.names, spec.hidden_size, spec.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (spec.vocab_size, hidden)}
    if spec.rotary.kind == "factors":
        tensors[ROTARY_DIVISORS] = (spec.rotary.dim // 2,)
    for layer in range(spec.num_layers):
        dense = (
            (names.q, spec.q_size, hidden, spec.qkv_bias),
            (names.k, spec.kv_size, hidden, spec.qkv_bias),
            (names.v, spec.kv_size, hidden, spec.qkv_bias),
            (names.o, hidden, spec.q_size, spec.output_bias),
            (names.gate, inner, hidden, spec.mlp_bias),
            (names.up, inner, hidden, spec.mlp_bias),
            (names.down, hidden, inner, spec.mlp_bias),
        )
        for template, n, k, bias in dense:
            name = template.format(layer=layer)
            tensors[f"{name}.weight"] = (n, k)
            if bias:
                tensors[f"{name}.bias"] = (n,)
        norms = [(names.attention_norm, hidden), (names.mlp_norm, hidden)]
        if spec.qk_norm:
            norms += [(names.q_norm, spec.head_dim), (names.k_norm, spec.head_dim)]
        for template, n in norms:
            tensors[f"{template.format(layer=layer)}.weight"] = (n,)
    tensors[f"{names.final_norm}.weight"] = (hidden,)
    if not spec.tied_embeddings:
        tensors[f"{names.head}.weight"] = (spec.vocab_size, hidden)
    return tensors


def check_tensors(spec: DecoderSpec, weights: Weights) -> None:
    """Compare what a model's files hold with what its description asks for, before anything is loaded.

    Raises:
        ModelError: naming the tensors that are missing, unknown or of another shape.
    """
    expected = expected_tensors(spec)
    shapes = {name: tuple(weights.describe(name)[1]) for name in weights.names()}
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ModelError(f"the model's files lack {_list(missing)}, which {spec.architecture} needs")
    misshapen = [
        f"{name} ({list(shapes[name])}, not {list(shape)})" for name, shape in expected.items() if shapes[name] != shape
    ]
    if misshapen:
        raise ModelError(f"the model's files do not fit its description: {_list(misshapen)}")
    unknown = [name for name in shapes if name not in expected and not _is_redundant(spec, name)]
    if unknown:
        raise ModelError(
            f"the model's files hold {_list(unknown)}, which {spec.architecture} as described does not use; "
            "its answers would be wrong"
        )


def _is_redundant(spec: DecoderSpec, name: str) -> bool:
    """Whether a tensor repeats what the description says: rotary tables, and the head of a tied model."""
    return name.endswith(".rotary_emb.inv_freq") or (spec.tied_embeddings and name == f"{spec.names.head}.weight")


def _list(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _LISTED} more tensors" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more


def to_float32(part: WeightPart) -> npt.NDArray[np.float32]:
    """A copy of a stored tensor, dequantized."""
    out = np.empty(part.shape, dtype=np.float32)
    if part.kind == "F32":
        ctypes.memmove(out.ctypes.data, part.pointer, part.num_bytes)
    else:
        _core.dequantize(part.pointer, part.num_bytes, part.kind, out.ctypes.data, out.size, "float32")
    return out
