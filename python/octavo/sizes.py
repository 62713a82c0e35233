"""Sizes as people write them."""

from __future__ import annotations

from octavo.errors import ConfigError

__all__ = ["parse_bytes"]

_UNITS = {"": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}i": 1024**_power}


def parse_bytes(text: str, field: str) -> int:
    """Bytes from `1073741824`, `512MiB` or `2GB`.

    Raises:
        ConfigError: naming `field`.
    """
    number = text.strip().lower().removesuffix("b")
    unit = number.lstrip("0123456789.")
    try:
        return round(float(number.removesuffix(unit) if unit else number) * _UNITS[unit.strip()])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{field}: {text!r} is no size; give bytes, or such as 512MiB or 2GB") from None
