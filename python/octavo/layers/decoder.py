"""The one decoder: every supported family is a `DecoderSpec` that this forward runs on any device's `Operations`."""

from __future__ import annotations

import dataclasses

from octavo.layers.operations import Buffer, IntArray, KvCache, Linear, Memory, Operations, StepInputs
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
        self._head_hidden = memory(head_rows, spec.hidden_size)
        self._head_residual = memory(head_rows, spec.hidden_size)
        head_normed = memory(head_rows, spec.hidden_size)
        self._logits = memory(head_rows, spec.vocab_size, float32=True)

        def view(columns: int) -> Memory:
            return narrow.reshape(-1)[: max_tokens * columns].reshape(max_tokens, columns)

        self._owned = [activated, gate_up, head_normed, narrow, qkv]
        self._hidden_buffer, self._residual_buffer = buffer(self._hidden), buffer(self._residual)
        normed = view(spec.hidden_size)
        self._normed, self._attended = buffer(normed), buffer(view(spec.q_size))
        self._qkv, self._gate_up, self._activated = buffer(qkv), buffer(gate_up), buffer(activated)
        self._mlp_slices = [
            (start, buffer(normed[start:]), buffer(self._hidden[start:])) for start in range(0, max_tokens, mlp_rows)
        ]
        self._head_hidden_buffer = buffer(self._head_hidden)
        self._head_residual_buffer = buffer(self._head_residual)
        self._head_normed = buffer(head_normed)
        self._logits_buffer = buffer(self._logits)

    def forward(self, inputs: StepInputs, cache: KvCache) -> None:
        """Run all layers over the step's tokens; keys and values go to the cache before they are read."""
        operations, weights, rows = self.operations, self.weights, inputs.num_tokens
        add_norm, rope_and_cache = operations.add_norm, operations.rope_and_cache
        attention, act_and_mul = operations.attention, operations.act_and_mul
        hidden, residual, normed, attended = (
            self._hidden_buffer,
            self._residual_buffer,
            self._normed,
            self._attended,
        )
        qkv, gate_up, activated, cos_sin = self._qkv, self._gate_up, self._activated, weights.cos_sin
        mlp_rows = self._mlp_rows
        slices = self._mlp_slices[: -(-rows // mlp_rows)]
        weights.embedding.embed(inputs.token_ids, residual, rows)
        if self.spec.embedding_scale != 1.0:
            operations.scale(self._residual[:rows], self.spec.embedding_scale)
        is_first = True
        for layer, layer_cache in zip(weights.layers, cache.layers, strict=True):
            if is_first:
                operations.norm(residual, layer.attention_norm, normed, rows)
                is_first = False
            else:
                add_norm(hidden, residual, layer.attention_norm, normed, rows)
            layer.qkv.forward(normed, qkv, rows)
            rope_and_cache(qkv, layer_cache, cos_sin, layer.q_norm, layer.k_norm, inputs)
            attention(qkv, attended, layer_cache, layer.window, inputs)
            layer.o.forward(attended, hidden, rows)
            add_norm(hidden, residual, layer.mlp_norm, normed, rows)
            for start, mlp_input, mlp_output in slices:
                count = min(mlp_rows, rows - start)
                layer.gate_up.forward(mlp_input, gate_up, count)
                act_and_mul(gate_up, activated, count)
                layer.down.forward(activated, mlp_output, count)

    def compute_logits(self, indices: IntArray) -> Memory:
        """Logits of some of the tokens of the last `forward`.

        Args:
            indices: int32[n] into the step's tokens, n at most `head_rows`.

        Returns:
            float32 [n, vocab_size], overwritten by the next call.
        """
        operations, spec, rows = self.operations, self.spec, indices.shape[0]
        operations.gather(self._hidden, indices, self._head_hidden[:rows])
        operations.gather(self._residual, indices, self._head_residual[:rows])
        operations.add_norm(
            self._head_hidden_buffer,
            self._head_residual_buffer,
            self.weights.final_norm,
            self._head_normed,
            rows,
        )
        self.weights.head.forward(self._head_normed, self._logits_buffer, rows, out_float32=True)
        logits = self._logits[:rows]
        if spec.logits_scale != 1.0:
            operations.scale(logits, spec.logits_scale)
        if spec.logits_softcap:
            operations.softcap(logits, spec.logits_softcap)
        return logits
