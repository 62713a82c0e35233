"""API keys: where they are configured, and which identity each stands for."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import stat
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError
from octavo.server.access.identity import PRIORITIES, SCOPES, Identity

__all__ = ["ApiKey", "KeyRing", "parse_keys"]

logger = logging.getLogger("octavo.server.access.api_keys")

_MAX_KEYS = 1000  # every request is compared with each of them
_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{8,512}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


class ApiKey(msgspec.Struct, frozen=True):
    """An API key, stored as its hash.

    Attributes:
        digest: SHA-256 of the key.
        identity: of whoever sends the key.
    """

    digest: bytes
    identity: Identity


def parse_keys(text: str, place: str) -> list[ApiKey]:
    """Parse the text of a key file.

    Each line holds one key: `NAME KEY [OPTION=VALUE ...]`, separated by spaces. A line that starts with `#` is a
    comment. KEY is the key itself (8 to 512 visible ASCII characters) or `sha256:` and the 64 hex digits of its hash.
    Options: `tenant=NAME`, `priority=high|normal|low`, `max_concurrency=N`, `scopes=inference,metrics,admin`.

    Args:
        text: of the file.
        place: name of the file in messages.

    Raises:
        ConfigError: an invalid line. The message names the line and never shows the key.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            keys.append(_parse_line(words, f"{place}, line {number}"))
    return _checked(keys, place)


def _parse_line(words: Sequence[str], where: str) -> ApiKey:
    if len(words) < 2:
        raise ConfigError(f"{where}: the key is missing; write `NAME KEY [OPTION=VALUE ...]`")
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
            # Do not show the option: it may be part of a key that was split by mistake.
            raise ConfigError(
                f"{where}: option {len(fields) + 1} is unknown or has an invalid value; use tenant=NAME, "
                f"priority={'|'.join(PRIORITIES)}, max_concurrency=N or scopes={','.join(SCOPES)} (one or several)"
            )
    fields.setdefault("tenant", name)
    priority = fields.setdefault("priority", "normal")
    return ApiKey(_digest(key, where), Identity(name=name, best_priority=priority, **fields))


def _digest(key: str, where: str) -> bytes:
    hashed = _DIGEST.fullmatch(key)
    if hashed:
        return bytes.fromhex(hashed.group(1))
    if key.startswith("sha256:"):
        raise ConfigError(f"{where}: 64 hex digits must follow `sha256:`")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where}: the key is not 8 to 512 visible ASCII characters")
    return hashlib.sha256(key.encode()).digest()


def _checked(keys: list[ApiKey], place: str) -> list[ApiKey]:
    if len(keys) > _MAX_KEYS:
        raise ConfigError(f"{place}: {len(keys)} keys are too many; the limit is {_MAX_KEYS}")
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
    """The keys of one server, from a file, the environment and the command line. Changes of the file are followed.

    Args:
        file: path of a key file; see `parse_keys`.
        environment: value of `variable`: keys separated by commas.
        arguments: keys given as `--api-key`.
        variable: name of the environment variable, for messages.
        follows: another process of this server has the same keys and logs changes of the file. The file may be empty.

    Raises:
        ConfigError: a source without keys, an invalid key, or a file that cannot be read.
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
        # A reload that began earlier must not restore keys that a later one removed.
        self._reading = threading.Lock()
        self._fixed: list[ApiKey] = []
        if environment is not None and environment.strip():
            words = [word for word in map(str.strip, environment.split(",")) if word]
            if not words:
                raise ConfigError(f"{variable}: no key was found; write keys separated by commas")
            self._fixed += _plain_keys(words, "environment", variable)
        self._fixed += _plain_keys(arguments, "argument", "api_key")
        self._state: tuple[int, ...] | None = None
        # States of a file that could not be used, and of a file without keys.
        self._refused: tuple[int, ...] | None = None
        self._emptied: tuple[int, ...] | None = None
        self._keys = self._fixed
        if self._file is not None:
            self._state = _state_of(self._file)
            found = self._read()
            if not found and not follows:
                raise ConfigError(f"api_key_file {self._file}: no key was found; write one in each line as `NAME KEY`")
            self._keys = [*found, *self._fixed]
        _checked(list(self._keys), "API keys")

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._keys)

    def __repr__(self) -> str:
        return f"KeyRing({len(self)} keys)"

    @property
    def required(self) -> bool:
        """Whether requests need a key. With a key file they do, even while it is empty."""
        return self._file is not None or bool(self._keys)

    def find(self, presented: Iterable[bytes]) -> Identity | None:
        """The identity of any of the presented keys; None if all are unknown.

        Each is compared with every known key in constant time, so the duration reveals nothing.
        """
        found: Identity | None = None
        for key in presented:
            digest = hashlib.sha256(key).digest()
            for known in self._keys:
                if hmac.compare_digest(digest, known.digest):
                    found = known.identity
        return found

    def reload(self) -> bool:
        """Read the file again if it has changed. A file that cannot be used leaves the keys as they are.

        An empty file revokes all of its keys at the second call: a file that is being rewritten is empty for a moment.

        It blocks, so call it in a thread; several threads may call it.

        Returns:
            Whether the keys were replaced.
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
                self._say(logging.ERROR, "the API keys are unchanged: %s", error)
            # Try again each time: the fault may be fixed without a change of the file.
            self._refused = state
            return False
        self._state, self._refused, self._emptied = state, None, None
        if found:
            self._say(logging.INFO, "%d API keys were read from the key file", len(found))
        elif self._fixed:
            self._say(logging.ERROR, "api_key_file %s is empty now: its former keys are revoked", self._file)
        else:
            self._say(
                logging.ERROR,
                "api_key_file %s is empty now: all requests are refused until it holds a key",
                self._file,
            )
        return True

    async def watch(self, interval: float = 1.0) -> None:
        """Reload the file whenever it changes, in a thread, until cancelled."""
        loop = asyncio.get_running_loop()
        while self._file is not None:
            await asyncio.sleep(interval)
            try:
                await loop.run_in_executor(None, self.reload)
            except Exception:
                logger.exception("the API key file could not be checked")

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
            raise ConfigError(f"{place}: the file cannot be read ({error.strerror})") from None
        if status.st_mode & stat.S_IROTH:
            self._say(logging.WARNING, "%s can be read by every user of this machine; run chmod 600 on it", place)
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{place}: the file is longer than {_MAX_FILE_BYTES} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{place}: the file is not UTF-8 text") from None
        return parse_keys(text, place)


def _state_of(file: Path) -> tuple[int, ...] | None:
    """A value that changes whenever the file does."""
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
