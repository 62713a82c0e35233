"""Which models there are, and under which names."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping

from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest, ModelNotServed
from octavo.server.models.aliases import Alias, check_name
from octavo.server.models.entry import EntrySettings, ModelEntry, ModelState

__all__ = ["Catalog", "quoted"]

_MAX_MODELS = 256


class Catalog:
    """Models by name.

    A name is a model's id (`name@version` or `name`) or an alias, which stands for one model or divides its requests
    among several by weight; an alias hides a model of the same id, which then has no version.

    Attributes:
        on_removal: told of each model that is known no more, when its last request is over.
    """

    def __init__(self) -> None:
        self._entries: dict[str, ModelEntry] = {}
        # Known to nobody any more, but not down yet.
        self._removed: list[ModelEntry] = []
        self._aliases: dict[str, Alias] = {}
        self._at_start: list[str] = []
        self._preferred: str | None = None
        # The highest number that a version of a name had which has served and is gone.
        self._spent: dict[str, int] = {}
        self.on_removal: Callable[[ModelEntry], None] | None = None

    # -------------------------------------------------------- what there is

    @property
    def entries(self) -> list[ModelEntry]:
        """All models, in the order they came."""
        return list(self._entries.values())

    @property
    def aliases(self) -> dict[str, dict[str, float]]:
        """Weights by model id, by alias."""
        return {name: dict(alias.weights) for name, alias in self._aliases.items()}

    @property
    def default(self) -> str | None:
        """The name that stands in where a request names none: the first that there was, else the first there is."""
        preferred = self._preferred
        if preferred in self._aliases or preferred in self._entries:
            return preferred
        return next(iter(self.names), None)

    @property
    def names(self) -> list[str]:
        """What a request may name: models that no alias hides, then aliases."""
        return [*(id for id in self._entries if id not in self._aliases), *self._aliases]

    @property
    def loaded(self) -> list[ModelEntry]:
        """Models that have an engine."""
        return [entry for entry in (*self._entries.values(), *self._removed) if entry.engine is not None]

    def aliases_of(self, entry: ModelEntry) -> list[str]:
        """The aliases that lead to a model, whatever the weight."""
        return [name for name, alias in self._aliases.items() if entry.id in alias.weights]

    def targets(self, name: str) -> list[ModelEntry]:
        """The models a name stands for.

        Raises:
            ModelNotServed: none.
        """
        alias = self._aliases.get(name)
        if alias is not None:
            return [self._entries[id] for id in alias.weights]
        if name not in self._entries:
            raise self._unknown(name)
        return [self._entries[name]]

    def find(self, name: str) -> ModelEntry:
        """The one model a name stands for; an id finds its model though an alias hides it.

        Raises:
            ModelNotServed: none.
            InvalidRequest: an alias for several.
        """
        if name in self._entries:
            return self._entries[name]
        targets = self.targets(name)
        if len(targets) > 1:
            raise InvalidRequest(
                f"model: `{name}` stands for several models; name one of {quoted([entry.id for entry in targets])}",
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
    ) -> ModelEntry:
        """Make a model known; it is loaded by `start`, `load`, `swap` or a request.

        The first version of a name gets the name as its alias. A model that is not loaded may be registered again, with
        other settings; but what `name@version` was loaded from stays until it is removed, for answers carry it.

        Args:
            id: `name@version` or `name`.
            config: of its engine.
            keep_alive: idle seconds after which it is unloaded; None: the server's setting, negative: never.
            pinned: never unload it to make room.
            at_start: load it in `start`.
            tentative: if its first load fails it is as if it had never been registered.
            on_request: a request may have it loaded before it was loaded once.

        Raises:
            ConfigError: no name, an alias, too many models, or one of this id that is loaded with other settings or is
                about to be, or was another model.
        """
        check_name(id, "model")
        entry = self._entries.get(id)
        if entry is None:
            if id in self._aliases:
                raise ConfigError(
                    f"model: `{id}` is an alias of {quoted(self._aliases[id].weights)}, which would hide a model of "
                    f"that id; give it a version, such as `{self._next_version(id)}`"
                )
            if len(self._entries) >= _MAX_MODELS:
                raise ConfigError(f"model: {_MAX_MODELS} models are known; remove one before adding `{id}`")
            entry = self._entries[id] = ModelEntry(id, config, keep_alive=keep_alive, pinned=pinned)
            entry.loads_on_request = on_request
            entry.undo = functools.partial(self._take_back, entry, None) if tentative else None
            self._name(entry)
        elif entry.config != config:
            if entry.served and entry.version and (entry.config is None or entry.config.model != config.model):
                raise ConfigError(
                    f"model: `{id}` has answered from another model; give this one a version of its own, such as "
                    f"`{self._next_version(entry.name)}`, or remove that one first"
                )
            if entry.undo is not None or entry.claims:
                raise ConfigError(
                    f"model: `{id}` is about to be loaded with other settings; wait for that, or give this one another "
                    f"version, such as `{self._next_version(entry.name)}`"
                )
            if entry.state not in (ModelState.UNLOADED, ModelState.FAILED):
                raise ConfigError(
                    f"model: `{id}` is {entry.state.value} with other settings; unload it, or give this one another "
                    f"version, such as `{self._next_version(entry.name)}`"
                )
            entry.undo = functools.partial(self._take_back, entry, entry.settings()) if tentative else None
            entry.config, entry.info = config, None
        if keep_alive is not None:
            entry.keep_alive = keep_alive
        entry.pinned = pinned or entry.pinned
        if at_start and id not in self._at_start:
            self._at_start.append(id)
        return entry

    def _take_back(self, entry: ModelEntry, before: EntrySettings | None) -> None:
        """A model whose first load failed is known no more, or again as it was before it was given with that load."""
        if entry.removed:
            return
        if before is not None:
            entry.restore(before)
            return
        own = self._aliases.get(entry.name)
        if own is not None and entry.version and own.sole == entry.id and self.aliases_of(entry) == [entry.name]:
            del self._aliases[entry.name]
        # Where somebody has given it a name meanwhile it stays, and what is wrong with it can be seen.
        if not self.aliases_of(entry):
            self._forget(entry)

    def _forget(self, entry: ModelEntry) -> None:
        """From now on no request, alias or swap finds the model, though it may run a while yet."""
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

    def _gone(self, entry: ModelEntry) -> None:
        """Nothing of a removed model runs any more."""
        if entry not in self._removed:
            return
        self._removed.remove(entry)
        # Another of the same id may be known by now.
        if self.on_removal is not None and entry.id not in self._entries:
            self.on_removal(entry)

    def _name(self, entry: ModelEntry) -> None:
        if self._preferred is None:
            self._preferred = entry.name
        if entry.version and entry.name not in self._aliases and entry.name not in self._entries:
            self._aliases[entry.name] = Alias(entry.name, {entry.id: 1})

    def set_alias(self, name: str, weights: Mapping[str, float]) -> None:
        """Let a name stand for models, by weight; requests that run are not touched.

        Raises:
            ConfigError: a model that is not known, or weights that are none.
        """
        self.set_aliases({**self._aliases, name: Alias(name, weights)})

    def set_aliases(self, aliases: Mapping[str, Alias]) -> None:
        """Replace all aliases at once.

        Raises:
            ConfigError: a model that is not known, or the name of a version; nothing is changed.
        """
        for alias in aliases.values():
            hidden = self._entries.get(alias.name)
            if hidden is not None and hidden.version:
                raise ConfigError(
                    f"aliases.{alias.name}: is the id of one version of a model and stays so; name the alias otherwise"
                )
            for id in alias.weights:
                if id not in self._entries:
                    raise ConfigError(
                        f"aliases.{alias.name}: there is no model `{id[:80]}`{_did_you_mean(id, self._entries)}; "
                        f"there are {quoted(self._entries)}"
                    )
        self._aliases = dict(aliases)

    def remove_alias(self, name: str) -> None:
        """Forget an alias.

        Raises:
            ModelNotServed: there is none of that name.
        """
        if name not in self._aliases:
            raise ModelNotServed(f"There is no alias `{name[:80]}`.", "name")
        del self._aliases[name]

    # -------------------------------------------------------- requests

    def choose(
        self, name: str | None, key: Callable[[], str | None] | None = None, variant: str | None = None
    ) -> tuple[ModelEntry, str]:
        """The model that is to answer a request, and the name its answer carries.

        An alias of several models prefers the one its weights and the key say; should that be unable to answer, the
        next that can takes its place.

        Args:
            name: by the request; None: `default`.
            key: gives what keeps a user or session with one model; asked for only where that matters.
            variant: a model of the alias, asked for by its id.

        Raises:
            ModelNotServed: no such name.
            InvalidRequest: the variant is none of the name's.
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
        for able in (ModelEntry.healthy, self._may_load):
            for entry in order:
                if able(entry):
                    return entry, alias.name
        return order[0], alias.name

    def _may_load(self, entry: ModelEntry) -> bool:
        """Whether a request may have the model loaded."""
        return False

    def _unknown(self, name: str | None) -> ModelNotServed:
        if name is None:
            return ModelNotServed("model: this server has no model; name one with `octavo serve MODEL`", "model")
        return ModelNotServed(
            f"The model `{name[:200]}` does not exist{_did_you_mean(name, self.names)}; this server has "
            f"{quoted(self.names)}.",
            "model",
        )

    def _pointer(self, name: str) -> dict[str, float]:
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


def quoted(names: Collection[str]) -> str:
    """Names for a message, not too many."""
    shown = [f"`{name}`" for name in list(names)[:20]]
    return ", ".join(shown) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _did_you_mean(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name[:200], known, 1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _no_variant(name: str, variant: str, known: Collection[str]) -> InvalidRequest:
    return InvalidRequest(f"X-Variant: `{name}` has no variant `{variant[:80]}`; it has {quoted(known)}", "X-Variant")
