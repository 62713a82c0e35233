"""Models of the Hugging Face hub, in its standard cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import ModelNotFound
from octavo.log_format import for_people

__all__ = ["fetch_model", "fetch_tokenizer", "is_repository_id"]

_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9_][\w.\-]*")
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken")
_UNWANTED = ("*/*", "consolidated*", "training_args.bin", "optimizer*", "scheduler*")
_TIMEOUT_SECONDS = 10.0


def is_repository_id(name: str) -> bool:
    """Whether a name has the form `owner/name`."""
    return _ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def fetch_model(repository: str) -> Path:
    """The folder of a repository's newest snapshot, with its safetensors or other weights.

    Files already in the cache are not fetched again, and without a network they serve as they are.

    Raises:
        ModelNotFound: no such repository, no access, no network, or none of the files.
    """
    files = _list_files(repository)
    if files is None:
        return _cached(repository)
    suffix = next((suffix for suffix in _WEIGHTS if any(_plain(file, suffix) for file in files)), None)
    if suffix == ".gguf":
        _refuse_many_gguf(repository, files)
    if suffix is None and "config.json" not in files:
        raise ModelNotFound(f"model: {repository} holds neither weights nor a config.json; check the name")
    patterns = _TEXT_FILES if suffix is None else (f"*{suffix}", *_TEXT_FILES)
    return _snapshot(repository, patterns, local_only=False)


def _cached(repository: str) -> Path:
    """The cached snapshot with the best complete kind of weights."""
    for suffix in _WEIGHTS:
        with contextlib.suppress(ModelNotFound):
            folder = _snapshot(repository, (f"*{suffix}", *_TEXT_FILES), local_only=True)
            if any(folder.glob(f"*{suffix}")):
                return folder
    return _snapshot(repository, _TEXT_FILES, local_only=True)


def fetch_tokenizer(repository: str) -> Path:
    """Download a repository without its weights; see `fetch_model`."""
    files = _list_files(repository)
    return _snapshot(repository, _TEXT_FILES, local_only=files is None)


def _plain(file: str, suffix: str) -> bool:
    return file.endswith(suffix) and "/" not in file


def _refuse_many_gguf(repository: str, files: list[str]) -> None:
    found = [file for file in files if _plain(file, ".gguf")]
    if len(found) > 1:
        raise ModelNotFound(
            f"model: {repository} holds {len(found)} GGUF files; download one of them and name its path: "
            f"{', '.join(found[:8])}"
        )


def _list_files(repository: str) -> list[str] | None:
    """Names of a repository's files; None when the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = huggingface_hub.HfApi().model_info(repository, timeout=_TIMEOUT_SECONDS)
        return [entry.rfilename for entry in info.siblings or []]
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"model: {repository} asks for its licence to be accepted on its page; then log in "
            "(`hf auth login`, or HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"model: the hub has no repository {repository!r}, or it is private: check the spelling, or "
            "log in (`hf auth login`, or HF_TOKEN)"
        ) from error
    except Exception:  # no network, offline mode, a proxy: the cache may still do
        return None


def _snapshot(repository: str, patterns: tuple[str, ...], *, local_only: bool) -> Path:
    import huggingface_hub

    arguments: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": list(_UNWANTED)}
    try:
        with _bars_on_terminals_only():
            return Path(huggingface_hub.snapshot_download(repository, local_files_only=local_only, **arguments))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = (
            "the hub cannot be reached and the model is not in the cache: check the network (HF_ENDPOINT names "
            "a mirror), or name a folder or .gguf file"
            if local_only
            else f"fetching it failed ({reason}); try again, what is complete is kept"
        )
        raise ModelNotFound(f"model: {repository}: {hint}") from error


@contextlib.contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Keep the hub's progress bars out of logs."""
    from huggingface_hub import utils

    quiet = not for_people() and not utils.are_progress_bars_disabled()
    if quiet:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            utils.enable_progress_bars()
