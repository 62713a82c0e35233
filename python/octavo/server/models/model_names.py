"""The models of a server by name: ids, versions and aliases."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping

from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest, ModelNotServed
from octavo.server.models.aliases import Alias, check_name, quoted
from octavo.server.models.registry_entry import EntrySnapshot, ModelState, RegistryEntry

__all__ = ["ModelNames"]

_MAX_MODELS = 256


class ModelNames:
    """Models by name.

    A name is a model's id (`name@version` or `name`) or an alias. An alias leads to one model, or splits its requests
    among several by weight. It hides a model whose id is the same name without a version.

    Attributes:
        on_removal: called with each removed model when its last request is over.
    """

    def __init__(self) -> None:
        self._entries: dict[str, RegistryEntry] = {}
        # Removed, but still draining.
        self._removed: list[RegistryEntry] = []
        self._aliases: dict[str, Alias] = {}
        self._at_start: list[str] = []
        self._preferred: str | None = None
        # The highest version number of each name among removed models that have served.
        self._spent: dict[str, int] = {}
        self.on_removal: Callable[[RegistryEntry], None] | None = None

    # -------------------------------------------------------- lookup

    @property
    def entries(self) -> list[RegistryEntry]:
        """All models, in the order of their registration."""
        return list(self._entries.values())

    @property
    def aliases(self) -> dict[str, dict[str, float]]:
        """Weights by model id, by alias."""
        return {name: dict(alias.weights) for name, alias in self._aliases.items()}

    @property
    def default(self) -> str | None:
        """The name for requests without one: the first name ever registered, else the first that is left."""
        preferred = self._preferred
        if preferred in self._aliases or preferred in self._entries:
            return preferred
        return next(iter(self.names), None)

    @property
    def names(self) -> list[str]:
        """Names that a request may use: models that no alias hides, then aliases."""
        return [*(id for id in self._entries if id not in self._aliases), *self._aliases]

    @property
    def loaded(self) -> list[RegistryEntry]:
        """Models that have an engine."""
        return [entry for entry in (*self._entries.values(), *self._removed) if entry.engine is not None]

    def aliases_of(self, entry: RegistryEntry) -> list[str]:
        """The aliases that lead to a model, with any weight."""
        return [name for name, alias in self._aliases.items() if entry.id in alias.weights]

    def targets(self, name: str) -> list[RegistryEntry]:
        """The models that a name leads to.

        Raises:
            ModelNotServed: there is no such name.
        """
        alias = self._aliases.get(name)
        if alias is not None:
            return [self._entries[id] for id in alias.weights]
        if name not in self._entries:
            raise self._unknown(name)
        return [self._entries[name]]

    def find(self, name: str) -> RegistryEntry:
        """The one model that a name leads to. An id finds its model even if an alias hides it.

        Raises:
            ModelNotServed: there is no such name.
            InvalidRequest: an alias of several models.
        """
        if name in self._entries:
            return self._entries[name]
        targets = self.targets(name)
        if len(targets) > 1:
            raise InvalidRequest(
                f"model: `{name}` is an alias of several models; use one of {quoted([entry.id for entry in targets])}",
                "model",
            )
        return targets[0]

    # -------------------------------------------------------- changes

    def register(
        self,
        id: str,
        config: EngineConfig,
        *,
        keep_alive: float | None = None,
        pinned: bool = False,
        at_start: bool = False,
        tentative: bool = False,
        on_request: bool = True,
    ) -> RegistryEntry:
        """Register a model. `start`, `load`, `swap` or a request loads it.

        The first version of a name gets the name as its alias. A model that is not loaded may be registered again with
        other settings. The model path of `name@version` cannot change until it is removed, as responses carry the id.

        Args:
            id: `name@version` or `name`.
            config: of its engine.
            keep_alive: idle seconds after which it is unloaded; None for the server's setting, negative for never.
            pinned: never unload it to free memory.
            at_start: load it in `start`.
            tentative: undo the registration if its first load fails.
            on_request: a request may load it before it was loaded once.

        Raises:
            ConfigError: an invalid name, the name of an alias, too many models, or an id that is in use with other
                settings or another model path.
        """
        check_name(id, "model")
        entry = self._entries.get(id)
        if entry is None:
            self._check_new(id)
            entry = self._entries[id] = RegistryEntry(id, config, keep_alive=keep_alive, pinned=pinned)
            entry.loads_on_request = on_request
            entry.undo = functools.partial(self._take_back, entry, None) if tentative else None
            self._name(entry)
        elif entry.config != config:
            self._check_change(entry, config)
            entry.undo = functools.partial(self._take_back, entry, entry.snapshot()) if tentative else None
            entry.config, entry.info = config, None
        if keep_alive is not None:
            entry.keep_alive = keep_alive
        entry.pinned = pinned or entry.pinned
        if at_start and id not in self._at_start:
            self._at_start.append(id)
        return entry

    def _check_new(self, id: str) -> None:
        if id in self._aliases:
            raise ConfigError(
                f"model: `{id}` is an alias of {quoted(self._aliases[id].weights)} and would hide a model with that "
                f"id; add a version, for example `{self._next_version(id)}`"
            )
        if len(self._entries) >= _MAX_MODELS:
            raise ConfigError(f"model: the limit of {_MAX_MODELS} models is reached; remove one before you add `{id}`")

    def _check_change(self, entry: RegistryEntry, config: EngineConfig) -> None:
        id, another = entry.id, f"another version, for example `{self._next_version(entry.name)}`"
        if entry.served and entry.version and (entry.config is None or entry.config.model != config.model):
            raise ConfigError(f"model: `{id}` has served another model; give this one {another}, or remove that one")
        if entry.undo is not None or entry.claims:
            raise ConfigError(
                f"model: `{id}` is about to be loaded with other settings; wait for that, or give this one {another}"
            )
        if entry.state not in (ModelState.UNLOADED, ModelState.FAILED):
            raise ConfigError(
                f"model: `{id}` is {entry.state.value} with other settings; unload it, or give this one {another}"
            )

    def _take_back(self, entry: RegistryEntry, before: EntrySnapshot | None) -> None:
        """Undo the registration of a model whose first load failed."""
        if entry.removed:
            return
        if before is not None:
            entry.restore(before)
            return
        own = self._aliases.get(entry.name)
        if own is not None and entry.version and own.sole == entry.id and self.aliases_of(entry) == [entry.name]:
            del self._aliases[entry.name]
        # With another alias by now the model stays, so that its state shows the error.
        if not self.aliases_of(entry):
            self._forget(entry)

    def _forget(self, entry: RegistryEntry) -> None:
        """Remove a model from all lookups. It may still run for a while."""
        self._entries.pop(entry.id, None)
        entry.removed = True
        if entry.id in self._at_start:
            self._at_start.remove(entry.id)
        version = entry.version or ""
        if entry.served and version.isdecimal():
            self._spent[entry.name] = max(self._spent.get(entry.name, 0), int(version))
        self._removed.append(entry)
        if entry.engine is None and entry.loading is None:
            self._gone(entry)

    def _gone(self, entry: RegistryEntry) -> None:
        """A removed model has stopped running."""
        if entry not in self._removed:
            return
        self._removed.remove(entry)
        # Another model may have the same id by now.
        if self.on_removal is not None and entry.id not in self._entries:
            self.on_removal(entry)

    def _name(self, entry: RegistryEntry) -> None:
        if self._preferred is None:
            self._preferred = entry.name
        if entry.version and entry.name not in self._aliases and entry.name not in self._entries:
            self._aliases[entry.name] = Alias(entry.name, {entry.id: 1})

    def set_alias(self, name: str, weights: Mapping[str, float]) -> None:
        """Let a name lead to models, by weight. Running requests are not affected.

        Raises:
            ConfigError: an unknown model, or invalid weights.
        """
        self.set_aliases({**self._aliases, name: Alias(name, weights)})

    def set_aliases(self, aliases: Mapping[str, Alias]) -> None:
        """Replace all aliases at once.

        Raises:
            ConfigError: an unknown model, or the id of a version as a name; nothing is changed.
        """
        for alias in aliases.values():
            hidden = self._entries.get(alias.name)
            if hidden is not None and hidden.version:
                raise ConfigError(
                    f"aliases.{alias.name}: this is the id of a model version; choose another name for the alias"
                )
            for id in alias.weights:
                if id not in self._entries:
                    raise ConfigError(
                        f"aliases.{alias.name}: the model `{id[:80]}` does not exist"
                        f"{_did_you_mean(id, self._entries)}; the models are {quoted(self._entries)}"
                    )
        self._aliases = dict(aliases)

    def remove_alias(self, name: str) -> None:
        """Remove an alias.

        Raises:
            ModelNotServed: there is no such alias.
        """
        if name not in self._aliases:
            raise ModelNotServed(f"The alias `{name[:80]}` does not exist", "name")
        del self._aliases[name]

    # -------------------------------------------------------- requests

    def choose(
        self, name: str | None, key: Callable[[], str | None] | None = None, variant: str | None = None
    ) -> tuple[RegistryEntry, str]:
        """The model that answers a request, and the name that its response carries.

        For an alias of several models, the weights and the key choose one. If it cannot answer, the next one that can
        takes its place.

        Args:
            name: from the request; None for `default`.
            key: returns the key that keeps a user or session on one model. It is called only if it matters.
            variant: id of one of the alias's models.

        Raises:
            ModelNotServed: there is no such name.
            InvalidRequest: the variant does not belong to the name.
        """
        asked = self.default if name is None else name
        alias = self._aliases.get(asked) if asked is not None else None
        if alias is None:
            entry = self._entries.get(asked) if asked is not None else None
            if entry is None or asked is None:
                raise self._unknown(asked)
            if variant is not None and variant != entry.id:
                raise _no_variant(asked, variant, (entry.id,))
            return entry, asked
        if variant is not None:
            if variant not in alias.weights:
                raise _no_variant(alias.name, variant, alias.weights)
            return self._entries[variant], alias.name
        if alias.sole is not None:
            return self._entries[alias.sole], alias.name
        order = [self._entries[id] for id in alias.order(key() if key is not None else None)]
        for able in (RegistryEntry.healthy, self._may_load):
            for entry in order:
                if able(entry):
                    return entry, alias.name
        return order[0], alias.name

    def _may_load(self, entry: RegistryEntry) -> bool:
        """Whether a request may load the model."""
        return False

    def _unknown(self, name: str | None) -> ModelNotServed:
        if name is None:
            return ModelNotServed("model: this server has no model; start it with `octavo serve MODEL`", "model")
        return ModelNotServed(
            f"The model `{name[:200]}` does not exist{_did_you_mean(name, self.names)}; this server has "
            f"{quoted(self.names)}",
            "model",
        )

    def _weights(self, name: str) -> dict[str, float]:
        alias = self._aliases.get(name)
        if alias is not None:
            return dict(alias.weights)
        if name not in self._entries:
            raise self._unknown(name)
        return {name: 1.0}

    def _next_version(self, name: str) -> str:
        number = max(self._spent.get(name, 1), 1) + 1
        while f"{name}@{number}" in self._entries:
            number += 1
        return f"{name}@{number}"


def _did_you_mean(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name[:200], known, 1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _no_variant(name: str, variant: str, known: Collection[str]) -> InvalidRequest:
    return InvalidRequest(f"X-Variant: `{name}` has no variant `{variant[:80]}`; it has {quoted(known)}", "X-Variant")
