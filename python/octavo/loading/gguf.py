"""Tensors of a GGUF file under Hugging Face's names, with the converter's transforms undone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo import _core
from octavo.errors import CorruptFile
from octavo.loading.gguf_config import refuse_split
from octavo.loading.mapping import MappedFile
from octavo.loading.weights import WeightPart, WeightSource

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["GgufWeights", "hugging_face_name"]

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")

# Files of these architectures hold the rows of q and k in the order of interleaved rotary pairs.
_PERMUTED_ARCHITECTURES = frozenset({"llama"})


def hugging_face_name(name: str) -> str:
    """GGUF's tensor name as Hugging Face's; names without a counterpart (`rope_freqs.weight`) stay."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is not None:
        layer, leaf, suffix = match.groups()
        return f"model.layers.{int(layer)}.{_LAYER_NAMES[leaf]}.{suffix}" if leaf in _LAYER_NAMES else name
    stem, _, suffix = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{suffix}" if stem in _TOP_NAMES else name


class GgufWeights(WeightSource):
    """The tensors of one GGUF file; rows of q and k are put back in order on the raw blocks."""

    def __init__(self, path: Path) -> None:
        """Check the header and map the file.

        Raises:
            CorruptFile, UnsupportedModel: as `_core.read_gguf`, and two tensors of one name.
        """
        metadata, tensors = _core.read_gguf(str(path))
        refuse_split(metadata, path)
        architecture = metadata.get("general.architecture")
        self._permuted: dict[str, int] = {}
        if architecture in _PERMUTED_ARCHITECTURES:
            heads = metadata.get(f"{architecture}.attention.head_count")
            kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
            self._permuted = {"q_proj": _heads(heads, path), "k_proj": _heads(kv_heads, path)}
        self._file = MappedFile(path)
        self._tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, kind, shape, offset, num_bytes in tensors:
            known = hugging_face_name(name)
            if known in self._tensors:
                raise CorruptFile(f"{path}: holds the tensor `{name}` twice")
            self._tensors[known] = (kind, tuple(shape), offset, num_bytes)

    def names(self) -> list[str]:
        """All names, in file order."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def prefetch(self) -> None:
        """Ask for read-ahead of the file."""
        self._file.prefetch()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape) of one tensor."""
        return self._entry(name)[:2]

    def get(self, name: str) -> WeightPart:
        """One tensor where it is mapped; q and k as a copy with the rows in order."""
        kind, shape, offset, num_bytes = self._entry(name)
        data = self._file.view(offset, num_bytes)
        projection = name.rsplit(".", 2)[-2] if name.count(".") >= 2 else ""
        heads = self._permuted.get(projection)
        if heads is not None and name.startswith("model.layers."):
            data = self._unpermute(name, data, shape[0], heads)
        return WeightPart(kind, shape, data.ctypes.data, num_bytes, data)

    def _entry(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        entry = self._tensors.get(name)
        if entry is None:
            raise CorruptFile(f"{self._file.path}: lacks the tensor `{name}`")
        return entry

    def _unpermute(self, name: str, data: NDArray[np.uint8], rows: int, heads: int) -> NDArray[np.uint8]:
        """Rows (head, pair, half) back to (head, half, pair): whole rows of bytes move, blocks stay whole."""
        if rows % (2 * heads) or data.size % rows:
            raise CorruptFile(f"{self._file.path}: `{name}` has {rows} rows, which {heads} heads cannot share")
        paired = data.reshape(heads, rows // heads // 2, 2, data.size // rows)
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(-1)


def _heads(value: Any, path: Path) -> int:
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 20:
        raise CorruptFile(f"{path}: the number of attention heads is {value!r}; a positive number is expected")
    return value
