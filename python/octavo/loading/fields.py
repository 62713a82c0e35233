"""Typed, bounded reads of a model description's values: messages name file, key and value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from octavo.errors import CorruptFile

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_HEADS",
    "MAX_LAYERS",
    "MAX_POSITIONS",
    "MAX_VOCABULARY",
    "MAX_WIDTH",
    "Reader",
    "check_groups",
    "check_scaling",
    "head_dim",
    "sampling_defaults",
    "token_ids",
]

MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 14
MAX_WIDTH = 1 << 24
MAX_VOCABULARY = 1 << 26
MAX_POSITIONS = (1 << 31) - 1
"""Bounds far above any real model, low enough that products of two of them fit in 64 bits."""

_MAX_HEAD_DIM = 1 << 12
_NUMBERS_OF = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": (),
}
_LISTS_OF = {"longrope": ("short_factor", "long_factor")}


class Reader:
    """Reads checked values out of one mapping. A null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def size(self, key: str, limit: int, *, default: int | None = None) -> int:
        """A positive whole number of at most `limit`.

        Raises:
            CorruptFile: missing without a default, not whole, not positive, or past the limit.
        """
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise CorruptFile(f"{self.where}: `{key}` is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise CorruptFile(f"{self.where}: `{key}` is {value!r}; a whole number is expected")
        if not 1 <= value <= limit:
            raise CorruptFile(f"{self.where}: `{key}` is {value}; it must lie between 1 and {limit}")
        return value

    def optional_size(self, key: str, limit: int) -> int | None:
        """A size, or None if the field is missing."""
        return None if self.values.get(key) is None else self.size(key, limit)

    def number(self, key: str, low: float, high: float, *, default: float) -> float:
        """A finite number above `low` and at most `high`."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CorruptFile(f"{self.where}: `{key}` is {value!r}; a number is expected")
        if not (math.isfinite(value) and low < value <= high):
            raise CorruptFile(f"{self.where}: `{key}` is {value}; it must be above {low:g} and at most {high:g}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CorruptFile(f"{self.where}: `{key}` is {value!r}; true or false is expected")
        return value

    def text(self, key: str, *, default: str) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise CorruptFile(f"{self.where}: `{key}` is {value!r}; a string is expected")
        return value


def head_dim(read: Reader, key: str, hidden_size: int, num_heads: int) -> int:
    """Elements of one head: the key's value, or hidden size by heads where it divides."""
    given = read.optional_size(key, _MAX_HEAD_DIM)
    if given is not None:
        return given
    if hidden_size % num_heads or hidden_size // num_heads > _MAX_HEAD_DIM:
        raise CorruptFile(
            f"{read.where}: the hidden size {hidden_size} cannot be divided among {num_heads} heads, "
            f"and `{key}` is missing"
        )
    return hidden_size // num_heads


def check_groups(num_heads: int, num_kv_heads: int, where: str) -> None:
    """Refuse query heads that do not fall evenly on the key and value heads."""
    if num_heads % num_kv_heads:
        raise CorruptFile(f"{where}: {num_heads} query heads cannot share {num_kv_heads} key and value heads evenly")


def check_scaling(kind: str, parameters: Mapping[str, Any], dim: int, where: str) -> None:
    """Check the values a rotary scaling computes with; kinds not known here are the models' business."""
    read = Reader(parameters, where)
    for key in _NUMBERS_OF.get(kind, ()):
        if math.isnan(read.number(key, 0.0, 1e30, default=math.nan)):
            raise CorruptFile(f"{where}: `{key}` is missing from the rotary scaling `{kind}`")
    for key in _LISTS_OF.get(kind, ()):
        values = parameters.get(key)
        if not isinstance(values, list) or len(values) != dim // 2:
            raise CorruptFile(f"{where}: `{key}` of the rotary scaling `{kind}` must be a list of {dim // 2} numbers")
        for value in values:
            Reader({key: value}, where).number(key, 0.0, 1e30, default=1.0)


def token_ids(values: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Token ids given as one number or a list; empty where missing. Negative ones, for "none", are left out."""
    value = values.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for entry in ids:
        if isinstance(entry, bool) or not isinstance(entry, int) or entry > MAX_VOCABULARY:
            raise CorruptFile(f"{where}: `{key}` is {value!r}; a token id or a list of them is expected")
    return tuple(dict.fromkeys(entry for entry in ids if entry >= 0))


def sampling_defaults(values: Mapping[str, Any], where: str) -> dict[str, float]:
    """The sampling values that are given, as numbers.

    Raises:
        CorruptFile: a value that is no finite number.
    """
    found: dict[str, float] = {}
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CorruptFile(f"{where}: `{key}` is {value!r}; a number is expected")
        found[key] = value
    return found
