"""The settings of one server, all of which have a safe default."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import ConfigError, InvalidRequest
from octavo.sampling_params import SamplingParams

__all__ = ["ServerSettings"]

_METRICS_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,63}")
_OVERRIDES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_MAX_CONSTRAINT_BYTES = 1 << 18  # of the compiler
_POSITIVE = (
    "max_body_bytes",
    "max_bodies_bytes",
    "max_json_depth",
    "max_json_containers",
    "max_messages",
    "max_answers",
    "max_answer_tokens",
    "max_stops",
    "max_stop_chars",
    "max_logit_bias",
    "max_bad_words",
    "max_constraint_bytes",
    "max_engine_requests",
    "max_queue_requests",
    "max_queue_tokens",
    "max_concurrency",
    "request_timeout",
)


class ServerSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How a server answers.

    Attributes:
        max_body_bytes: of a request.
        generation_config: what a request leaves open is as the model's makers recommend (`auto`), or as OpenAI says
            (`vllm`).
        override_generation_config: sampling fields that stand before the makers', as a JSON object, such as
            `{"temperature": 0.6}`.
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
        max_bodies_bytes: of all requests that are under way.
        max_json_depth: of objects and arrays within each other in a body.
        max_json_containers: objects and arrays in a body.
        max_messages: of a conversation.
        max_answers: prompts times `n` of a request.
        max_answer_tokens: prompts times `n` times `max_tokens` of a request.
        max_stops: stop texts of a request.
        max_stop_chars: characters of a stop text.
        max_logit_bias: entries of `logit_bias`.
        max_bad_words: entries of `bad_words`.
        max_constraint_bytes: of a schema, pattern, grammar or list of choices that an answer is to be held to.
        metrics_public: `/metrics` answers without a key.
        allowed_hosts: names that a Host header may carry; empty for loopback names, addresses and the bound host.
        allowed_origins: pages that may ask from other origins; none by default.
        allowed_methods: that they may use.
        allowed_headers: that they may send.
        allow_credentials: whether they may send cookies and logins.
        host: that the server listens on, as it was given.
        root_path: under which a proxy shows the server.
        ssl_certfile, ssl_keyfile, ssl_keyfile_password, ssl_ca_certs: as of `hosts.tls_context`.
        max_engine_requests: answers in the engine at once; None for what it runs at once and a few to follow.
        max_queue_requests: prompts that may wait for the engine.
        max_queue_tokens: tokens that may wait for the engine, of prompts and of the answers expected.
        max_concurrency: requests that one key may have under way; None for any number.
        request_timeout: seconds that a request may take; None for any time.
        share_prefix_cache: let keys find each other's cached prefixes.
    """

    max_body_bytes: int = 8 << 20
    generation_config: str = "auto"
    override_generation_config: str = ""
    sse_keep_alive_seconds: float = 15.0
    max_bodies_bytes: int = 1 << 30
    max_json_depth: int = 64
    max_json_containers: int = 1 << 16
    max_messages: int = 4096
    max_answers: int = 1024
    max_answer_tokens: int = 1 << 22
    max_stops: int = 16
    max_stop_chars: int = 256
    max_logit_bias: int = 1024
    max_bad_words: int = 128
    max_constraint_bytes: int = _MAX_CONSTRAINT_BYTES

    metrics_public: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("GET", "POST")
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    host: str = "127.0.0.1"
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None

    max_engine_requests: int | None = None
    max_queue_requests: int = 2048
    max_queue_tokens: int = 1 << 22
    max_concurrency: int | None = None
    request_timeout: float | None = None
    share_prefix_cache: bool = False

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
        if self.generation_config not in ("auto", "vllm"):
            raise ConfigError(
                f"generation_config: {self.generation_config!r} is neither auto nor vllm; auto takes what the model's "
                "makers recommend"
            )
        self.sampling_defaults({})
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
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < 1 << 40:
                raise ConfigError(f"{name}: {value} is not positive, or too large")
        if self.max_constraint_bytes > _MAX_CONSTRAINT_BYTES:
            raise ConfigError(
                f"max_constraint_bytes: {self.max_constraint_bytes} is more than the {_MAX_CONSTRAINT_BYTES} that "
                "can be compiled; give less"
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path: {self.root_path!r} does not begin with / or ends with it; give such as /llm")

    def sampling_defaults(self, recommended: Mapping[str, Any]) -> Mapping[str, Any]:
        """What holds where a request says nothing: this server's own values, else the makers', else OpenAI's.

        Args:
            recommended: by the model's makers.

        Raises:
            ConfigError: `override_generation_config` is no object of sampling fields.
        """
        base = {} if self.generation_config == "vllm" else recommended
        if not self.override_generation_config:
            return base
        own = _overrides(self.override_generation_config)
        return {**base, **own}


@functools.lru_cache(8)
def _overrides(text: str) -> dict[str, Any]:
    try:
        own = msgspec.json.decode(text, type=dict[str, Any])
        unknown = sorted(own.keys() - set(_OVERRIDES))
        if unknown:
            raise InvalidRequest(f"{unknown[0]} is not one of {', '.join(_OVERRIDES)}")
        SamplingParams(**own)
    except (msgspec.DecodeError, InvalidRequest, RecursionError) as error:
        raise ConfigError(
            f'override_generation_config: {text[:200]!r} cannot be used ({error}); give such as {{"temperature": 0.6}}'
        ) from None
    return own
