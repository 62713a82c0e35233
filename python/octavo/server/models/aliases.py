"""Aliases: names that lead to a model, or split their requests among several models by weight."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Collection, Iterable, Mapping

from octavo.errors import ConfigError, InvalidRequest

__all__ = ["Alias", "check_name", "parse_aliases", "quoted", "replaced_weights"]

_MAX_NAME = 512
_MAX_TARGETS = 64
_MAX_WEIGHT = sys.float_info.max


def check_name(name: str, field: str) -> str:
    """Check a name, which appears in headers, logs and URLs.

    Raises:
        ConfigError: naming `field`.
    """
    if not name.strip() or len(name) > _MAX_NAME or not name.isprintable():
        raise ConfigError(f"{field}: {name[:80]!r} is not a model name; use 1 to {_MAX_NAME} printable characters")
    return name


class Alias:
    """A name and the models that it leads to.

    Args:
        name: as requests use it.
        weights: by model id, relative to each other. A model of weight 0 answers requests that select it by
            header only.

    Raises:
        ConfigError: no model, an invalid weight, or all weights 0.
    """

    __slots__ = ("name", "weights")

    def __init__(self, name: str, weights: Mapping[str, float]) -> None:
        check_name(name, "aliases")
        if not weights or len(weights) > _MAX_TARGETS:
            raise ConfigError(f"aliases.{name}: {len(weights)} models are not possible; use 1 to {_MAX_TARGETS}")
        for target, weight in weights.items():
            # Integers of JSON and TOML are unbounded.
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _MAX_WEIGHT:
                raise ConfigError(f"aliases.{name}: {target!r} has the weight {weight!r:.40}; use 0 or more")
        if not any(weights.values()):
            raise ConfigError(f"aliases.{name}: all weights are 0; give at least one model a weight")
        self.name = name
        self.weights = dict(weights)

    @property
    def sole(self) -> str | None:
        """The only model that it leads to; None if there are several."""
        return next(iter(self.weights)) if len(self.weights) == 1 else None

    def order(self, key: str | None) -> Iterable[str]:
        """The models that may answer a request, the preferred one first.

        This is weighted rendezvous hashing: the score of each model is a hash of (name, model, key). A key always gets
        the same order, and a change of weights moves as few keys as possible.

        Args:
            key: of the user or session; None for a random order.
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
    # Adding one half keeps the value above 0 and below 1.
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) * 2.0**-52


def parse_aliases(given: Mapping[str, object]) -> dict[str, Alias]:
    """Parse aliases from a file or a request: `{"name": "model"}` or `{"name": {"model": weight, ...}}`.

    Raises:
        ConfigError: naming the alias.
    """
    aliases = {}
    for name, target in given.items():
        if isinstance(target, str):
            target = {target: 1}
        if not isinstance(target, Mapping):
            raise ConfigError(f"aliases.{name}: {target!r} is neither a model nor a table of models and weights")
        aliases[name] = Alias(name, target)
    return aliases


def replaced_weights(name: str, weights: dict[str, float], to: str, replace: str | None) -> dict[str, float]:
    """The weights of a name after `to` replaces all of its models, or the one model `replace`.

    Raises:
        InvalidRequest: `replace` is not one of them.
    """
    if replace is None:
        return {to: 1.0}
    if replace not in weights:
        raise InvalidRequest(f"replace: `{name}` has no model `{replace[:80]}`; it has {quoted(weights)}", "replace")
    after: dict[str, float] = {}
    for id, weight in weights.items():
        new = to if id == replace else id
        after[new] = after.get(new, 0.0) + weight
    return after


def quoted(names: Collection[str]) -> str:
    """Names for a message, at most 20 of them."""
    shown = [f"`{name}`" for name in list(names)[:20]]
    return ", ".join(shown) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
