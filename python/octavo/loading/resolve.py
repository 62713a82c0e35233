"""From a model's name to its files: `demo`, a file, a folder or a hub repository."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from octavo.errors import CorruptFile, ModelNotFound, UnsupportedModel
from octavo.loading.progress import Progress

__all__ = ["ModelSource", "resolve_model", "resolve_tokenizer"]

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Location of a model's files on this machine.

    Attributes:
        kind: `gguf` (one file holds everything), `folder` (Hugging Face layout, with weights), `config-only`
            (such a folder without weights), or `fake` (no files: `path` is a name).
        path: the file or the folder, absolute.
        name: what the person typed, or the folder's or file's own name when that was a path.
        sampling_defaults: what the model's makers recommend, where its files do not say it.
    """

    kind: Literal["gguf", "folder", "config-only", "fake"]
    path: Path
    name: str
    sampling_defaults: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)


def resolve_model(name: str, *, progress: Progress | None = None) -> ModelSource:
    """Find a model's files; download them if they are not on this machine.

    Args:
        name: `demo`, a `.gguf` file, a folder, or `owner/name` of a hub repository.
        progress: told about downloads; a progress bar on a terminal when None.

    Raises:
        ModelNotFound: nothing of that name, or it cannot be fetched.
        CorruptFile: a download that is not what it should be.
        UnsupportedModel: a folder that holds no model, or several.
    """
    if name == "demo":
        from octavo.loading.demo import SAMPLING_DEFAULTS, demo_model

        return ModelSource("gguf", demo_model(progress=progress), "demo", SAMPLING_DEFAULTS)
    local = _local_source(name)
    if local is not None:
        return local
    from octavo.loading.hub import fetch_model, is_repository_id

    if is_repository_id(name):
        source = _folder_source(fetch_model(name), name)
        return source
    raise _not_found(name)


def resolve_tokenizer(name: str) -> ModelSource:
    """Find a tokenizer's files; from a hub repository only these are downloaded."""
    path = _path(name)
    if path.is_file() and path.name in _TOKENIZER_FILES:
        path = path.parent
    if path.is_dir() and any((path / file).is_file() for file in _TOKENIZER_FILES):
        return ModelSource("config-only", path.resolve(), path.name)
    if name == "demo" or _exists(path):
        return resolve_model(name)
    from octavo.loading.hub import fetch_tokenizer, is_repository_id

    if is_repository_id(name):
        return ModelSource("config-only", fetch_tokenizer(name), name)
    raise _not_found(name)


def _local_source(name: str) -> ModelSource | None:
    """The source if the name is an existing path, else None."""
    path = _path(name)
    if not _exists(path):
        if path.suffix == ".gguf":
            raise ModelNotFound(f"model: no file {name!r}; check the path")
        return None
    path = path.absolute()
    if path.is_dir():
        return _folder_source(path, path.name)
    if not path.is_file():
        # Opening a pipe would block.
        raise UnsupportedModel(f"model: {name!r} is neither a file nor a folder; name one of them")
    if path.suffix == ".gguf" or _starts_with_gguf(path):
        return _gguf_source(path, path.stem)
    if path.name == "config.json":
        return _folder_source(path.parent, path.parent.name)
    raise UnsupportedModel(f"model: {name!r} is not a GGUF file; name a .gguf file or a folder with config.json")


def _folder_source(path: Path, name: str) -> ModelSource:
    """Identify the content of a folder."""
    files = sorted(entry.name for entry in path.iterdir())
    if "config.json" in files:
        weights = any(file.endswith((".safetensors", ".bin")) for file in files)
        return ModelSource("folder" if weights else "config-only", path, name)
    gguf = [file for file in files if file.endswith(".gguf")]
    if len(gguf) == 1:
        return _gguf_source(path / gguf[0], name)
    if gguf:
        raise UnsupportedModel(
            f"model: the folder {str(path)!r} holds {len(gguf)} .gguf files; name one of them: {', '.join(gguf[:8])}"
        )
    raise UnsupportedModel(
        f"model: the folder {str(path)!r} holds neither a config.json nor a .gguf file; name the folder of "
        "a model, or its file"
    )


def _gguf_source(path: Path, name: str) -> ModelSource:
    try:
        begins = not path.is_file() or _starts_with_gguf(path)
    except OSError:
        begins = True  # the reader of the file reports errors
    if not begins:
        raise CorruptFile(
            f'model: {str(path)!r} is not a GGUF file: it does not begin with "GGUF"; download it again, or '
            "name another"
        )
    return ModelSource("gguf", path, name)


def _path(name: str) -> Path:
    """The name as a path; `~` is kept if there is no such home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _exists(path: Path) -> bool:
    """Whether the path exists; False for invalid names."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _starts_with_gguf(path: Path) -> bool:
    """Whether the file begins with GGUF's magic bytes (files in hub caches may have no suffix)."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _not_found(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"model: there is no file, folder or hub repository {name!r}; name `demo`, a .gguf file, a folder "
        "with config.json, or a repository as owner/name"
    )
