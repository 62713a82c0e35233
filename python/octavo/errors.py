"""Every error Octavo raises on purpose.

    OctavoError
    +-- InvalidRequest (ValueError)         the caller's mistake: names the field, the value and the remedy
    |   +-- ContextLengthExceeded           prompt, or prompt and output, longer than the model's context
    |   +-- CapacityExceeded                can never fit in the KV cache, however long it waits
    |   +-- ModelNotServed                  the server has no model of that name
    +-- ConfigError (ValueError)            a flag or setting is off
    |   +-- NotEnoughMemory                 weights or one sequence's KV cache do not fit
    +-- ModelError (ValueError)             a model's files cannot be used
    |   +-- ModelNotFound                   no such folder, file or repository
    |   +-- CorruptFile                     truncated, inconsistent or hostile file
    |   +-- UnsupportedModel                unknown architecture, tensor type or feature
    +-- Overloaded                          too much is under way; the same may be asked again in a moment
    +-- EngineDead (RuntimeError)           the engine process ended; its requests are lost
        +-- EngineRestarting                it is being started again; ask once more in a moment

The extension module raises these classes too.
"""

from __future__ import annotations

__all__ = [
    "CapacityExceeded",
    "ConfigError",
    "ContextLengthExceeded",
    "CorruptFile",
    "EngineDead",
    "EngineRestarting",
    "InvalidRequest",
    "ModelError",
    "ModelNotFound",
    "ModelNotServed",
    "NotEnoughMemory",
    "OctavoError",
    "Overloaded",
    "UnsupportedModel",
]


class OctavoError(Exception):
    """The base of every error raised on purpose."""


class InvalidRequest(OctavoError, ValueError):
    """A request that cannot be served as it stands.

    Attributes:
        field: the request's field at fault, for the OpenAI error object's `param`; None when there is no one field.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and the output asked for, is longer than the model's context."""


class CapacityExceeded(InvalidRequest):
    """The request needs more blocks than the whole KV cache has."""


class ModelNotServed(InvalidRequest):
    """The server has no model of that name."""


class ConfigError(OctavoError, ValueError):
    """A setting that cannot work; the message names it, its value and the remedy."""


class NotEnoughMemory(ConfigError):
    """The weights, or the KV cache of one sequence, do not fit in the memory that is free."""


class ModelError(OctavoError, ValueError):
    """A model's files cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, file or repository."""


class CorruptFile(ModelError):
    """A model file that is truncated, contradicts itself, or was made to do harm."""


class UnsupportedModel(ModelError):
    """An architecture, tensor type or feature that Octavo does not know."""


class Overloaded(OctavoError):
    """Refused for now, because too much is under way; the same may be asked again in a moment."""


class EngineDead(OctavoError, RuntimeError):
    """The engine process ended; its requests are lost."""


class EngineRestarting(EngineDead):
    """The engine process ended and is being started again: what ran is lost, the same request may be sent again.

    Attributes:
        retry_after: seconds after which it is worth a try.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
