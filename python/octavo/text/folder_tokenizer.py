"""A tokenizer from a Hugging Face folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from octavo.errors import CorruptFile, UnsupportedModel
from octavo.text.parts import TokenizerParts, surround

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_folder_tokenizer"]

_FILE_LIMIT = 512 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_folder_tokenizer(folder: Path) -> TokenizerParts | None:
    """Read tokenizer.json with tokenizer_config.json and the chat templates; None where there is no tokenizer.

    Raises:
        CorruptFile: one that cannot be read. UnsupportedModel: a kind not known.
    """
    settings = _read_object(folder / "tokenizer_config.json")
    names = {**_read_object(folder / "special_tokens_map.json"), **settings}
    backend = _backend(folder)
    if backend is None:
        return None
    backend.no_truncation()
    backend.no_padding()
    _add_tokens(backend, settings)
    special_tokens = {name: text for name in _SPECIAL if (text := _content(names.get(name))) is not None}
    eos = special_tokens.get("eos_token")
    eos_id = None if eos is None else backend.token_to_id(eos)
    bos = special_tokens.get("bos_token")
    bos_id = None if bos is None else backend.token_to_id(bos)
    # A tokenizer.json says itself what it puts around a text; transformers ignores the settings beside one.
    beside_model = not (folder / "tokenizer.json").is_file()
    if beside_model and ("add_bos_token" in settings or "add_eos_token" in settings):
        backend.post_processor = surround(
            (bos, bos_id) if settings.get("add_bos_token", True) and bos is not None and bos_id is not None else None,
            (eos, eos_id) if settings.get("add_eos_token") and eos is not None and eos_id is not None else None,
        )
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        bos_token_id=bos_id,
        eos_token_ids=() if eos_id is None else (eos_id,),
        chat_templates=_chat_templates(folder, settings),
    )


def _backend(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if path.is_file():
        if path.stat().st_size > _FILE_LIMIT:
            raise CorruptFile(f"{path}: too large for a tokenizer")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers package raises plain exceptions
            raise CorruptFile(f"{path}: not a tokenizer: {error}") from error
    path = folder / "tokenizer.model"
    if path.is_file():
        from octavo.text.sentencepiece_model import read_sentencepiece_model

        return read_sentencepiece_model(path)
    for other in ("tekken.json", "vocab.json", "vocab.txt"):
        if (folder / other).is_file():
            raise UnsupportedModel(
                f"{folder}: holds {other} and no tokenizer.json; the tokenizer setting can name a folder or "
                "repository that has one"
            )
    return None


def _add_tokens(backend: Tokenizer, settings: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows."""
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    known = backend.get_added_tokens_decoder()
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0]) if item[0].isdigit() else -1):
        content = _content(entry)
        if content is None or not key.isdigit() or int(key) in known:
            continue
        if backend.token_to_id(content) not in (None, int(key)):
            continue
        flags = {
            name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        backend.add_tokens([AddedToken(content, **flags)])


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates by name; files take precedence over tokenizer_config.json."""
    templates: dict[str, str] = {}
    value = settings.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    legacy = _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    files = {"default": folder / "chat_template.jinja"}
    extra = folder / "additional_chat_templates"
    if extra.is_dir():
        files.update({path.stem: path for path in sorted(extra.glob("*.jinja"))})
    for name, path in files.items():
        if path.is_file():
            templates[name] = _read_text(path)
    return templates


def _content(value: Any) -> str | None:
    """The text of a token given as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_text(path: Path) -> str:
    if path.stat().st_size > _FILE_LIMIT:
        raise CorruptFile(f"{path}: too large")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path}: not UTF-8 text") from error


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path}: a JSON object is expected")
    return value
