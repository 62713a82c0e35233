"""The settings of one server, all of which have a safe default."""

from __future__ import annotations

import math
import re

import msgspec

from octavo.errors import ConfigError

__all__ = ["ServerSettings"]

_METRICS_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,63}")


class ServerSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How a server answers.

    Attributes:
        max_body_bytes: of a request.
        sse_keep_alive_seconds: a stream that is silent for so long sends a comment; 0 for never.
        metrics_prefix: before the names of metrics that vLLM has too; `octavo_` gives all metrics one prefix.
        metrics_old_names: show metrics that vLLM renamed under their old names as well.
        access_log: a line a request.
        log_prompts: characters of each request's body in its line; 0 for none, as bodies hold what users write.
        otlp_traces_endpoint: OpenTelemetry collector (OTLP over HTTP) that gets a span a request; None for none.

        autoload: a request for a model that is known and not loaded loads it.
        model_load_wait: seconds that a request waits for its model to be loaded; 0: it is refused at once.
        max_load_waiters: requests that wait for one model, at most.
        model_load_timeout: seconds that a load may take.
        model_drain_timeout: seconds that running requests get when their model is unloaded.
        idle_unload: seconds without requests after which a model is unloaded; None: never.
        max_loaded_models: at once; the least recently used makes room for the next.
        model_memory: bytes of weights and KV cache of all loaded models; as above.
    """

    max_body_bytes: int = 8 << 20
    sse_keep_alive_seconds: float = 15.0

    metrics_prefix: str = "vllm:"
    metrics_old_names: bool = False
    access_log: bool = True
    log_prompts: int = 0
    otlp_traces_endpoint: str | None = None

    autoload: bool = True
    model_load_wait: float = 60.0
    max_load_waiters: int = 1024
    model_load_timeout: float = 1800.0
    model_drain_timeout: float = 300.0
    idle_unload: float | None = None
    max_loaded_models: int | None = None
    model_memory: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: naming the setting, its value and the remedy.
        """
        if not 0 <= self.sse_keep_alive_seconds < math.inf:
            raise ConfigError(
                f"sse_keep_alive_seconds: {self.sse_keep_alive_seconds} is not a number of seconds; use 15, or 0 to "
                "turn keep-alive comments off"
            )
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix: {self.metrics_prefix!r} cannot begin a metric's name; use vllm: or octavo_"
            )
        if self.log_prompts < 0:
            raise ConfigError(f"log_prompts: {self.log_prompts} is not a number of characters; use 0 for none")
        for name in ("model_load_wait", "model_load_timeout", "model_drain_timeout", "idle_unload"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ConfigError(f"{name}: {seconds} is not a number of seconds; give one from 0 up")
        for name in ("max_load_waiters", "max_loaded_models", "model_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is not possible; give at least 1, or leave it out")
