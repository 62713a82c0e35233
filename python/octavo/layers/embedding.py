"""The embedding of tokens, and the head that gives logits."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from octavo.layers.linear import Linear, Projection
from octavo.layers.parameter import to_float32

if TYPE_CHECKING:
    from octavo.layers.backend import Backend, Buffer, Memory
    from octavo.layers.parameter import Parameter, WeightPart, Weights
    from octavo.layers.workspace import Workspace

__all__ = ["Embedding", "Head"]

_LOG = logging.getLogger(__name__)
_COMPARED = 1 << 24


class Embedding:
    """A row of the table for each token, times a scale.

    Args:
        vocab_size: rows.
        hidden_size: columns.
        scale: of the output, rounded to the model's dtype.
        name: of the module in Hugging Face's files.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, scale: float = 1.0, name: str = "model.embed_tokens"
    ) -> None:
        self.table = Linear([Projection(name, "token_embd", vocab_size)], hidden_size)
        self.scale = scale
        self._backend: Backend
        self._factor = scale

    def parameters(self) -> Iterator[Parameter]:
        """The table."""
        return self.table.parameters()

    def load(self, weights: Weights, backend: Backend) -> None:
        """Bring the table to the device."""
        self.table.load(weights, backend)
        self._backend = backend
        self._factor = backend.round(self.scale)

    def forward(self, token_ids: Buffer, out: Buffer, memory: Memory, rows: int) -> None:
        """Out = table[token_ids] * scale, [rows, hidden_size]; `memory` is what `out` is the buffer of."""
        self.table.product.embed(token_ids, out, rows)
        if self._factor != 1.0:
            self._backend.scale(memory[:rows], self._factor)


class Head:
    """Logits of hidden states: x @ W.T in float32, scaled, then capped.

    Args:
        embedding: its table is the head where they are tied.
        tied: the model has no head of its own.
        scale: of the logits.
        softcap: cap * tanh(logit / cap), after the scale; 0 for none.
        name: of the module in Hugging Face's files.
    """

    def __init__(
        self,
        embedding: Embedding,
        *,
        tied: bool,
        scale: float = 1.0,
        softcap: float = 0.0,
        name: str = "lm_head",
    ) -> None:
        table = embedding.table
        self.own = Linear([Projection(name, "output", table.out_size)], table.in_size)
        self.embedding = embedding
        self.tied = tied
        self.scale = scale
        self.softcap = softcap
        self._backend: Backend

    @property
    def name(self) -> str:
        """The name of its weight in Hugging Face's files."""
        return f"{self.own.projections[0].name}.weight"

    @property
    def vocab_size(self) -> int:
        """Logits of a row."""
        return self.own.out_size

    @property
    def linear(self) -> Linear:
        """The layer in use."""
        return self.embedding.table if self.tied else self.own

    def parameters(self) -> Iterator[Parameter]:
        """The head's own weight, where it has one."""
        if not self.tied:
            yield from self.own.parameters()

    def untie(self, weights: Weights) -> None:
        """Use the head in a model's files where it differs from the embedding that it should be tied to.

        A fine-tuned model can carry both: its configuration is then out of date. Call this before planning memory.
        """
        if not self.tied or self.name not in weights.names():
            return
        head, table = weights.get(self.name), weights.get(f"{self.embedding.table.projections[0].name}.weight")
        if head.shape == table.shape and not _same(head, table):
            _LOG.warning(
                "tie_word_embeddings is true, but %s in the model's files differs from the embedding; "
                "the head in the files is used",
                self.name,
            )
            self.tied = False

    def load(self, weights: Weights, backend: Backend) -> None:
        """Bring the weight to the device; after the embedding's."""
        self._backend = backend
        if not self.tied:
            self.own.load(weights, backend)

    def bind(self, workspace: Workspace, rows: int) -> None:
        """Take the memory of the logits, float32 [rows, vocab_size]."""
        self._logits = workspace.memory("logits", rows, self.vocab_size, float32=True)
        self._logits_buffer = workspace.buffer("logits", rows, self.vocab_size, float32=True)

    def forward(self, x: Buffer, rows: int) -> Memory:
        """Logits, float32 [rows, vocab_size], overwritten by the next call."""
        self.linear.product.forward(x, self._logits_buffer, rows, out_float32=True)
        logits = self._logits[:rows]
        if self.scale != 1.0:
            self._backend.scale(logits, float(np.float32(self.scale)))
        if self.softcap:
            self._backend.softcap(logits, self.softcap)
        return logits


def _same(first: WeightPart, second: WeightPart) -> bool:
    """Whether two tensors of one shape hold the same values."""
    if first.kind == second.kind and first.num_bytes == second.num_bytes:
        return all(
            ctypes.string_at(first.pointer + start, size) == ctypes.string_at(second.pointer + start, size)
            for start in range(0, first.num_bytes, _COMPARED)
            for size in [min(_COMPARED, first.num_bytes - start)]
        )
    return bool(np.array_equal(to_float32(first), to_float32(second)))
