"""Token properties in GGUF metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CONTROL", "USER_DEFINED", "end_token_ids"]

CONTROL = 3
USER_DEFINED = 4
"""Values of `tokenizer.ggml.token_type` whose tokens are matched whole in text."""

# Files that name no end-of-turn token have one all the same: these texts are nothing else.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, of turn and of message, as far as they lie in the vocabulary."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list):
        return ()
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if named[1] is None and isinstance(types, list) and len(types) == len(tokens):
        named += [
            token_id
            for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True))
            if token_type == CONTROL and token in _END_OF_TURN
        ]
    valid = (entry for entry in named if type(entry) is int and 0 <= entry < len(tokens))
    return tuple(dict.fromkeys(valid))
