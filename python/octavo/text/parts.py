"""What every kind of tokenizer file is brought to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

__all__ = ["TokenizerParts"]


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


def add_bos_and_eos(
    backend: tokenizers.Tokenizer, bos: tuple[str, int | None] | None, eos: tuple[str, int | None] | None
) -> None:
    """Have the tokenizer put (text, id) of BOS before, and of EOS behind, every text; None puts nothing."""
    from tokenizers import processors

    tokens = [token for token in (bos, eos) if token is not None]
    if not tokens:
        return
    before = [bos[0]] if bos else []
    after = [eos[0]] if eos else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B:1"], special_tokens=tokens
    )
