"""Tensors of a Hugging Face folder: safetensors or `.bin`, one file or shards with an index."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from octavo import _core
from octavo.errors import CorruptFile, ModelNotFound
from octavo.loading.mapping import MappedFile
from octavo.loading.model_config import read_json
from octavo.loading.weights import TORCH_NAMES, WeightPart, WeightSource

if TYPE_CHECKING:
    import torch

__all__ = ["BinWeights", "SafetensorsWeights", "open_folder"]


def open_folder(folder: Path) -> WeightSource:
    """Open a folder's weights: safetensors before `.bin`, and a whole file before shards, as transformers does.

    An index beside a whole file is not read: it is left over from an earlier save.

    Raises:
        ModelNotFound: no weights. CorruptFile: a shard is missing, or the index contradicts the files.
    """
    for index, single, pattern, opener in (
        ("model.safetensors.index.json", "model.safetensors", "*.safetensors", SafetensorsWeights),
        ("pytorch_model.bin.index.json", "pytorch_model.bin", "*.bin", BinWeights),
    ):
        if (folder / single).is_file():
            return opener([folder / single], None)
        if (folder / index).is_file():
            weight_map = _read_index(folder / index)
            return opener(_shards(folder, weight_map), weight_map)
        others = sorted(path for path in folder.glob(pattern) if _is_weights(path.name))
        if others:
            return opener(others, None)
    raise ModelNotFound(f"{folder}: holds no weights; *.safetensors or pytorch_model*.bin are expected")


def _is_weights(name: str) -> bool:
    """Whether a file holds the model: not a copy in another layout nor training state."""
    return not name.startswith(("consolidated", "training_args", "optimizer", "scheduler", "adapter_"))


def _read_index(path: Path) -> dict[str, str]:
    """The index's map of tensor names to file names."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFile(f"{path}: `weight_map` is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _stays_inside(file):
            raise CorruptFile(f"{path}: `{name}` is said to lie in {file!r}, which is not a file of this folder")
    return weight_map


def _stays_inside(file: str) -> bool:
    """Whether a relative name cannot leave its folder.

    Links are followed: hub caches are made of them, and only the machine's owner can put one here.
    """
    path = PurePosixPath(file)
    return bool(file) and not path.is_absolute() and ".." not in path.parts and "\\" not in file and "\0" not in file


def _shards(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise CorruptFile(f"{folder}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing[:8])}")
    return [folder / file for file in files]


def _check_index(found: dict[str, Path], weight_map: dict[str, str] | None) -> None:
    """Every tensor of the index must lie in the shard it names."""
    for name, file in (weight_map or {}).items():
        path = found.get(name)
        if path is None or path.name != PurePosixPath(file).name:
            raise CorruptFile(f"{file}: lacks the tensor `{name}` that the index places there")


class SafetensorsWeights(WeightSource):
    """Tensors of safetensors files, mapped."""

    def __init__(self, paths: list[Path], weight_map: dict[str, str] | None) -> None:
        """Check the headers and map the files.

        Raises:
            CorruptFile: as `_core.read_safetensors`, one name twice, or an index that contradicts the files.
        """
        self._tensors: dict[str, tuple[MappedFile, str, tuple[int, ...], int, int]] = {}
        self._files: list[MappedFile] = []
        found: dict[str, Path] = {}
        for path in paths:
            _, tensors = _core.read_safetensors(str(path))
            file = MappedFile(path)
            self._files.append(file)
            for name, kind, shape, offset, num_bytes in tensors:
                if weight_map is not None and name not in weight_map:
                    continue
                if name in found:
                    raise CorruptFile(f"the tensor `{name}` lies in {found[name].name} and in {path.name}")
                found[name] = path
                self._tensors[name] = (file, kind, tuple(shape), offset, num_bytes)
        _check_index(found, weight_map)

    def names(self) -> list[str]:
        """All names, in file order."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def prefetch(self) -> None:
        """Ask for read-ahead of every file."""
        for file in self._files:
            file.prefetch()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape) of one tensor."""
        return self._entry(name)[1:3]

    def get(self, name: str) -> WeightPart:
        """One tensor where it is mapped."""
        file, kind, shape, offset, num_bytes = self._entry(name)
        data = file.view(offset, num_bytes)
        return WeightPart(kind, shape, data.ctypes.data, num_bytes, data)

    def _entry(self, name: str) -> tuple[MappedFile, str, tuple[int, ...], int, int]:
        entry = self._tensors.get(name)
        if entry is None:
            raise CorruptFile(f"{self._files[0].path.parent}: lacks the tensor `{name}`")
        return entry


class BinWeights(WeightSource):
    """Tensors of `torch.save` files, read with `weights_only` and mapped where the file allows."""

    def __init__(self, paths: list[Path], weight_map: dict[str, str] | None) -> None:
        """Read the files.

        Raises:
            CorruptFile: not files of plain tensors, one name twice, or an index that contradicts the files.
        """
        self._tensors: dict[str, torch.Tensor] = {}
        self._where = paths[0].parent
        found: dict[str, Path] = {}
        for path in paths:
            for name, tensor in _load_bin(path).items():
                if weight_map is not None and name not in weight_map:
                    continue
                if name in found:
                    raise CorruptFile(f"the tensor `{name}` lies in {found[name].name} and in {path.name}")
                found[name] = path
                self._tensors[name] = tensor
        _check_index(found, weight_map)

    def names(self) -> list[str]:
        """All names, in file order."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape) of one tensor."""
        tensor = self._entry(name)
        return _kind(tensor), tuple(tensor.shape)

    def get(self, name: str) -> WeightPart:
        """One tensor as torch holds it."""
        tensor = self._entry(name).contiguous()
        return WeightPart(
            _kind(tensor),
            tuple(tensor.shape),
            tensor.data_ptr(),
            tensor.numel() * tensor.element_size(),
            tensor,
        )

    def _entry(self, name: str) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CorruptFile(f"{self._where}: lacks the tensor `{name}`")
        return tensor


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    import zipfile

    import torch

    try:
        # Files older than torch 1.6 are no zip archives and cannot be mapped.
        value: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # torch raises many classes here, by what is wrong with the file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CorruptFile(f"{path}: not a file of plain tensors: {reason}") from error
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    ):
        raise CorruptFile(f"{path}: a mapping of names to tensors is expected")
    return value


def _kind(tensor: torch.Tensor) -> str:
    """A dtype under the name that safetensors gives it."""
    name = str(tensor.dtype).removeprefix("torch.")
    return next((kind for kind, known in TORCH_NAMES.items() if known == name), name.upper())
