"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from octavo import _core
from octavo.errors import CorruptFile, UnsupportedModel
from octavo.text.gguf_tokens import CONTROL, USER_DEFINED, end_token_ids
from octavo.text.parts import TokenizerParts, surround
from octavo.text.pre_tokenizers import ADDS_BOS, IGNORES_MERGES, pre_tokenizer
from octavo.text.sentencepiece import sentencepiece_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["parts_from_metadata", "read_gguf_tokenizer"]

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def read_gguf_tokenizer(path: Path) -> TokenizerParts | None:
    """The tokenizer and chat templates that a GGUF file carries; None when it carries none.

    Raises:
        CorruptFile: vocabulary and merges contradict each other.
        UnsupportedModel: another kind of vocabulary.
    """
    metadata, _ = _core.read_gguf(str(path))
    return parts_from_metadata(metadata, str(path))


def parts_from_metadata(metadata: Mapping[str, Any], where: str) -> TokenizerParts | None:
    """Build the tokenizer from metadata; see `read_gguf_tokenizer`.

    Args:
        metadata: the file's keys and values.
        where: the file, for messages.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
    if not tokens:
        return None
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        if types is not None:
            raise CorruptFile(f"{where}: `tokenizer.ggml.token_type` does not have one entry a token")
        types = [1] * len(tokens)
    kind = metadata.get("tokenizer.ggml.model")
    ids = {name: _token_id(metadata, key, len(tokens), where) for name, key in _SPECIAL.items()}
    special_tokens = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    try:
        backend = _backend(kind, metadata, tokens, types, ids["unk_token"], where)
    except (CorruptFile, UnsupportedModel):
        raise
    except Exception as error:  # the tokenizers package raises plain exceptions
        raise CorruptFile(f"{where}: the vocabulary and the merges do not fit together: {error}") from error
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if adds_bos is None:
        adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in ADDS_BOS
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token")
    if "tokenizer.huggingface.json" not in metadata:
        bos_id, eos_id = ids["bos_token"], ids["eos_token"]
        backend.post_processor = surround(
            (tokens[bos_id], bos_id) if adds_bos and bos_id is not None else None,
            (tokens[eos_id], eos_id) if adds_eos and eos_id is not None else None,
        )
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        bos_token_id=ids["bos_token"],
        eos_token_ids=end_token_ids(metadata),
        chat_templates=_chat_templates(metadata),
    )


def _backend(
    kind: Any,
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    unknown: int | None,
    where: str,
) -> Tokenizer:
    whole = metadata.get("tokenizer.huggingface.json")
    if isinstance(whole, str):
        return Tokenizer.from_str(whole)
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise CorruptFile(f"{where}: `tokenizer.ggml.scores` does not have one entry a token")
        backend = sentencepiece_tokenizer(
            tokens,
            scores,
            unknown=None if unknown is None else tokens[unknown],
            add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        )
    else:
        raise UnsupportedModel(
            f"{where}: `tokenizer.ggml.model` is {kind!r}; Octavo reads gpt2 and llama vocabularies. "
            "The tokenizer setting can name a folder or repository with a tokenizer.json"
        )
    added = [
        AddedToken(token, normalized=False, special=token_type == CONTROL)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (CONTROL, USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    return backend


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen use it."""
    name = metadata.get("tokenizer.ggml.pre")
    pairs = []
    for merge in _strings(metadata, "tokenizer.ggml.merges", where):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise CorruptFile(f"{where}: `tokenizer.ggml.merges` holds {merge!r}; two tokens are expected")
        pairs.append((left, right))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CorruptFile(f"{where}: `tokenizer.ggml.tokens` holds a token twice")
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=name in IGNORES_MERGES))
    backend.pre_tokenizer = pre_tokenizer(name if isinstance(name, str) else None)
    backend.decoder = decoders.ByteLevel()
    return backend


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    prefix = "tokenizer.chat_template"
    for key, value in metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(f"{prefix}.")):
            templates[key[len(prefix) + 1 :] or "default"] = value
    return templates


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(key, [])
    if not isinstance(value, list) or (value and not isinstance(value[0], str)):
        raise CorruptFile(f"{where}: `{key}` is no list of strings")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, count: int, where: str) -> int | None:
    """The id under `tokenizer.ggml.{name}_token_id`."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise CorruptFile(f"{where}: `{key}` is {value!r}; a token id is expected")
    if value >= count or value < 0:
        return None
    return value
