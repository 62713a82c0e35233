"""Which architectures Octavo runs, and how each becomes a decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from octavo.errors import UnsupportedModel
from octavo.models.gemma import GEMMA2_KEYS, GEMMA3_KEYS, gemma2, gemma3
from octavo.models.llama import LLAMA_KEYS, MISTRAL_KEYS, llama, mistral
from octavo.models.qwen import QWEN2_KEYS, QWEN3_KEYS, qwen2, qwen3

if TYPE_CHECKING:
    from octavo.layers.decoder import Decoder
    from octavo.loading.model_config import ModelConfig
    from octavo.models.common import Keys

__all__ = ["FAMILIES", "Family", "build_decoder"]


class Family(NamedTuple):
    """One architecture.

    Attributes:
        build: makes its decoder.
        keys: of its config.json.
    """

    build: Callable[[ModelConfig], Decoder]
    keys: Keys


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama, LLAMA_KEYS),
    "MistralForCausalLM": Family(mistral, MISTRAL_KEYS),
    "Qwen2ForCausalLM": Family(qwen2, QWEN2_KEYS),
    "Qwen3ForCausalLM": Family(qwen3, QWEN3_KEYS),
    "Gemma2ForCausalLM": Family(gemma2, GEMMA2_KEYS),
    "Gemma3ForCausalLM": Family(gemma3, GEMMA3_KEYS),
    "Gemma3ForConditionalGeneration": Family(gemma3, GEMMA3_KEYS),
}
"""By Hugging Face's name of the class."""


def build_decoder(config: ModelConfig) -> Decoder:
    """The decoder that a model's configuration describes, without weights.

    Raises:
        UnsupportedModel: an architecture, or a value of a key, that Octavo does not run.
    """
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise UnsupportedModel(
            f"architectures: {config.architecture!r} is not supported; Octavo runs {', '.join(FAMILIES)}"
        )
    family.keys.check(config)
    return family.build(config)
