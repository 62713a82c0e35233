"""The gated MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from octavo.layers.backend import Backend
    from octavo.layers.linear import Linear
    from octavo.layers.parameter import Parameter, Weights
    from octavo.layers.workspace import Stream, Workspace

__all__ = ["Activation", "GatedMlp"]

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]


class GatedMlp:
    """down(activation(gate(x)) * up(x)), a slice of rows at a time.

    Args:
        gate_up: gate and up stacked, [2 * intermediate_size, hidden_size].
        down: [hidden_size, intermediate_size].
        activation: of the gate.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation: Activation = activation
        self._backend: Backend

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of both layers."""
        yield from self.gate_up.parameters()
        yield from self.down.parameters()

    def load(self, weights: Weights, backend: Backend) -> None:
        """Bring the weights to the device."""
        self._backend = backend
        self.gate_up.load(weights, backend)
        self.down.load(weights, backend)

    def bind(self, workspace: Workspace, rows: int) -> None:
        """Take the scratch of a slice of at most `rows` rows."""
        self._rows = rows
        self._gate_up = workspace.buffer("gate_up", rows, self.gate_up.out_size)
        self._activated = workspace.buffer("activated", rows, self.down.in_size)

    def forward(self, stream: Stream, rows: int) -> None:
        """stream.hidden = mlp(stream.normed) of the first rows."""
        gated_mlp, gate_up, down = self._backend.gated_mlp, self.gate_up.product, self.down.product
        for start, source, target in stream.slices:
            count = min(self._rows, rows - start)
            if count <= 0:
                break
            gated_mlp(gate_up, source, self._gate_up, self._activated, count, self.down.in_size, self.activation)
            down.forward(self._activated, target, count)
