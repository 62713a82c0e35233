"""SentencePiece BPE vocabularies (pieces with scores) as a tokenizer of the `tokenizers` package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, normalizers

from octavo.errors import CorruptFile

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MARK", "merges_of", "sentencepiece_tokenizer"]

MARK = "\u2581"
"""SentencePiece's character for a space."""


def sentencepiece_tokenizer(
    tokens: Sequence[str], scores: Sequence[float], *, unknown: str | None, add_space_prefix: bool
) -> Tokenizer:
    """Build the tokenizer; the added tokens are the caller's to add.

    Args:
        tokens: pieces in id order; `<0x0A>` and the like stand for bytes.
        scores: of each piece; a pair whose piece scores higher is merged first.
        unknown: the piece for what nothing else covers.
        add_space_prefix: a text gets a space in front.

    Raises:
        CorruptFile: a piece twice.
    """
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CorruptFile("the vocabulary holds a token twice")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_of(vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback="<0x00>" in vocabulary,
        )
    )
    mark_spaces = normalizers.Replace(" ", MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(MARK), mark_spaces]) if add_space_prefix else mark_spaces
    )
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_of(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs that make a piece of the vocabulary, best score first."""
    found: list[tuple[float, int, int, str, str]] = []
    longest = 0
    for token in vocabulary:
        longest = max(longest, len(token))
    for token, token_id in vocabulary.items():
        score = scores[token_id]
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in vocabulary and token[cut:] in vocabulary:
                found.append((score, cut, len(token) - cut, left, token[cut:]))
    found.sort(key=lambda pair: pair[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]
