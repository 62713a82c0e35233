"""Tables of cosines and sines for every rotary kind; in float32, step by step as the models were trained."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from octavo.layers.spec import RotarySpec

__all__ = ["cos_sin_table", "inverse_frequencies"]

FloatArray = npt.NDArray[np.float32]


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
    stretched: FloatArray = 1 / (np.float32(rotary.factor) * wavelengths)
    blended: FloatArray = stretched * (1 - kept) + frequencies * kept
    return blended


def _yarn_scale(rotary: RotarySpec) -> float:
    """The attention temperature of yarn, as a factor of cosines and sines."""

    def scale(weight: float) -> float:
        return 1.0 if rotary.factor <= 1 else 0.1 * weight * math.log(rotary.factor) + 1.0

    if rotary.attention_factor is not None:
        return rotary.attention_factor
    if rotary.mscale and rotary.mscale_all_dim:
        return scale(rotary.mscale) / scale(rotary.mscale_all_dim)
    return scale(1.0)


def _longrope_scale(rotary: RotarySpec) -> float:
    """The attention temperature of longrope, as a factor of cosines and sines."""
    if rotary.attention_factor is not None:
        return rotary.attention_factor
    if rotary.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rotary.factor) / math.log(rotary.original_max_position))
