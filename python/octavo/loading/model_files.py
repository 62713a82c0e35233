"""A model's files of any format: its configuration and its weights. Formats are told apart here alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.errors import ModelNotFound
from octavo.loading.checkpoint import open_folder
from octavo.loading.gguf import GgufWeights
from octavo.loading.gguf_config import gguf_model_config
from octavo.loading.model_config import ModelConfig, config_from_json, read_json
from octavo.loading.resolve import ModelSource
from octavo.loading.weights import RenamedWeights, TensorName, WeightSource

__all__ = ["load_model_config", "open_weights"]


def load_model_config(source: ModelSource) -> ModelConfig:
    """Read and check a model's configuration. Imports no torch.

    Raises:
        ModelNotFound: the folder has no config.json.
        CorruptFile: not JSON, or an impossible value.
        UnsupportedModel: quantized checkpoints, unknown GGUF architectures, features that Octavo lacks.
    """
    if source.kind == "gguf":
        return gguf_model_config(source.path)
    path, generation_path = source.path / "config.json", source.path / "generation_config.json"
    raw = read_json(path)
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return config_from_json(raw, generation, str(path))


def open_weights(
    source: ModelSource, tensors: Iterable[TensorName] = (), prefixes: Mapping[str, str] | None = None
) -> WeightSource:
    """Open a model's tensors. Their headers are read; the system is asked to read the rest ahead.

    Args:
        source: the files.
        tensors: what the model calls its tensors; GGUF files need it to be read under Hugging Face's names.
        prefixes: of names in the model's folder that stand for others, see `RenamedWeights`.

    Raises:
        ModelNotFound: the folder holds no weights.
        CorruptFile: truncated or contradictory files, or missing shards.
        UnsupportedModel: formats and tensor types that Octavo does not know.
    """
    weights = _open(source, tensors)
    if prefixes and source.kind != "gguf":
        weights = RenamedWeights(weights, prefixes)
    weights.prefetch()
    return weights


def _open(source: ModelSource, tensors: Iterable[TensorName]) -> WeightSource:
    if source.kind == "gguf":
        return GgufWeights(source.path, tensors)
    if source.kind == "config-only":
        raise ModelNotFound(
            f"{source.path}: holds a config.json and no weights (*.safetensors, *.bin); "
            "load_format `dummy` runs it with random ones"
        )
    return open_folder(source.path)
