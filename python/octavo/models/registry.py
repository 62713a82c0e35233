"""Which architectures Octavo knows, and how each becomes a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.errors import UnsupportedModel
from octavo.models.llama import llama, mistral, qwen2, qwen3

if TYPE_CHECKING:
    from octavo.layers.spec import DecoderSpec
    from octavo.loading.model_config import ModelConfig

__all__ = ["ARCHITECTURES", "decoder_spec"]

ARCHITECTURES: dict[str, Callable[[ModelConfig], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """Map a model's description to the decoder that runs it.

    Raises:
        UnsupportedModel: an architecture, activation or rotary scaling that Octavo does not know.
    """
    mapping = ARCHITECTURES.get(config.architecture)
    if mapping is None:
        raise UnsupportedModel(
            f"architectures: {config.architecture!r} is not supported; Octavo runs {', '.join(ARCHITECTURES)}"
        )
    return mapping(config)
