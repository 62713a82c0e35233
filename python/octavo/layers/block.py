"""Decoder blocks: one class for each order of norms and residual sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.layers.attention import Attention
    from octavo.layers.backend import Backend, Buffer, StepInputs
    from octavo.layers.mlp import GatedMlp
    from octavo.layers.norm import Norm
    from octavo.layers.parameter import Parameter, Weights
    from octavo.layers.workspace import Stream, Workspace

__all__ = ["PreNormBlock", "SandwichBlock"]


class PreNormBlock:
    """x += attention(norm(x)), then x += mlp(norm(x)).

    A block is two calls. `attend` runs up to attention's output; `finish` runs the rest, so that the last block can be
    finished for the rows that sample alone. What a block computed last stays in `Stream.hidden`; whoever follows adds
    it, together with its own norm.

    Args:
        attention_norm: before attention.
        attention: the sublayer.
        mlp_norm: before the MLP.
        mlp: the sublayer.
    """

    attention_output_norm: Norm | None = None
    output_norm: Norm | None = None

    def __init__(self, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: GatedMlp) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self._previous_norm: Norm | None = None

    def parts(self) -> Iterator[Norm | Attention | GatedMlp]:
        """Everything that has parameters, in the order of use."""
        parts = (self.attention_norm, self.attention, self.attention_output_norm, self.mlp_norm, self.mlp)
        yield from (part for part in (*parts, self.output_norm) if part is not None)

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of all parts."""
        for part in self.parts():
            yield from part.parameters()

    def load(self, weights: Weights, backend: Backend) -> None:
        """Bring the weights to the device."""
        for part in self.parts():
            part.load(weights, backend)

    def bind(self, workspace: Workspace, rows: int, mlp_rows: int, group: int, previous: PreNormBlock | None) -> None:
        """Take scratch for `rows` rows.

        Args:
            workspace: gives it.
            rows: of one step, at most.
            mlp_rows: of one slice of the MLP, at most.
            group: the layer's cache group.
            previous: the block before, whose output this one adds.
        """
        self._is_first = previous is None
        self._previous_norm = None if previous is None else previous.output_norm
        self.attention.bind(workspace, rows, group)
        self.mlp.bind(workspace, mlp_rows)

    def attend(self, stream: Stream, cache: Buffer, inputs: StepInputs) -> None:
        """Add the previous block's output, norm, and attend."""
        rows = inputs.num_tokens
        if self._is_first:
            self.attention_norm.forward(stream.residual, stream.normed, rows)
        else:
            self.attention_norm.add(stream.hidden, stream.residual, stream.normed, rows, self._previous_norm)
        self.attention.attend(stream.normed, stream.attended, cache, inputs)

    def finish(self, stream: Stream, rows: int) -> None:
        """From attention's output to the MLP's."""
        self.attention.o.product.forward(stream.attended, stream.hidden, rows)
        self.mlp_norm.add(stream.hidden, stream.residual, stream.normed, rows, self.attention_output_norm)
        self.mlp.forward(stream, rows)


class SandwichBlock(PreNormBlock):
    """x += norm(attention(norm(x))), then x += norm(mlp(norm(x))).

    Args:
        attention_norm: before attention.
        attention: the sublayer.
        attention_output_norm: after it.
        mlp_norm: before the MLP.
        mlp: the sublayer.
        output_norm: after it.
    """

    def __init__(
        self,
        attention_norm: Norm,
        attention: Attention,
        attention_output_norm: Norm,
        mlp_norm: Norm,
        mlp: GatedMlp,
        output_norm: Norm,
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp)
        self.attention_output_norm = attention_output_norm
        self.output_norm = output_norm
