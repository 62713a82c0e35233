"""SentencePiece's own `tokenizer.model` files, for folders that have no tokenizer.json.

The file is a protocol buffer of which a dozen fields matter here, so they are read directly.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, normalizers

from octavo.errors import CorruptFile, UnsupportedModel
from octavo.text.gguf_tokens import CONTROL, USER_DEFINED
from octavo.text.parts import surround
from octavo.text.sentencepiece import sentencepiece_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["read_sentencepiece_model"]

_FILE_LIMIT = 64 << 20
_BPE = 2
_UNKNOWN = 2


class _Model(msgspec.Struct):
    """The fields of the file, with the format's defaults."""

    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    kind: int = 1
    bos_id: int = 1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_sentencepiece_model(path: Path) -> Tokenizer:
    """Build a tokenizer from a BPE `tokenizer.model`; texts begin with its BOS token.

    Raises:
        CorruptFile: not such a file. UnsupportedModel: another kind than BPE.
    """
    size = path.stat().st_size
    if size > _FILE_LIMIT:
        raise CorruptFile(f"{path}: {size} bytes are too many for a SentencePiece model")
    try:
        model = _parse(path.read_bytes())
    except (ValueError, struct.error) as error:
        raise CorruptFile(f"{path}: not a SentencePiece model: {error}") from error
    if not model.pieces:
        raise CorruptFile(f"{path}: not a SentencePiece model: it holds no pieces")
    if model.kind != _BPE:
        raise UnsupportedModel(
            f"{path}: only BPE models of SentencePiece can be read; the tokenizer setting can name a folder or "
            "repository with a tokenizer.json"
        )
    try:
        return _build(model)
    except CorruptFile as error:
        raise CorruptFile(f"{path}: {error}") from error
    except Exception as error:  # the tokenizers package raises plain exceptions
        raise CorruptFile(f"{path}: not a SentencePiece model: {error}") from error


def _build(model: _Model) -> Tokenizer:
    unknown = next((piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind == _UNKNOWN), None)
    backend = sentencepiece_tokenizer(
        model.pieces, model.scores, unknown=unknown, add_space_prefix=model.add_dummy_prefix
    )
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence([*steps, backend.normalizer])
    for piece, kind in zip(model.pieces, model.types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            token = AddedToken(piece, normalized=False, special=kind == CONTROL)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    if 0 <= model.bos_id < len(model.pieces) and model.types[model.bos_id] == CONTROL:
        backend.post_processor = surround((model.pieces[model.bos_id], model.bos_id), None)
    return backend


def _parse(data: bytes) -> _Model:
    model = _Model(pieces=[], scores=[], types=[])
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            piece, score, kind = "", 0.0, 1
            for number, entry in _fields(value):
                if number == 1 and isinstance(entry, bytes):
                    piece = entry.decode()
                elif number == 2 and isinstance(entry, bytes):
                    (score,) = struct.unpack("<f", entry)
                elif number == 3 and isinstance(entry, int):
                    kind = entry
            model.pieces.append(piece)
            model.scores.append(score)
            model.types.append(kind)
        elif field == 2 and isinstance(value, bytes):
            for number, entry in _fields(value):
                if number == 3 and isinstance(entry, int):
                    model.kind = entry
                elif number == 41 and isinstance(entry, int):
                    model.bos_id = entry
        elif field == 3 and isinstance(value, bytes):
            for number, entry in _fields(value):
                if number == 2 and isinstance(entry, bytes):
                    model.charsmap = entry
                elif number == 3:
                    model.add_dummy_prefix = bool(entry)
                elif number == 4:
                    model.remove_extra_whitespaces = bool(entry)
    return model


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a message's fields: variable-length integers as int, all else as bytes.

    Raises:
        ValueError: the message is cut off, or no message.
    """
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + length > len(data):
            raise ValueError(f"cut off at byte {position}")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError(f"cut off at byte {position}")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
