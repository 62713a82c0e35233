"""Settings of a server. All have safe defaults."""

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
_MAX_CONSTRAINT_BYTES = 1 << 18  # limit of the compiler
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
        max_body_bytes: of one request.
        generation_config: sampling fields that a request omits come from the model's authors (`auto`) or from OpenAI's
            defaults (`vllm`).
        override_generation_config: sampling fields that take precedence over the authors', as a JSON object, for
            example `{"temperature": 0.6}`.
        sse_keep_alive_seconds: a stream that is silent for this time sends a comment; 0 for never.
        metrics_prefix: of metrics that vLLM has too; `octavo_` gives all metrics one prefix.
        metrics_old_names: show metrics that vLLM renamed under their former name too.
        access_log: write a log line for each request.
        log_prompts: characters of each request's body to log; 0 for none, as bodies hold what users write.
        otlp_traces_endpoint: OpenTelemetry collector (OTLP over HTTP) that gets a span for each request; None for none.

        autoload: a request may load a registered model.
        model_load_wait: seconds that a request waits for its model to load; 0 to refuse it at once.
        max_load_waiters: maximum number of requests that wait for one model.
        model_load_timeout: maximum seconds of a load.
        model_drain_timeout: seconds that running requests get when their model is unloaded.
        idle_unload: seconds without requests after which a model is unloaded; None for never.
        max_loaded_models: maximum number of loaded models; the least recently used one is unloaded for the next.
        model_memory: maximum bytes of weights and KV cache of all loaded models, likewise.
        max_bodies_bytes: of all running requests.
        max_json_depth: nesting of objects and arrays in a body.
        max_json_containers: objects and arrays in a body.
        max_messages: of a conversation.
        max_answers: prompts times `n` of a request.
        max_answer_tokens: prompts times `n` times `max_tokens` of a request.
        max_stops: stop strings of a request.
        max_stop_chars: characters of a stop string.
        max_logit_bias: entries of `logit_bias`.
        max_bad_words: entries of `bad_words`.
        max_constraint_bytes: of a schema, pattern, grammar or list of choices that constrains a completion.
        metrics_public: `/metrics` needs no key.
        allowed_hosts: names that a Host header may have; empty for loopback names, addresses and the bound host.
        allowed_origins: web pages that may send requests from other origins; none by default.
        allowed_methods: methods that these pages may use.
        allowed_headers: headers that these pages may send.
        allow_credentials: these pages may send cookies and logins.
        host: that the server listens on, as given.
        root_path: path under which a proxy publishes the server.
        ssl_certfile: PEM file of the certificate chain; None for no TLS.
        ssl_keyfile: PEM file of the key; None if the certificate's file holds it.
        ssl_keyfile_password: of the key.
        ssl_ca_certs: PEM file of authorities; clients must have a certificate signed by one of them.
        max_engine_requests: completions in the engine at once; None for those it runs at once and some that follow.
        max_queue_requests: prompts that may wait for the engine.
        max_queue_tokens: tokens that may wait for the engine, of prompts and expected completions.
        max_concurrency: requests that one key may run at once; None for no limit.
        request_timeout: seconds that a request may take; None for no limit.
        share_prefix_cache: keys share cached prefixes.
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
        """Refuse invalid values.

        Raises:
            ConfigError: naming the setting, its value and the remedy.
        """
        if self.generation_config not in ("auto", "vllm"):
            raise ConfigError(
                f"generation_config: {self.generation_config!r} is neither auto nor vllm; auto uses the values "
                "that the model's authors recommend"
            )
        self.sampling_defaults({})
        if not 0 <= self.sse_keep_alive_seconds < math.inf:
            raise ConfigError(
                f"sse_keep_alive_seconds: {self.sse_keep_alive_seconds} is not a number of seconds; use 15, or 0 to "
                "turn keep-alive comments off"
            )
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix: {self.metrics_prefix!r} is not a valid prefix of a metric; use vllm: or octavo_"
            )
        if self.log_prompts < 0:
            raise ConfigError(f"log_prompts: {self.log_prompts} is not a number of characters; use 0 for none")
        for name in ("model_load_wait", "model_load_timeout", "model_drain_timeout", "idle_unload"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ConfigError(f"{name}: {seconds} is not a number of seconds; use 0 or more")
        for name in ("max_load_waiters", "max_loaded_models", "model_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is not possible; use at least 1, or omit it")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < 1 << 40:
                raise ConfigError(f"{name}: {value} is not possible; use a positive number below 2^40")
        if self.max_constraint_bytes > _MAX_CONSTRAINT_BYTES:
            raise ConfigError(
                f"max_constraint_bytes: {self.max_constraint_bytes} is more than the compiler's limit of "
                f"{_MAX_CONSTRAINT_BYTES}; use less"
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path: {self.root_path!r} must begin with / and not end with /, as in /llm")

    def sampling_defaults(self, recommended: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sampling fields for requests that omit them: this server's, else the model authors', else OpenAI's.

        Args:
            recommended: by the model's authors.

        Raises:
            ConfigError: `override_generation_config` is not an object of sampling fields.
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
            f'override_generation_config: {text[:200]!r} cannot be used ({error}); use such as {{"temperature": 0.6}}'
        ) from None
    return own
