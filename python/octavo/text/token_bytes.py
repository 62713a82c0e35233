"""The bytes that each token id stands for, as the tokenizer's own decoder would write them."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import CorruptFile, UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

__all__ = ["SPECIAL", "TokenBytes", "byte_alphabet", "vocabulary_bytes"]

SPECIAL = 1
"""Flag of a token that is left out of text by default."""

_ID_LIMIT = 1 << 24
"""Far above any vocabulary, low enough that a table of this length fits in memory."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(msgspec.Struct, frozen=True):
    """The input of `_core.TokenTable`.

    Attributes:
        tokens: bytes of each id; empty where an id has no token.
        flags: one byte an id; bit 0: special.
        drop_leading_space: the decoder drops one space at the start of the text.
    """

    tokens: list[bytes]
    flags: bytes
    drop_leading_space: bool

    def resized(self, count: int) -> TokenBytes:
        """The first `count` ids; ids that the tokenizer lacks have no bytes.

        A tokenizer may have more ids than the model's embedding has rows: a model never samples those.
        """
        missing = max(count - len(self.tokens), 0)
        tokens = [*self.tokens[:count], *[b""] * missing]
        return TokenBytes(tokens, self.flags[:count] + bytes(missing), self.drop_leading_space)


class _Rules(msgspec.Struct):
    """The effect of a decoder on one token."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: list[tuple[str, str]] = []
    drop_leading_space: bool = False


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: the printable character that stands for each byte.

    Printable bytes of Latin-1 stand for themselves, the other 68 for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def vocabulary_bytes(backend: tokenizers.Tokenizer) -> TokenBytes:
    """Bytes and flags of every id of a tokenizer.

    Raises:
        CorruptFile: ids of absurd size.
        UnsupportedModel: a decoder whose effect on one token is not known here.
    """
    rules = _rules(backend)
    texts = {token_id: text for text, token_id in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    texts.update({token_id: token.content for token_id, token in added.items()})
    count = max(texts, default=-1) + 1
    if count > _ID_LIMIT:
        raise CorruptFile(f"tokenizer: the token id {count - 1} is beyond any vocabulary")
    tokens = [b""] * count
    for token_id, text in texts.items():
        tokens[token_id] = _bytes_of(text, rules)
    flags = bytearray(count)
    for token_id, token in added.items():
        flags[token_id] = SPECIAL if token.special else 0
    return TokenBytes(tokens, bytes(flags), rules.drop_leading_space)


def _bytes_of(text: str, rules: _Rules) -> bytes:
    if rules.byte_level:
        alphabet = byte_alphabet()
        try:
            return bytes([alphabet[character] for character in text])
        except KeyError:
            return text.encode()
    for old, new in rules.replacements:
        text = text.replace(old, new)
    if rules.byte_fallback:
        match = _BYTE_TOKEN.fullmatch(text)
        if match is not None:
            return bytes([int(match.group(1), 16)])
    return text.encode()


def _rules(backend: tokenizers.Tokenizer) -> _Rules:
    decoder = backend.decoder
    rules = _Rules(replacements=[])
    if decoder is None:
        raise UnsupportedModel("tokenizer: has no decoder, so its tokens cannot be joined to text")
    state = decoder.__getstate__()
    _apply(json.loads(state), rules)
    return rules


def _apply(decoder: dict[str, Any], rules: _Rules) -> None:
    kind = decoder.get("type")
    if kind == "Sequence":
        for part in decoder["decoders"]:
            _apply(part, rules)
    elif kind == "ByteLevel":
        rules.byte_level = True
    elif kind == "ByteFallback":
        rules.byte_fallback = True
    elif kind == "Replace" and isinstance(decoder["pattern"].get("String"), str):
        rules.replacements.append((decoder["pattern"]["String"], decoder["content"]))
    elif kind == "Metaspace":
        rules.replacements.append((decoder["replacement"], " "))
        rules.drop_leading_space = decoder.get("prepend_scheme", "always") != "never"
    elif kind == "Strip" and decoder["content"] == " " and decoder["start"] <= 1 and decoder["stop"] == 0:
        rules.drop_leading_space |= decoder["start"] == 1
    elif kind != "Fuse":
        raise UnsupportedModel(f"tokenizer: the decoder {kind!r} is not one Octavo knows")
