"""The common form of every kind of tokenizer file."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import processors

__all__ = ["TokenizerParts", "surround"]


@dataclasses.dataclass
class TokenizerParts:
    """A tokenizer's pieces.

    Attributes:
        backend: text to ids and back.
        special_tokens: names such as `bos_token` to their text, as chat templates read them.
        bos_token_id: the token that opens a text, if there is one.
        eos_token_ids: tokens that end an answer.
        chat_templates: name (`default`, `tool_use`, ...) to jinja text.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]


def surround(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> processors.PostProcessor:
    """A post-processor that adds BOS before and EOS after every text, each as (text, id) or None."""
    from tokenizers import processors

    before = [bos[0]] if bos else []
    after = [eos[0]] if eos else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[token for token in (bos, eos) if token is not None],
    )
