"""Every metric of a server, scraped at `/metrics`: vLLM's names for what vLLM has, `octavo_` for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest

from octavo.engine.step_sizes import STEP_TOKEN_BOUNDS
from octavo.server.observability.series import Family, Histogram, Value

__all__ = ["EngineReading", "Metrics", "ModelSeries", "VariantSeries"]

_ENGINE = ("model_name", "engine")
_VARIANT = ("model_name", "variant")

# All of vLLM's edges, so that queries by edge go on working, and finer ones below: a small model's token takes less
# than a millisecond, and vLLM's first edge is 10 ms for tokens and 300 ms for whole requests.
_FIRST_TOKEN_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5,
    5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20,
    30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
# Of what is there for each version or path beside those: enough to compare them by.
_VARIANT_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40)
_VARIANT_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.5, 1, 5)
_VARIANT_REQUEST_SECONDS = (0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 480)
_HTTP_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 10, 30, 60, 240)
_TOKENS = (*(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5)), 1e6)
_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)

FINISH_REASONS = ("stop", "length", "abort", "error")
# Codes of error objects.
AUTH_FAILURES = ("invalid_api_key", "insufficient_scope", "host_not_allowed")
REJECTIONS = ("queue_full", "queue_timeout", "concurrency_exceeded")

# vLLM's, a histogram each: (name, help, bounds).
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_SECONDS),
    ("inter_token_latency_seconds", "Between two tokens of an answer.", _TOKEN_SECONDS),
    ("request_time_per_output_token_seconds", "Mean time a token of a request after its first.", _TOKEN_SECONDS),
    ("e2e_request_latency_seconds", "From arrival to the answer's end.", _REQUEST_SECONDS),
    (
        "request_queue_time_seconds",
        "Time a request waited for its turn, at the door and in the engine.",
        _REQUEST_SECONDS,
    ),
    ("request_inference_time_seconds", "From admission to the last token.", _REQUEST_SECONDS),
    ("request_prefill_time_seconds", "From admission to the first token.", _REQUEST_SECONDS),
    ("request_decode_time_seconds", "From the first token to the last.", _REQUEST_SECONDS),
    ("request_prompt_tokens", "Prompt tokens a request.", _TOKENS),
    ("request_generation_tokens", "Output tokens a request.", _TOKENS),
    ("request_max_num_generation_tokens", "Output tokens of a request's longest answer.", _TOKENS),
    ("request_prefill_kv_computed_tokens", "Prompt tokens a request that no cache held.", _TOKENS),
    ("request_params_n", "Answers asked for, a request.", _ANSWERS),
    ("request_params_max_tokens", "max_tokens asked for, a request.", _TOKENS),
)
# vLLM's, counted by the server as answers arrive.
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests that got their first token."),
    ("prompt_tokens_cached", "Prompt tokens taken from the prefix cache."),
    ("generation_tokens", "Tokens generated."),
)
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
# vLLM's, from the engine's stats: (name, help, the stats' names that add up to it).
_ENGINE_GAUGES = (("num_requests_running", "Answers in the running batch.", ("running",)),)
_ENGINE_COUNTERS = (
    ("num_preemptions", "Sequences whose blocks were taken back.", "preemptions"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
)
# Ours, from the engine's stats; one that an engine does not give is left out.
_OUR_GAUGES = (
    ("num_requests_deferred", "Answers that wait for a prefix or for their grammar to be compiled.", "deferred"),
    ("open_requests", "Requests the engine holds for this server.", "open_requests"),
    ("kv_cache_blocks", "Blocks of the KV cache, the null block apart.", "blocks_total"),
    ("kv_cache_blocks_used", "Blocks that sequences hold.", "blocks_used"),
    ("kv_cache_blocks_free", "Blocks that can be taken, cached ones among them.", "blocks_free"),
    ("kv_cache_blocks_cached", "Blocks that the prefix cache knows, held or free.", "blocks_cached"),
    ("kv_cache_blocks_free_cached", "Free blocks that the prefix cache knows; taken last.", "blocks_free_cached"),
    ("kv_cache_slots_unfilled", "Token slots of held blocks that hold none yet.", "slots_unfilled"),
)
_OUR_COUNTERS = (
    ("prefix_cache_evictions", "Cached blocks lost because they were needed.", "evictions"),
    ("engine_steps", "Steps the engine has planned.", "steps"),
    ("kv_cache_block_allocations", "Blocks taken.", "allocations"),
    ("kv_cache_block_frees", "Blocks given back.", "frees"),
)
_HOST_PREFIX, _HOST_SUFFIX = "host_", "_seconds"
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class EngineReading(msgspec.Struct):
    """What one engine said when it was asked.

    Attributes:
        model_name: label.
        engine: label; tells engines of one model name apart.
        variant: the model's id in the registry.
        stats: its gauges and counters; None when it did not answer.
        info: constants of the model, as labels of `octavo_model_info`.
        cache_config: constants of its KV cache, as labels of `cache_config_info`.
        state: loading, ready, ...
        restarts: of its process.
        load_seconds: until it was ready.
        queue: `AdmissionQueue.stats()`, of what the server holds back from it.
    """

    model_name: str
    engine: str = "0"
    variant: str = ""
    stats: Mapping[str, int | float] | None = None
    info: dict[str, str] = {}
    cache_config: dict[str, str] = {}
    state: str = "ready"
    restarts: int = 0
    load_seconds: float | None = None
    queue: Mapping[str, Any] = {}


class ModelSeries:
    """The series that requests of one model write to, found once."""

    __slots__ = (
        "decode", "e2e", "finished", "first_token", "generation", "generation_tokens", "inference", "inter_token",
        "max_generation", "params_max_tokens", "params_n", "per_token", "prefill", "prefill_computed", "prompt",
        "prompt_tokens", "prompt_tokens_cached", "queue", "source_cached", "source_computed",
    )  # fmt: skip

    def __init__(self, families: Mapping[str, Family], model_name: str, engine: str) -> None:
        def histogram(name: str) -> Histogram:
            return families[name].histogram(model_name, engine)

        self.first_token = histogram("time_to_first_token_seconds")
        self.inter_token = histogram("inter_token_latency_seconds")
        self.per_token = histogram("request_time_per_output_token_seconds")
        self.e2e = histogram("e2e_request_latency_seconds")
        self.queue = histogram("request_queue_time_seconds")
        self.inference = histogram("request_inference_time_seconds")
        self.prefill = histogram("request_prefill_time_seconds")
        self.decode = histogram("request_decode_time_seconds")
        self.prompt = histogram("request_prompt_tokens")
        self.generation = histogram("request_generation_tokens")
        self.max_generation = histogram("request_max_num_generation_tokens")
        self.prefill_computed = histogram("request_prefill_kv_computed_tokens")
        self.params_n = histogram("request_params_n")
        self.params_max_tokens = histogram("request_params_max_tokens")
        self.prompt_tokens = families["prompt_tokens"].labels(model_name, engine)
        self.prompt_tokens_cached = families["prompt_tokens_cached"].labels(model_name, engine)
        self.generation_tokens = families["generation_tokens"].labels(model_name, engine)
        by_source = families["prompt_tokens_by_source"]
        self.source_computed, self.source_cached, _ = (
            by_source.labels(model_name, engine, source) for source in _SOURCES
        )
        success = families["request_success"]
        self.finished = {reason: success.labels(model_name, engine, reason) for reason in FINISH_REASONS}


class VariantSeries:
    """The series of one version behind a name that requests ask for."""

    __slots__ = ("e2e", "finished", "first_token", "generation_tokens", "per_token", "prompt_tokens")

    def __init__(self, families: Mapping[str, Family], model_name: str, variant: str) -> None:
        labels = (model_name, variant)
        requests = families["variant_requests"]
        self.finished: dict[str, Value] = {reason: requests.labels(*labels, reason) for reason in FINISH_REASONS}
        self.prompt_tokens = families["variant_prompt_tokens"].labels(*labels)
        self.generation_tokens = families["variant_generation_tokens"].labels(*labels)
        self.first_token = families["variant_time_to_first_token_seconds"].histogram(*labels)
        self.per_token = families["variant_time_per_output_token_seconds"].histogram(*labels)
        self.e2e = families["variant_request_latency_seconds"].histogram(*labels)


class Metrics:
    """All metrics of one server. Written and read in its event loop alone.

    Args:
        version: of the program.
        prefix: before vLLM's names; `octavo_` for who wants one prefix for all.
        old_names: show what vLLM renamed under its old name too.

    Attributes:
        http_requests: by path template and status.
        http_seconds: by path template, of paths that are not asked for by machines every few seconds.
        client_disconnects: requests whose client went away.
        requests_aborted: by model: ended before their answer was complete.
        request_errors: by the error object's `code`.
        deadline_exceeded: requests that ran out of time.
        auth_failures: requests without a valid key, by reason.
        admission_rejections: by model and reason.
        log_lines_dropped: because whoever reads the log was too slow.
    """

    def __init__(self, version: str, *, prefix: str = "vllm:", old_names: bool = False) -> None:
        self._families: dict[str, Family] = {}
        self._models: dict[tuple[str, str], ModelSeries] = {}
        self._variants: dict[tuple[str, str], VariantSeries] = {}
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

        def theirs(
            name: str, text: str, kind: str, *labels: str, bounds: tuple[float, ...] = (), old: str | None = None
        ) -> Family:
            family = Family(prefix + name, text, kind, (*_ENGINE, *labels), bounds)
            self._families[name] = family
            if old is not None and old_names:
                self._old.append((family, prefix + old))
            return family

        def ours(name: str, text: str, kind: str, labels: Iterable[str] = (), bounds: tuple[float, ...] = ()) -> Family:
            self._families[name] = Family(f"octavo_{name}", text, kind, tuple(labels), bounds)
            return self._families[name]

        self._old: list[tuple[Family, str]] = []
        for name, text, bounds in _HISTOGRAMS:
            old = "time_per_output_token_seconds" if name == "inter_token_latency_seconds" else None
            theirs(name, text, "histogram", bounds=bounds, old=old)
        for name, text in _COUNTERS:
            theirs(name, text, "counter")
        theirs(
            "prompt_tokens_by_source", "Prompt tokens by where their keys and values come from.", "counter", "source"
        )
        theirs(
            "request_success",
            "Answers that ended, by reason; refused ones never began.",
            "counter",
            "finished_reason",
        )
        for name, text, _ in _ENGINE_GAUGES:
            theirs(name, text, "gauge")
        theirs("num_requests_waiting", "Answers that wait: at the door, in the queue or for a prefix.", "gauge")
        theirs("num_requests_waiting_by_reason", "The same, by what they wait for.", "gauge", "reason")
        theirs("kv_cache_usage_perc", "Share of the blocks that are held, 0 to 1.", "gauge", old="gpu_cache_usage_perc")
        theirs("engine_sleep_state", "1 for the state the engine is in.", "gauge", "sleep_state")
        for name, text, _ in _ENGINE_COUNTERS:
            theirs(name, text, "counter")
        theirs("iteration_tokens_total", "Tokens a step.", "histogram", bounds=tuple(map(float, STEP_TOKEN_BOUNDS)))
        self.admission_rejections = Family(
            f"{prefix}admission_rejections",
            "Requests refused at the door, by reason.",
            "counter",
            ("model_name", "reason"),
        )
        self._families["admission_rejections"] = self.admission_rejections
        self._prefix = prefix

        for name, text, _ in _OUR_GAUGES:
            ours(name, text, "gauge", _ENGINE)
        for name, text, _ in _OUR_COUNTERS:
            ours(name, text, "counter", _ENGINE)
        ours(
            "prefix_cache_hit_ratio",
            "Share of looked up prompt tokens that were found, since the start.",
            "gauge",
            _ENGINE,
        )
        ours("kv_cache_fragmentation_ratio", "Share of held token slots that hold no token yet.", "gauge", _ENGINE)
        ours("engine_host_seconds", "Host time of the engine's steps, by part.", "counter", (*_ENGINE, "part"))
        ours("engine_restarts", "Times the engine's process was started again.", "counter", _ENGINE)
        ours("model_load_seconds", "From the order to load until it was ready.", "gauge", _ENGINE)
        ours("model_state", "1 for the state the model is in.", "gauge", (*_ENGINE, "state"))
        ours("queue_requests", "Prompts held at the door, by priority class.", "gauge", (*_ENGINE, "class"))
        ours("queue_tokens", "Tokens of prompts held at the door and of their expected answers.", "gauge", _ENGINE)
        ours("queue_admitted", "Answers let in that have not ended.", "gauge", _ENGINE)
        ours(
            "variant_requests", "Answers that ended, by version and reason.", "counter", (*_VARIANT, "finished_reason")
        )
        ours("variant_prompt_tokens", "Prompt tokens, by version.", "counter", _VARIANT)
        ours("variant_generation_tokens", "Tokens generated, by version.", "counter", _VARIANT)
        for name, text, bounds in (
            ("time_to_first_token", "From arrival to the first token, by version.", _VARIANT_FIRST_TOKEN_SECONDS),
            ("time_per_output_token", "Mean time a token after the first, by version.", _VARIANT_TOKEN_SECONDS),
            ("request_latency", "From arrival to the answer's end, by version.", _VARIANT_REQUEST_SECONDS),
        ):
            ours(f"variant_{name}_seconds", text, "histogram", _VARIANT, bounds)
        self.http_requests = ours(
            "http_requests", "HTTP requests by path template and status.", "counter", ("path", "code")
        )
        self.http_seconds = ours(
            "http_request_duration_seconds",
            "From a request's head to its answer's end.",
            "histogram",
            ("path",),
            _HTTP_SECONDS,
        )
        self.client_disconnects = ours("client_disconnects", "Requests whose client went away.", "counter")
        self.requests_aborted = ours(
            "requests_aborted", "Requests ended before their answer was complete.", "counter", ("model_name",)
        )
        self.request_errors = ours(
            "request_errors", "Requests answered with an error, by its code.", "counter", ("code",)
        )
        self.deadline_exceeded = ours("deadline_exceeded", "Requests that ran out of time.", "counter")
        self.auth_failures = ours("auth_failures", "Requests without a valid key, by reason.", "counter", ("reason",))
        self.log_lines_dropped = ours(
            "log_lines_dropped", "Log lines lost because their reader was too slow.", "counter"
        )
        ours("build_info", "The version that runs.", "gauge", ("version",)).labels(version).set(1)
        for counter in (self.client_disconnects, self.deadline_exceeded, self.log_lines_dropped):
            counter.inc(0)
        for reason in AUTH_FAILURES:
            self.auth_failures.labels(reason).inc(0)

    @staticmethod
    def engine_label(model_name: str, model_id: str) -> str:
        """The label that tells engines of one model name apart: the version of `name@version`, as vLLM `0` without one.

        It follows from the id alone, so that all processes of a server say the same.
        """
        return model_id.removeprefix(model_name).removeprefix("@") or "0"

    def model(self, model_name: str, engine: str = "0") -> ModelSeries:
        """The series of a model's requests."""
        series = self._models.get((model_name, engine))
        if series is None:
            series = self._models[model_name, engine] = ModelSeries(self._families, model_name, engine)
            # Alerts compare with what was: a series that begins with its first event has no before.
            self.requests_aborted.labels(model_name).inc(0)
            for reason in REJECTIONS:
                self.admission_rejections.labels(model_name, reason).inc(0)
        return series

    def variant(self, model_name: str, variant: str) -> VariantSeries:
        """The series of the version that answers for a name."""
        series = self._variants.get((model_name, variant))
        if series is None:
            series = self._variants[model_name, variant] = VariantSeries(self._families, model_name, variant)
        return series

    def forget(self, model_name: str, engine: str, variant: str, *, last: bool) -> None:
        """Drop the series of a model that is gone; a Prometheus takes that for what it is.

        Args:
            model_name: label.
            engine: label.
            variant: the model's id.
            last: no other model has the label `model_name`.
        """
        self._models.pop((model_name, engine), None)
        for key in [key for key in self._variants if key[1] == variant]:
            del self._variants[key]
        for family in self._families.values():
            if family.label_names[:2] == _ENGINE:
                family.drop(lambda values: values[:2] == (model_name, engine))
            elif family.label_names[:2] == _VARIANT:
                family.drop(lambda values: values[1] == variant)
            elif last and family.label_names[:1] == ("model_name",):
                family.drop(lambda values: values[0] == model_name)

    def expose(self, readings: Sequence[EngineReading]) -> bytes:
        """The text of `/metrics`.

        Args:
            readings: of every engine.
        """
        self._take(readings)
        parts = [line for family in self._families.values() for line in family.render()]
        parts += [line for family, name in self._old for line in family.render(name)]
        parts += self._infos(readings)
        return "".join(parts).encode() + generate_latest(self._process)

    # -------------------------------------------------------- from the engines

    def _take(self, readings: Sequence[EngineReading]) -> None:
        families = self._families
        for name in (
            *(name for name, _, _ in (*_ENGINE_GAUGES, *_OUR_GAUGES)),
            *(name for name, _, _ in (*_ENGINE_COUNTERS, *_OUR_COUNTERS)),
            "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc", "engine_sleep_state",
            "iteration_tokens_total", "prefix_cache_hit_ratio", "kv_cache_fragmentation_ratio", "engine_host_seconds",
            "engine_restarts", "model_load_seconds", "model_state", "queue_requests", "queue_tokens", "queue_admitted",
        ):  # fmt: skip
            families[name].clear()
        for reading in readings:
            labels = (reading.model_name, reading.engine)
            if reading.stats is not None:
                self.model(*labels)
            families["model_state"].labels(*labels, reading.state).set(1)
            families["engine_restarts"].labels(*labels).set(reading.restarts)
            if reading.load_seconds is not None:
                families["model_load_seconds"].labels(*labels).set(reading.load_seconds)
            held = int(reading.queue.get("waiting", 0))
            if reading.queue:
                for level, waiting in reading.queue["waiting_by_class"].items():
                    families["queue_requests"].labels(*labels, level).set(waiting)
                families["queue_tokens"].labels(*labels).set(reading.queue["waiting_tokens"])
                families["queue_admitted"].labels(*labels).set(reading.queue["in_engine"])
            if reading.stats is not None:
                self._take_stats(labels, reading.stats, held)

    def _take_stats(self, labels: tuple[str, str], stats: Mapping[str, Any], outside: int) -> None:
        families = self._families

        def put(name: str, value: float, *more: str) -> None:
            families[name].labels(*labels, *more).set(value)

        for name, _, keys in _ENGINE_GAUGES:
            put(name, sum(stats.get(key, 0) for key in keys))
        for name, _, key in (*_ENGINE_COUNTERS, *_OUR_GAUGES, *_OUR_COUNTERS):
            if key in stats:
                put(name, stats[key])
        waiting = {"capacity": stats["waiting"], "deferred": stats.get("deferred", 0), "admission": outside}
        put("num_requests_waiting", sum(waiting.values()))
        for reason, value in waiting.items():
            put("num_requests_waiting_by_reason", value, reason)
        total = max(stats["blocks_total"], 1)
        put("kv_cache_usage_perc", stats["blocks_used"] / total)
        for state in _SLEEP_STATES:
            put("engine_sleep_state", float(state == "awake"), state)
        put("prefix_cache_hit_ratio", stats["prefix_hit_tokens"] / max(stats["prefix_query_tokens"], 1))
        if "slots_unfilled" in stats:
            put("kv_cache_fragmentation_ratio", stats["slots_unfilled"] / max(stats["slots_held"], 1))
        for key, value in stats.items():
            if key.startswith(_HOST_PREFIX) and key.endswith(_HOST_SUFFIX):
                put("engine_host_seconds", value, key[len(_HOST_PREFIX) : -len(_HOST_SUFFIX)])
        if "step_tokens" in stats:
            histogram = families["iteration_tokens_total"].histogram(*labels)
            histogram.total = stats["step_tokens"]
            bounds = (*map(str, STEP_TOKEN_BOUNDS), "more")
            histogram.counts = [int(stats.get(f"step_tokens_{bound}", 0)) for bound in bounds]

    def _infos(self, readings: Sequence[EngineReading]) -> list[str]:
        """Gauges of 1 whose labels are the message; engines may have different ones."""
        lines: list[str] = []
        for name, text, what in (
            (f"{self._prefix}cache_config_info", "The KV cache of each engine.", "cache_config"),
            ("octavo_model_info", "The model of each engine.", "info"),
        ):
            kinds: dict[tuple[str, ...], Family] = {}
            for reading in readings:
                pairs: dict[str, str] = getattr(reading, what)
                if pairs:
                    names = tuple(pairs)
                    family = kinds.setdefault(names, Family(name, text, "gauge", (*_ENGINE, *names)))
                    family.labels(reading.model_name, reading.engine, *pairs.values()).set(1)
            rendered = [line for family in kinds.values() for line in family.render()]
            lines += [line for index, line in enumerate(rendered) if index == 0 or not line.startswith("#")]
        return lines
