"""Tables of cosines and sines for every rotary kind; in float32, step by step as the models were trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from octavo.layers.parameter import Parameter, to_float32

if TYPE_CHECKING:
    from octavo.layers.backend import Backend, Buffer, Memory
    from octavo.layers.parameter import Weights

__all__ = ["Rope", "RotaryKind", "RotarySpec", "cos_sin_table", "inverse_frequencies"]

RotaryKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors"]

_DIVISORS = "rope_freqs.weight"

FloatArray = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding of queries and keys.

    Attributes:
        dim: channels of a head that are turned; the rest pass through.
        theta: base of the wavelengths.
        kind: how the wavelengths are stretched beyond the context the model was trained on; `factors`: each frequency
            is divided by what the tensor `rope_freqs.weight` holds.
        factor: the stretch.
        max_position: positions the model claims to know.
        original_max_position: positions it was trained on before the stretch.
        low_freq_factor, high_freq_factor: the band between kept and stretched wavelengths (llama3).
        beta_fast, beta_slow, truncate: the band in turns over the original context (yarn).
        attention_factor: cosines and sines are multiplied by it; None for the kind's own formula.
        mscale, mscale_all_dim: alternatives to `attention_factor` that some yarn models carry.
        attention_multiplier: cosines and sines are multiplied by it as well (yarn, as GGUF files give it).
        extrapolation: share of yarn's band; 0 stretches all wavelengths alike and leaves yarn's temperature out.
        short_factors, long_factors: a divisor a frequency, within and beyond the original context (longrope).
    """

    dim: int
    theta: float = 10000.0
    kind: RotaryKind = "default"
    factor: float = 1.0
    max_position: int = 0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_multiplier: float = 1.0
    extrapolation: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def position_limit(self) -> int:
        """Tokens of one sequence that these positions allow."""
        if self.kind == "dynamic":
            return int(self.max_position * self.factor)
        if self.kind == "yarn":
            return max(self.max_position, int(self.original_max_position * self.factor))
        return self.max_position

    @property
    def stretched_limit(self) -> int:
        """The highest `max_model_len`: linear scaling may or may not be included in `position_limit`."""
        return int(self.max_position * self.factor) if self.kind == "linear" else self.position_limit


class Rope:
    """One rotary table; layers that rotate alike share it.

    Args:
        spec: the kind and its numbers.

    Attributes:
        table: float32 [positions, dim] on the device, cosines then sines.
    """

    def __init__(self, spec: RotarySpec) -> None:
        self.spec = spec
        self.table: Buffer
        self._memory: Memory

    def parameters(self) -> Iterator[Parameter]:
        """The divisors of the kind `factors`."""
        if self.spec.kind == "factors":
            yield Parameter(_DIVISORS, _DIVISORS, (self.spec.dim // 2,))

    def num_bytes(self, num_positions: int) -> int:
        """Bytes of the table."""
        return num_positions * self.spec.dim * 4

    def load(self, weights: Weights, backend: Backend, num_positions: int) -> None:
        """Compute the table for sequences of up to `num_positions` tokens."""
        divisors = to_float32(weights.get(_DIVISORS)) if self.spec.kind == "factors" else None
        self._memory = backend.to_device(cos_sin_table(self.spec, num_positions, divisors))
        self.table = backend.buffer(self._memory)


def cos_sin_table(rotary: RotarySpec, num_positions: int, divisors: FloatArray | None = None) -> FloatArray:
    """Cosines, then sines, of every position.

    Args:
        rotary: the kind and its numbers.
        num_positions: the longest sequence served. The kinds that depend on a sequence's length (dynamic, longrope)
            go by this one, so that keys in the cache never change.
        divisors: float32 [rotary.dim / 2] of the kind `factors`.

    Returns:
        float32 [num_positions, rotary.dim].
    """
    frequencies, scale = inverse_frequencies(rotary, num_positions)
    if divisors is not None:
        frequencies = frequencies / divisors
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies)
    table = np.empty((num_positions, rotary.dim), dtype=np.float32)
    np.cos(angles, out=table[:, : rotary.dim // 2])
    np.sin(angles, out=table[:, rotary.dim // 2 :])
    if scale != 1.0:
        table *= np.float32(scale)
    return table


def inverse_frequencies(rotary: RotarySpec, num_positions: int) -> tuple[FloatArray, float]:
    """Radians a position of each pair of channels, float32 [dim / 2], and the factor of cosines and sines."""
    theta, scale = rotary.theta, 1.0
    exponents = np.arange(0, rotary.dim, 2, dtype=np.float32) / np.float32(rotary.dim)
    if rotary.kind == "dynamic":
        length = max(num_positions, rotary.max_position)
        stretch = rotary.factor * length / rotary.max_position - (rotary.factor - 1)
        theta *= stretch ** (rotary.dim / (rotary.dim - 2))
    wavelengths = np.power(np.float32(theta), exponents)
    frequencies = np.float32(1.0) / wavelengths
    if rotary.kind == "linear":
        frequencies = frequencies / np.float32(rotary.factor)
    elif rotary.kind == "llama3":
        frequencies = _llama3(rotary, frequencies)
    elif rotary.kind == "yarn":
        frequencies = _yarn(rotary, wavelengths, frequencies)
        scale = _yarn_scale(rotary)
    elif rotary.kind == "longrope":
        is_long = num_positions > rotary.original_max_position
        factors = np.array(rotary.long_factors if is_long else rotary.short_factors, dtype=np.float32)
        frequencies = np.float32(1.0) / (factors * wavelengths)
        scale = _longrope_scale(rotary)
    return frequencies, scale


def _llama3(rotary: RotarySpec, frequencies: FloatArray) -> FloatArray:
    """Short wavelengths stay, long ones stretch by the factor, those between are blended."""
    original, factor = rotary.original_max_position, rotary.factor
    low, high = rotary.low_freq_factor, rotary.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = np.where(wavelengths > original / low, frequencies / factor, frequencies)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return np.where(between, blended, stretched)


def _yarn(rotary: RotarySpec, wavelengths: FloatArray, frequencies: FloatArray) -> FloatArray:
    """Channels that turn often over the original context stay, those that turn seldom stretch."""

    def channel(turns: float) -> float:
        return (
            rotary.dim * math.log(rotary.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))
        )

    low, high = channel(rotary.beta_fast), channel(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    if low == high:
        high += 0.001
    channels = np.arange(rotary.dim // 2, dtype=np.float32)
    kept = 1 - np.clip((channels - np.float32(low)) / np.float32(high - low), 0, 1)
    kept *= np.float32(rotary.extrapolation)
    stretched: FloatArray = 1 / (np.float32(rotary.factor) * wavelengths)
    blended: FloatArray = stretched * (1 - kept) + frequencies * kept
    return blended


def _yarn_scale(rotary: RotarySpec) -> float:
    """The attention temperature of yarn, as a factor of cosines and sines."""

    def scale(weight: float) -> float:
        return 1.0 if rotary.factor <= 1 else 0.1 * weight * math.log(rotary.factor) + 1.0

    if rotary.extrapolation == 0:
        return rotary.attention_multiplier
    if rotary.attention_factor is not None:
        return rotary.attention_factor * rotary.attention_multiplier
    if rotary.mscale and rotary.mscale_all_dim:
        return scale(rotary.mscale) / scale(rotary.mscale_all_dim) * rotary.attention_multiplier
    return scale(1.0) * rotary.attention_multiplier


def _longrope_scale(rotary: RotarySpec) -> float:
    """The attention temperature of longrope, as a factor of cosines and sines."""
    if rotary.attention_factor is not None:
        return rotary.attention_factor
    if rotary.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rotary.factor) / math.log(rotary.original_max_position))
