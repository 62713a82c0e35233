"""Names that stand for models, and names that divide their requests among several by weight."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Iterable, Mapping

from octavo.errors import ConfigError

__all__ = ["Alias", "check_name", "parse_aliases"]

_MAX_NAME = 512
_MAX_TARGETS = 64
_MAX_WEIGHT = sys.float_info.max


def check_name(name: str, field: str) -> str:
    """The name, if it can be one: it goes into headers, logs and addresses.

    Raises:
        ConfigError: naming `field`.
    """
    if not name.strip() or len(name) > _MAX_NAME or not name.isprintable():
        raise ConfigError(f"{field}: {name[:80]!r} is no name for a model; give 1 to {_MAX_NAME} printable characters")
    return name


class Alias:
    """A name and the models it stands for.

    Args:
        name: as requests give it.
        weights: by model id; shares of all of them. A model of weight 0 answers only those who ask for it by header.

    Raises:
        ConfigError: no model, a weight that is none, or all weights 0.
    """

    __slots__ = ("name", "weights")

    def __init__(self, name: str, weights: Mapping[str, float]) -> None:
        check_name(name, "aliases")
        if not weights or len(weights) > _MAX_TARGETS:
            raise ConfigError(f"aliases.{name}: {len(weights)} models; name 1 to {_MAX_TARGETS}")
        for target, weight in weights.items():
            # JSON's and TOML's whole numbers have no end.
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _MAX_WEIGHT:
                raise ConfigError(f"aliases.{name}: {target!r} has the weight {weight!r:.40}; give a number from 0 up")
        if not any(weights.values()):
            raise ConfigError(f"aliases.{name}: all weights are 0; give one model more")
        self.name = name
        self.weights = dict(weights)

    @property
    def sole(self) -> str | None:
        """The one model it stands for; None where there are several."""
        return next(iter(self.weights)) if len(self.weights) == 1 else None

    def order(self, key: str | None) -> Iterable[str]:
        """The models a request may go to, the one meant for it first.

        Weighted rendezvous hashing: each model draws from a hash of (name, model, key), so that one key always gets
        the same order, and a change of weights moves no more keys than the weights ask for.

        Args:
            key: of the user or session; None draws afresh.
        """
        sole = self.sole
        if sole is not None:
            return (sole,)
        scores = []
        for target, weight in self.weights.items():
            if weight:
                draw = random.random() if key is None else _draw(self.name, target, key)  # noqa: S311
                scores.append((-math.log(draw or 2.0**-64) / weight, target))
        scores.sort()
        return [target for _, target in scores]


def _draw(alias: str, target: str, key: str) -> float:
    digest = hashlib.blake2b(f"{alias}\0{target}\0{key}".encode("utf-8", "replace"), digest_size=8).digest()
    # The odd half keeps the draw between 0 and 1, never either.
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) * 2.0**-52


def parse_aliases(given: Mapping[str, object]) -> dict[str, Alias]:
    """Aliases as files and requests write them: `{"name": "model"}` or `{"name": {"model": weight, ...}}`.

    Raises:
        ConfigError: naming the alias at fault.
    """
    aliases = {}
    for name, target in given.items():
        if isinstance(target, str):
            target = {target: 1}
        if not isinstance(target, Mapping):
            raise ConfigError(f"aliases.{name}: {target!r} is neither a model nor a table of models and weights")
        aliases[name] = Alias(name, target)
    return aliases
