"""API keys: where they come from, whom they stand for, and the gate that no request passes without one."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import stat
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError, OctavoError
from octavo.server.access.refusal import refuse
from octavo.server.error_responses import Forbidden, Unauthorized
from octavo.server.observability.request_context import context_of
from octavo.server.transport.http import Receive, Scope, Send

__all__ = ["ANONYMOUS", "PRIORITIES", "SCOPES", "ApiKey", "Gate", "Identity", "KeyRing", "identity_of", "parse_keys"]

logger = logging.getLogger("octavo.server.access.api_keys")

PRIORITIES = ("high", "normal", "low")
SCOPES = ("inference", "metrics", "admin")
OPEN_PATHS = frozenset(("/health", "/livez", "/readyz", "/ping"))
"""What answers without a key: probes carry none, and these say nothing but whether the server serves."""

_MAX_KEYS = 1000  # every request is compared with each
_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{8,512}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_IDENTITY = "octavo.identity"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a request is from.

    Attributes:
        name: of the key.
        tenant: shares turns with other keys of the same tenant; the key's name when it names none.
        priority: class of requests that name none.
        best_priority: the most urgent class that requests may ask for.
        scopes: what the key opens.
        max_concurrency: requests that may generate or wait at once; None for the server's own limit.
        anonymous: no key was asked for.
    """

    name: str
    tenant: str
    priority: str = "normal"
    best_priority: str = "normal"
    scopes: frozenset[str] = frozenset(("inference",))
    max_concurrency: int | None = None
    anonymous: bool = False


ANONYMOUS = Identity(
    name="anonymous", tenant="anonymous", best_priority="high", scopes=frozenset(SCOPES), anonymous=True
)


class ApiKey(msgspec.Struct, frozen=True):
    """A key as the server remembers it: by its hash.

    Attributes:
        digest: SHA-256 of the key.
        identity: whom it stands for.
    """

    digest: bytes
    identity: Identity


def identity_of(scope: Scope) -> Identity:
    """Whom the gate has found a request to be from."""
    identity: Identity = scope.get(_IDENTITY, ANONYMOUS)
    return identity


def parse_keys(text: str, place: str) -> list[ApiKey]:
    """Keys from the text of a key file.

    A line is a key: `NAME KEY [OPTION=VALUE ...]`, separated by blanks; `#` at a line's start begins a comment. KEY is
    the key itself (8 to 512 visible ASCII characters) or `sha256:` and the 64 hex digits of its hash. Options:
    `tenant=NAME`, `priority=high|normal|low`, `max_concurrency=N`, `scopes=inference,metrics,admin`.

    Args:
        text: of the file.
        place: what to call it in messages.

    Raises:
        ConfigError: a line that is none; it names the line and never shows the key.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            keys.append(_parse_line(words, f"{place}, line {number}"))
    return _checked(keys, place)


def _parse_line(words: Sequence[str], where: str) -> ApiKey:
    if len(words) < 2:
        raise ConfigError(f"{where}: has no key; write `NAME KEY [OPTION=VALUE ...]`")
    name, key, *options = words
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name is not 1 to 64 letters, digits, `.`, `_` or `-`")
    fields: dict[str, Any] = {}
    for option in options:
        word, equals, value = option.partition("=")
        if not equals or word in fields:
            raise ConfigError(f"{where}: an option is not `OPTION=VALUE`, or is given twice")
        if (word == "tenant" and _NAME.fullmatch(value)) or (word == "priority" and value in PRIORITIES):
            fields[word] = value
        elif word == "max_concurrency" and value.isdecimal() and 0 < len(value) <= 6 and int(value) > 0:
            fields[word] = int(value)
        elif word == "scopes" and value and set(value.split(",")) <= set(SCOPES):
            fields[word] = frozenset(value.split(","))
        else:
            # Not shown: a key that was split by mistake would stand here.
            raise ConfigError(
                f"{where}: option {len(fields) + 1} is none of tenant=NAME, priority={'|'.join(PRIORITIES)}, "
                f"max_concurrency=N and scopes={','.join(SCOPES)} (some of them)"
            )
    fields.setdefault("tenant", name)
    priority = fields.setdefault("priority", "normal")
    return ApiKey(_digest(key, where), Identity(name=name, best_priority=priority, **fields))


def _digest(key: str, where: str) -> bytes:
    hashed = _DIGEST.fullmatch(key)
    if hashed:
        return bytes.fromhex(hashed.group(1))
    if key.startswith("sha256:"):
        raise ConfigError(f"{where}: after `sha256:` 64 hex digits are expected")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where}: the key is not 8 to 512 visible ASCII characters")
    return hashlib.sha256(key.encode()).digest()


def _checked(keys: list[ApiKey], place: str) -> list[ApiKey]:
    if len(keys) > _MAX_KEYS:
        raise ConfigError(f"{place}: {len(keys)} keys are too many; {_MAX_KEYS} at most")
    for what, values in (
        ("name", [key.identity.name for key in keys]),
        ("key", [key.digest.hex() for key in keys]),
    ):
        if len(set(values)) < len(values):
            twice = next(index for index, value in enumerate(values) if value in values[:index])
            raise ConfigError(f"{place}: a {what} is given twice (see {keys[twice].identity.name!r})")
    return keys


def _plain_keys(keys: Iterable[str], prefix: str, place: str) -> list[ApiKey]:
    made = []
    for number, key in enumerate(keys, 1):
        name = f"{prefix}-{number}"
        made.append(ApiKey(_digest(key, f"{place}, key {number}"), Identity(name=name, tenant=name)))
    return made


class KeyRing:
    """The keys of one server, from a file, the environment and the command line; the file is read again as it changes.

    Args:
        file: path of a key file; see `parse_keys`.
        environment: value of `variable`: keys separated by commas.
        arguments: keys given as `--api-key`.
        variable: of the environment, for messages.
        follows: another process of the same server has the same keys: it logs what becomes of the file, and the file
            may hold no key by now.

    Raises:
        ConfigError: a source without keys, a key that is none, or a file that cannot be read.
    """

    def __init__(
        self,
        file: str | Path | None = None,
        environment: str | None = None,
        arguments: Sequence[str] = (),
        variable: str = "OCTAVO_API_KEY",
        *,
        follows: bool = False,
    ) -> None:
        self._follows = follows
        self._file = None if file is None else Path(file)
        # A look that began earlier must not bring keys back that a later one found gone.
        self._reading = threading.Lock()
        self._fixed: list[ApiKey] = []
        if environment is not None and environment.strip():
            words = [word for word in map(str.strip, environment.split(",")) if word]
            if not words:
                raise ConfigError(f"{variable}: holds no key; write keys, separated by commas")
            self._fixed += _plain_keys(words, "environment", variable)
        self._fixed += _plain_keys(arguments, "argument", "api_key")
        self._state: tuple[int, ...] | None = None
        # That of a file that could not be used, and of one without a key.
        self._refused: tuple[int, ...] | None = None
        self._emptied: tuple[int, ...] | None = None
        self._keys = self._fixed
        if self._file is not None:
            self._state = _state_of(self._file)
            found = self._read()
            if not found and not follows:
                raise ConfigError(f"api_key_file {self._file}: holds no key; write one a line as `NAME KEY`")
            self._keys = [*found, *self._fixed]
        _checked(list(self._keys), "API keys")

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._keys)

    def __repr__(self) -> str:
        return f"KeyRing({len(self)} keys)"

    @property
    def required(self) -> bool:
        """Whether requests need a key. A file makes them needed even while it holds none."""
        return self._file is not None or bool(self._keys)

    def find(self, presented: Iterable[bytes]) -> Identity | None:
        """Whom any of the presented keys stands for.

        Every key is compared with every known one in constant time, so that how long it takes tells nothing.
        """
        found: Identity | None = None
        for key in presented:
            digest = hashlib.sha256(key).digest()
            for known in self._keys:
                if hmac.compare_digest(digest, known.digest):
                    found = known.identity
        return found

    def reload(self) -> bool:
        """Read the file again if it has changed; one that cannot be used leaves the keys as they are.

        One without any key revokes them all, at the second look: who writes a file anew empties it for a moment.

        Blocks: call it in a thread, or several. True when the keys were replaced.
        """
        with self._reading:
            return self._reload()

    def _reload(self) -> bool:
        if self._file is None:
            return False
        state = _state_of(self._file)
        if state == self._state:
            return False
        try:
            found = self._read()
            if not found and state != self._emptied:
                self._emptied = state
                return False
            self._keys = _checked([*found, *self._fixed], "API keys")
        except ConfigError as error:
            if state != self._refused:
                self._say(logging.ERROR, "the API keys stay as they were: %s", error)
            # Looked at again each time: what is wrong may be mended without a change of the file.
            self._refused = state
            return False
        self._state, self._refused, self._emptied = state, None, None
        if found:
            self._say(logging.INFO, "%d API keys were read from the key file", len(found))
        elif self._fixed:
            self._say(logging.ERROR, "api_key_file %s holds no key any more: those it held open nothing", self._file)
        else:
            self._say(
                logging.ERROR,
                "api_key_file %s holds no key any more: nobody gets in until it does",
                self._file,
            )
        return True

    async def watch(self, interval: float = 1.0) -> None:
        """Reload as the file changes, for ever; the file is looked at in a thread."""
        loop = asyncio.get_running_loop()
        while self._file is not None:
            await asyncio.sleep(interval)
            try:
                await loop.run_in_executor(None, self.reload)
            except Exception:
                logger.exception("the API key file could not be looked at")

    def _say(self, level: int, message: str, *values: object) -> None:
        logger.log(logging.DEBUG if self._follows else level, message, *values)

    def _read(self) -> list[ApiKey]:
        assert self._file is not None
        place = f"api_key_file {self._file}"
        try:
            with self._file.open("rb") as source:
                status = os.fstat(source.fileno())
                data = source.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{place}: cannot be read ({error.strerror})") from None
        if status.st_mode & stat.S_IROTH:
            self._say(logging.WARNING, "%s can be read by everyone on this machine; chmod 600 it", place)
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{place}: is longer than {_MAX_FILE_BYTES} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{place}: is not UTF-8 text") from None
        return parse_keys(text, place)


def _state_of(file: Path) -> tuple[int, ...] | None:
    """What changes whenever the file does."""
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def _presented(scope: Scope) -> list[bytes]:
    keys: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and key:
                keys.append(key.strip())
    return keys[:2]


class Gate:
    """Lets a request reach `app` only with a key of the right scope; ASGI, before any routing.

    Whatever is not known to be open is closed, so a route added later is guarded too.

    Args:
        app: what lies behind.
        keys: those that open it; without any, everyone is anonymous and let through.
        scope: what a key must open.
        open_metrics: let `/metrics` answer without a key.
        open_paths: answer without a key.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        keys: KeyRing,
        *,
        scope: str = "inference",
        open_metrics: bool = False,
        open_paths: frozenset[str] = OPEN_PATHS,
    ) -> None:
        from starlette._utils import get_route_path

        # The router's own: what is open here must be what answers there.
        self._path_of = get_route_path
        self._app = app
        self._keys = keys
        self._scope = scope
        self._open = open_paths | {"/metrics"} if open_metrics else open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and not self._keys.required):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path = self._path_of(scope)
        identity = self._keys.find(_presented(scope))
        if identity is not None:
            scope[_IDENTITY] = identity
            context_of(scope).key_name = identity.name
        if path not in self._open:
            refusal = self._refusal(identity, path)
            if refusal is not None:
                await refuse(scope, send, refusal)
                return
        await self._app(scope, receive, send)

    def _refusal(self, identity: Identity | None, path: str) -> OctavoError | None:
        if identity is None:
            return Unauthorized(
                "A valid API key is needed: send it as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`."
            )
        if self._scope in identity.scopes or (path == "/metrics" and "metrics" in identity.scopes):
            return None
        return Forbidden(f"This API key does not have the scope `{self._scope}`.")
