"""The metrics of one server, scraped at `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest

from octavo.engine.step_sizes import STEP_TOKEN_BOUNDS
from octavo.server.observability.metric_definitions import (
    AUTH_FAILURES,
    DEFINITIONS,
    ENGINE_LABELS,
    ENGINE_STATS,
    FINISH_REASONS,
    REJECTIONS,
    SOURCES,
    VARIANT_LABELS,
)
from octavo.server.observability.metric_types import Family, Histogram, Value

__all__ = ["EngineReading", "Metrics", "ModelSeries", "VariantSeries"]

_HOST_PREFIX, _HOST_SUFFIX = "host_", "_seconds"
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class EngineReading(msgspec.Struct):
    """State and statistics of one engine at a scrape.

    Attributes:
        model_name: label.
        engine: label that distinguishes engines of one model name.
        variant: the model's id in the registry.
        stats: gauges and counters of the engine; None if it did not answer.
        info: constants of the model, the labels of `octavo_model_info`.
        cache_config: constants of its KV cache, the labels of `cache_config_info`.
        state: loading, ready, ...
        restarts: of its process.
        load_seconds: duration of the load.
        queue: `AdmissionQueue.stats()` of the queue in front of it.
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
    """The series of one model's requests, looked up once."""

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
            by_source.labels(model_name, engine, source) for source in SOURCES
        )
        success = families["request_success"]
        self.finished = {reason: success.labels(model_name, engine, reason) for reason in FINISH_REASONS}


class VariantSeries:
    """The series of one version behind a name."""

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
    """All metrics of one server, written and read in its event loop only.

    Args:
        version: of the program.
        prefix: of vLLM's metrics; `octavo_` gives all metrics one prefix.
        old_names: show renamed metrics of vLLM under their former name too.

    Attributes:
        http_requests: by path template and status.
        http_seconds: by path template, without paths that machines request every few seconds.
        client_disconnects: requests with a client that disconnected.
        requests_aborted: requests that ended before they were complete, by model.
        request_errors: by the error object's `code`.
        deadline_exceeded: requests that exceeded their deadline.
        auth_failures: requests without access, by reason.
        admission_rejections: by model and reason.
        log_lines_dropped: lines dropped, as the reader of the log is too slow.
    """

    def __init__(self, version: str, *, prefix: str = "vllm:", old_names: bool = False) -> None:
        self._prefix = prefix
        self._families = {
            definition.name: Family(
                (prefix if definition.vllm else "octavo_") + definition.name,
                definition.text,
                definition.kind,
                definition.labels,
                definition.bounds,
            )
            for definition in DEFINITIONS
        }
        self._old_names = [
            (self._families[definition.name], prefix + definition.old_name)
            for definition in DEFINITIONS
            if old_names and definition.old_name is not None
        ]
        self._models: dict[tuple[str, str], ModelSeries] = {}
        self._variants: dict[tuple[str, str], VariantSeries] = {}
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self.admission_rejections = self._families["admission_rejections"]
        self.http_requests = self._families["http_requests"]
        self.http_seconds = self._families["http_request_duration_seconds"]
        self.client_disconnects = self._families["client_disconnects"]
        self.requests_aborted = self._families["requests_aborted"]
        self.request_errors = self._families["request_errors"]
        self.deadline_exceeded = self._families["deadline_exceeded"]
        self.auth_failures = self._families["auth_failures"]
        self.log_lines_dropped = self._families["log_lines_dropped"]
        self._families["build_info"].labels(version).set(1)
        for counter in (self.client_disconnects, self.deadline_exceeded, self.log_lines_dropped):
            counter.inc(0)
        for reason in AUTH_FAILURES:
            self.auth_failures.labels(reason).inc(0)

    @staticmethod
    def engine_label(model_name: str, model_id: str) -> str:
        """The label that distinguishes engines of one model name: the version of `name@version`, or `0` as in vLLM.

        It depends on the id only, so all processes of a server use the same one.
        """
        return model_id.removeprefix(model_name).removeprefix("@") or "0"

    def model(self, model_name: str, engine: str = "0") -> ModelSeries:
        """The series of a model's requests."""
        series = self._models.get((model_name, engine))
        if series is None:
            series = self._models[model_name, engine] = ModelSeries(self._families, model_name, engine)
            # Alerts compare with the value before, so a series must exist before its first event.
            self.requests_aborted.labels(model_name).inc(0)
            for reason in REJECTIONS:
                self.admission_rejections.labels(model_name, reason).inc(0)
        return series

    def variant(self, model_name: str, variant: str) -> VariantSeries:
        """The series of one version that answers for a name."""
        series = self._variants.get((model_name, variant))
        if series is None:
            series = self._variants[model_name, variant] = VariantSeries(self._families, model_name, variant)
        return series

    def forget(self, model_name: str, engine: str, variant: str, *, last: bool) -> None:
        """Drop the series of a removed model.

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
            if family.label_names[:2] == ENGINE_LABELS:
                family.drop(lambda values: values[:2] == (model_name, engine))
            elif family.label_names[:2] == VARIANT_LABELS:
                family.drop(lambda values: values[1] == variant)
            elif last and family.label_names[:1] == ("model_name",):
                family.drop(lambda values: values[0] == model_name)

    def expose(self, readings: Sequence[EngineReading]) -> bytes:
        """The text of `/metrics`.

        Args:
            readings: of all engines.
        """
        for definition in DEFINITIONS:
            if definition.from_engine:
                self._families[definition.name].clear()
        for reading in readings:
            self._take(reading)
        parts = [line for family in self._families.values() for line in family.render()]
        parts += [line for family, name in self._old_names for line in family.render(name)]
        parts += self._infos(readings)
        return "".join(parts).encode() + generate_latest(self._process)

    # -------------------------------------------------------- from the engines

    def _take(self, reading: EngineReading) -> None:
        families, labels = self._families, (reading.model_name, reading.engine)
        if reading.stats is not None:
            self.model(*labels)
        families["model_state"].labels(*labels, reading.state).set(1)
        families["engine_restarts"].labels(*labels).set(reading.restarts)
        if reading.load_seconds is not None:
            families["model_load_seconds"].labels(*labels).set(reading.load_seconds)
        if reading.queue:
            for level, waiting in reading.queue["waiting_by_class"].items():
                families["queue_requests"].labels(*labels, level).set(waiting)
            families["queue_tokens"].labels(*labels).set(reading.queue["waiting_tokens"])
            families["queue_admitted"].labels(*labels).set(reading.queue["in_engine"])
        if reading.stats is not None:
            self._take_stats(labels, reading.stats, int(reading.queue.get("waiting", 0)))

    def _take_stats(self, labels: tuple[str, str], stats: Mapping[str, Any], queued: int) -> None:
        families = self._families

        def put(name: str, value: float, *more: str) -> None:
            families[name].labels(*labels, *more).set(value)

        put("num_requests_running", stats.get("running", 0))
        for name, stat in ENGINE_STATS:
            if stat in stats:
                put(name, stats[stat])
        waiting = {"capacity": stats["waiting"], "deferred": stats.get("deferred", 0), "admission": queued}
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
        """Gauges with the value 1 and the information in their labels. Engines may have different labels."""
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
                    family = kinds.setdefault(names, Family(name, text, "gauge", (*ENGINE_LABELS, *names)))
                    family.labels(reading.model_name, reading.engine, *pairs.values()).set(1)
            rendered = [line for family in kinds.values() for line in family.render()]
            lines += [line for index, line in enumerate(rendered) if index == 0 or not line.startswith("#")]
        return lines
