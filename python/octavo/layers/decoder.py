"""The one decoder: every supported family is a `DecoderSpec` that this forward runs on any device's `Operations`."""

from __future__ import annotations

import dataclasses

from octavo.layers.operations import Buffer, KvCache, Linear, Memory, Operations, StepInputs
from octavo.layers.spec import DecoderSpec

__all__ = ["Decoder", "DecoderLayer", "DecoderWeights"]


@dataclasses.dataclass(slots=True)
class DecoderLayer:
    """One block's weights on the device; norms are float32 buffers, `q_norm` and `k_norm` None where there are none."""

    attention_norm: Buffer
    qkv: Linear
    q_norm: Buffer
    k_norm: Buffer
    o: Linear
    mlp_norm: Buffer
    gate_up: Linear
    down: Linear
    window: int


@dataclasses.dataclass(slots=True)
class DecoderWeights:
    """A decoder's weights on the device.

    Attributes:
        embedding: [vocab_size, hidden_size].
        layers: the blocks.
        final_norm: float32[hidden_size].
        head: the embedding itself where they are tied.
        cos_sin: float32 [positions, rotary dim].
        owned: the memory behind the buffers, kept alive.
        num_bytes: of everything above.
    """

    embedding: Linear
    layers: list[DecoderLayer]
    final_norm: Buffer
    head: Linear
    cos_sin: Buffer
    owned: list[Memory]
    num_bytes: int


class Decoder:
    """Runs the layers over one step's tokens, then the head over the rows that sample.

    All memory (`DecoderSpec.workspace_bytes`) is taken at construction; a step allocates nothing.

    Args:
        spec: the family.
        weights: on the device of `operations`.
        operations: the device's kernels, bound to `spec`.
        max_tokens: of one step.
        head_rows: logits rows computed at once, at most.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        operations: Operations,
        *,
        max_tokens: int,
        head_rows: int,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.operations = operations
        self.max_tokens = max_tokens
        self.head_rows = head_rows
        memory, buffer = operations.memory, operations.buffer
        self._hidden = memory(max_tokens, spec.hidden_size)
        self._residual = memory(max_tokens, spec.hidden_size)
        # The normed input and the attention's output live at different times and share memory.
        narrow = memory(max_tokens, max(spec.hidden_size, spec.q_size))
        qkv = memory(max_tokens, spec.qkv_size)
        mlp_rows = self._mlp_rows = min(operations.mlp_rows, max_tokens)
        gate_up, activated = memory(mlp_rows, 2 * spec.intermediate_size), memory(mlp_rows, spec.intermediate_size)
        head_hidden = memory(head_rows, spec.hidden_size)
        self._head_residual = memory(head_rows, spec.hidden_size)
        head_narrow = memory(head_rows, max(spec.hidden_size, spec.q_size))
        self._logits = memory(head_rows, spec.vocab_size, float32=True)

        def view(shared: Memory, columns: int) -> Memory:
            rows = shared.shape[0]
            return shared.reshape(-1)[: rows * columns].reshape(rows, columns)

        def slices(source: Memory, target: Memory) -> list[tuple[int, Buffer, Buffer]]:
            starts = range(0, source.shape[0], mlp_rows)
            return [(start, buffer(source[start:]), buffer(target[start:])) for start in starts]

        self._owned = [activated, gate_up, head_hidden, head_narrow, narrow, qkv]
        self._hidden_buffer, self._residual_buffer = buffer(self._hidden), buffer(self._residual)
        normed, self._attended = view(narrow, spec.hidden_size), view(narrow, spec.q_size)
        self._normed, self._attended_buffer = buffer(normed), buffer(self._attended)
        self._qkv, self._gate_up, self._activated = buffer(qkv), buffer(gate_up), buffer(activated)
        self._mlp_slices = slices(normed, self._hidden)
        head_normed, self._head_attended = view(head_narrow, spec.hidden_size), view(head_narrow, spec.q_size)
        self._head_normed, self._head_attended_buffer = buffer(head_normed), buffer(self._head_attended)
        self._head_hidden_buffer = buffer(head_hidden)
        self._head_residual_buffer = buffer(self._head_residual)
        self._head_mlp_slices = slices(head_normed, head_hidden)
        self._logits_buffer = buffer(self._logits)
        self._num_tokens = 0

    def forward(self, inputs: StepInputs, cache: KvCache) -> None:
        """Run the layers over the step's tokens; keys and values go to the cache before they are read.

        What the last layer does after its attention is left to `compute_logits`: most rows of a prompt never need it.
        """
        operations, weights, rows = self.operations, self.weights, inputs.num_tokens
        self._num_tokens = rows
        add_norm, rope_and_cache, attention = operations.add_norm, operations.rope_and_cache, operations.attention
        hidden, residual, normed, attended = (
            self._hidden_buffer,
            self._residual_buffer,
            self._normed,
            self._attended_buffer,
        )
        qkv, cos_sin = self._qkv, weights.cos_sin
        weights.embedding.embed(inputs.token_ids, residual, rows)
        if self.spec.embedding_scale != 1.0:
            operations.scale(self._residual[:rows], self.spec.embedding_scale)
        previous: DecoderLayer | None = None
        for layer, layer_cache in zip(weights.layers, cache.layers, strict=True):
            if previous is None:
                operations.norm(residual, layer.attention_norm, normed, rows)
            else:
                previous.o.forward(attended, hidden, rows)
                add_norm(hidden, residual, previous.mlp_norm, normed, rows)
                self._mlp(previous, self._mlp_slices, rows)
                add_norm(hidden, residual, layer.attention_norm, normed, rows)
            layer.qkv.forward(normed, qkv, rows)
            rope_and_cache(qkv, layer_cache, cos_sin, layer.q_norm, layer.k_norm, inputs)
            attention(qkv, attended, layer_cache, layer.window, inputs)
            previous = layer

    def _mlp(self, layer: DecoderLayer, slices: list[tuple[int, Buffer, Buffer]], rows: int) -> None:
        """The layer's MLP, a slice of rows at a time."""
        mlp_rows, gate_up, activated = self._mlp_rows, self._gate_up, self._activated
        gated = self.operations.gated
        for start, source, target in slices:
            count = min(mlp_rows, rows - start)
            if count <= 0:
                break
            gated(layer.gate_up, source, gate_up, activated, count)
            layer.down.forward(activated, target, count)

    def compute_logits(self, indices: Memory | None) -> Memory:
        """Finish the last layer for some of the tokens of the last `forward`, and take their logits.

        Args:
            indices: int32[n] into the step's tokens, on the device; n at most `head_rows`. None: all of them, in order.

        Returns:
            float32 [n, vocab_size], overwritten by the next call.
        """
        operations, spec, weights = self.operations, self.spec, self.weights
        hidden, normed = self._head_hidden_buffer, self._head_normed
        last = weights.layers[-1]
        if indices is None:
            rows, attended, residual = self._num_tokens, self._attended_buffer, self._residual_buffer
        else:
            rows, attended, residual = indices.shape[0], self._head_attended_buffer, self._head_residual_buffer
            operations.gather(self._attended, indices, self._head_attended[:rows])
            operations.gather(self._residual, indices, self._head_residual[:rows])
        last.o.forward(attended, hidden, rows)
        operations.add_norm(hidden, residual, last.mlp_norm, normed, rows)
        self._mlp(last, self._head_mlp_slices, rows)
        operations.add_norm(hidden, residual, weights.final_norm, normed, rows)
        weights.head.forward(normed, self._logits_buffer, rows, out_float32=True)
        logits = self._logits[:rows]
        if spec.logits_scale != 1.0:
            operations.scale(logits, spec.logits_scale)
        if spec.logits_softcap:
            operations.softcap(logits, spec.logits_softcap)
        return logits
