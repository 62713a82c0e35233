"""From a model's tensors to a decoder's weights on the device, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable

from octavo.layers.decoder import DecoderLayer, DecoderWeights
from octavo.layers.operations import Buffer, Memory, Operations
from octavo.layers.rotary import cos_sin_table
from octavo.layers.spec import DecoderSpec
from octavo.layers.weights import ROTARY_DIVISORS, Weights, check_tensors, to_float32

__all__ = ["load_weights"]


def load_weights(
    spec: DecoderSpec,
    weights: Weights,
    operations: Operations,
    *,
    num_positions: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> DecoderWeights:
    """Check the tensors and bring them to the device; what is quantized is dequantized on the way.

    Args:
        spec: the family.
        weights: where the tensors lie.
        operations: the device.
        num_positions: the longest sequence served, for the rotary table.
        progress: told of the layers done, and how many there are.

    Raises:
        ModelError: tensors that are missing, unknown or of another shape.
    """
    check_tensors(spec, weights)
    names, owned = spec.names, list[Memory]()
    num_bytes = 0

    def vector(name: str) -> Buffer:
        owned.append(operations.place(to_float32(weights.get(f"{name}.weight"))))
        return operations.buffer(owned[-1])

    def report(done: int) -> None:
        if progress is not None:
            progress("weights", done, spec.num_layers + 1)

    report(0)
    embedding = operations.linear(weights, [names.embedding], bias=False)
    head = embedding if spec.tied_embeddings else operations.linear(weights, [names.head], bias=False)
    layers = []
    for index in range(spec.num_layers):
        report(index + 1)

        def name(template: str, index: int = index) -> str:
            return template.format(layer=index)

        layer = DecoderLayer(
            attention_norm=vector(name(names.attention_norm)),
            qkv=operations.linear(weights, [name(names.q), name(names.k), name(names.v)], bias=spec.qkv_bias),
            q_norm=vector(name(names.q_norm)) if spec.qk_norm else None,
            k_norm=vector(name(names.k_norm)) if spec.qk_norm else None,
            o=operations.linear(weights, [name(names.o)], bias=spec.output_bias),
            mlp_norm=vector(name(names.mlp_norm)),
            gate_up=operations.linear(weights, [name(names.gate), name(names.up)], bias=spec.mlp_bias),
            down=operations.linear(weights, [name(names.down)], bias=spec.mlp_bias),
            window=spec.windows[index],
        )
        layers.append(layer)
        num_bytes += sum(part.num_bytes for part in (layer.qkv, layer.o, layer.gate_up, layer.down))
    final_norm = vector(names.final_norm)
    divisors = to_float32(weights.get(ROTARY_DIVISORS)) if spec.rotary.kind == "factors" else None
    cos_sin = operations.place(cos_sin_table(spec.rotary, num_positions, divisors))
    owned.append(cos_sin)
    report(spec.num_layers + 1)
    num_bytes += embedding.num_bytes + (0 if spec.tied_embeddings else head.num_bytes)
    num_bytes += sum(memory.nbytes for memory in owned)
    return DecoderWeights(embedding, layers, final_norm, head, operations.buffer(cos_sin), owned, num_bytes)
