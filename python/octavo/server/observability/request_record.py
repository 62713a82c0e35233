"""Times and token counts of one request, recorded as its tokens arrive."""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

from octavo.errors import InvalidRequest
from octavo.server.error_responses import QueueTimeout

if TYPE_CHECKING:
    from octavo.engine.outputs import OutputDelta
    from octavo.sampling_params import SamplingParams
    from octavo.server.observability.metrics import Metrics

__all__ = ["RequestRecord"]

_now = time.monotonic


class Wait(Protocol):
    """The wait of a request in the queue.

    Attributes:
        waited: seconds until it was admitted.
    """

    waited: float

    @property
    def deadline_passed(self) -> bool:
        """Whether the request ran out of time."""
        ...


class RequestRecord:
    """Times and token counts of one request.

    `add` runs for each chunk, so it looks nothing up; the values of the whole request are recorded by `finish`.

    Args:
        metrics: of the server.
        model: name of the engine's model, the label.
        prompt_tokens: of all prompts together.
        num_prompts: of the request.
        name: the name in the request, if it differs.
        variant: the version that answers.
        engine: label of the engine that answers.
        arrival: `time.monotonic()` when the request arrived; None for now.

    Attributes:
        completion_tokens: tokens generated so far.
        finish_reason: of the completions that have ended; several different ones joined by commas.
    """

    __slots__ = (
        "_arrival", "_began", "_cached", "_ended", "_finish_reasons", "_first", "_gap_bounds",
        "_gap_counts", "_gaps", "_generated", "_last", "_last_at", "_metrics", "_num_answers", "_params", "_series",
        "_started", "_tokens", "_variant", "_wait", "completion_tokens", "model", "name", "prompt_tokens", "variant",
    )  # fmt: skip

    def __init__(
        self,
        metrics: Metrics,
        model: str,
        prompt_tokens: int,
        num_prompts: int,
        *,
        name: str | None = None,
        variant: str | None = None,
        engine: str = "0",
        arrival: float | None = None,
    ) -> None:
        self._metrics = metrics
        self.model = model
        self.name = name or model
        self.variant = variant
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._cached = [0] * num_prompts
        self._arrival = _now() if arrival is None else arrival
        self._began = 0.0
        self._wait: Wait | None = None
        self._first = 0.0
        self._started = 0.0
        self._ended = 0.0
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._last_at = 0.0
        self._finish_reasons: list[str] = []
        self._params: SamplingParams | None = None
        self._num_answers = num_prompts
        self._series = series = metrics.model(model, engine)
        self._variant = None if variant is None else metrics.variant(self.name, variant)
        self._generated = series.generation_tokens
        self._gaps = series.inter_token
        self._gap_bounds = series.inter_token.bounds
        self._gap_counts = series.inter_token.counts

    # -------------------------------------------------------- events

    def begin(self, params: SamplingParams) -> None:
        """Record the parameters, once, before the request is submitted."""
        self._params = params
        self._began = _now()
        self._num_answers = len(self._cached) * params.n

    def waits(self, wait: Wait) -> None:
        """The request joins the queue."""
        self._wait = wait

    @property
    def _admitted(self) -> float:
        """When the engine began to run it; before that is known, when the engine got it."""
        return (self._began or self._arrival) + (self.queue_time or 0.0)

    def add(self, prompt: int, choice: int, delta: OutputDelta) -> None:
        """Count new tokens of completion `choice`, which belongs to prompt `prompt`."""
        now = _now()
        count = len(delta.token_ids)
        if count:
            before = self._last.get(choice)
            if before is None:
                self._begin_answer(prompt, choice, delta, now)
            else:
                gap = now - before
                # Tokens that arrive together share the time since the last token.
                self._gap_counts[bisect_left(self._gap_bounds, gap if count == 1 else gap / count)] += count
                self._gaps.total += gap
            self._last[choice] = self._last_at = now
            self._generated.value += count
            self.completion_tokens += count
            if self._num_answers > 1:
                self._tokens[choice] = self._tokens.get(choice, 0) + count
        if delta.finish_reason is not None:
            self._end_answer(delta.finish_reason)

    def add_token(self, choice: int) -> None:
        """Count one more token of a completion that has begun. A faster `add` for pushed tokens."""
        now = _now()
        gap = now - self._last[choice]
        self._gap_counts[bisect_left(self._gap_bounds, gap)] += 1
        self._gaps.total += gap
        self._last[choice] = self._last_at = now
        self._generated.value += 1
        self.completion_tokens += 1
        if self._num_answers > 1:
            self._tokens[choice] = self._tokens.get(choice, 0) + 1

    def has_begun(self, choice: int) -> bool:
        """Whether a completion's first token was counted."""
        return choice in self._last

    def _begin_answer(self, prompt: int, choice: int, delta: OutputDelta, now: float) -> None:
        series = self._series
        if delta.num_cached_tokens and not self._cached[prompt]:
            self._cached[prompt] = delta.num_cached_tokens
            series.prompt_tokens_cached.value += delta.num_cached_tokens
        if not self._first:
            self._first = now
            self._started = delta.started_at
            series.prompt_tokens.value += self.prompt_tokens
            series.first_token.observe(now - self._arrival)
            if self._variant is not None:
                self._variant.prompt_tokens.value += self.prompt_tokens
                self._variant.first_token.observe(now - self._arrival)

    def _end_answer(self, reason: str) -> None:
        series = self._series
        (series.finished.get(reason) or series.finished["error"]).value += 1
        if self._variant is not None:
            (self._variant.finished.get(reason) or self._variant.finished["error"]).value += 1
        self._finish_reasons.append(reason)

    def finish(self) -> None:
        """The request is complete."""
        self._ended = now = _now()
        series, arrival, first = self._series, self._arrival, self._first or now
        admitted = self._admitted
        last = self._last_at or now
        if self._wait is not None and self._wait.deadline_passed:
            self._metrics.deadline_exceeded.inc()
        series.e2e.observe(now - arrival)
        series.queue.observe(self.queue_time or 0.0)
        series.prefill.observe(max(first - admitted, 0.0))
        series.decode.observe(last - first if self._first else 0.0)
        series.inference.observe(max(last - admitted, 0.0))
        series.prompt.observe(self.prompt_tokens)
        series.generation.observe(self.completion_tokens)
        series.max_generation.observe(max(self._tokens.values(), default=self.completion_tokens))
        series.prefill_computed.observe(self.prompt_tokens - self.cached_tokens)
        self._count_sources()
        series.params_n.observe(self.num_answers)
        if self.max_tokens is not None:
            series.params_max_tokens.observe(self.max_tokens)
        per_token = self.time_per_output_token
        if per_token is not None:
            series.per_token.observe(per_token)
        if self._variant is not None:
            self._variant.generation_tokens.value += self.completion_tokens
            self._variant.e2e.observe(now - arrival)
            if per_token is not None:
                self._variant.per_token.observe(per_token)

    def abandon(self) -> None:
        """The request ended early: by the error being handled, else because its client left.

        As in vLLM, a request that was refused before it ran does not count as ended. The HTTP status, the errors by
        code and the rejections count it.
        """
        self._ended = _now()
        error = sys.exc_info()[1]
        refused = self._wait is None or isinstance(error, InvalidRequest | QueueTimeout)
        if refused and isinstance(error, Exception) and not self._first:
            return
        reason = "error" if isinstance(error, Exception) else "abort"
        for _ in range(max(self._num_answers - len(self._finish_reasons), 1)):
            self._end_answer(reason)
        if self._variant is not None:
            self._variant.generation_tokens.value += self.completion_tokens
        if self._first:
            self._count_sources()
        self._metrics.requests_aborted.labels(self.model).inc()

    def _count_sources(self) -> None:
        cached = self.cached_tokens
        self._series.source_cached.value += cached
        self._series.source_computed.value += self.prompt_tokens - cached

    # -------------------------------------------------------- results

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(self._cached)

    @property
    def finish_reason(self) -> str | None:
        """Why its completions ended; different reasons joined by commas, None before the first end."""
        return ",".join(dict.fromkeys(self._finish_reasons)) or None

    @property
    def arrival(self) -> float:
        """`time.monotonic()` when the request came."""
        return self._arrival

    @property
    def queue_time(self) -> float | None:
        """Seconds in the queue; None if it never joined the queue.

        The time in the engine's queue is included once there is a token.
        """
        waited = None if self._wait is None else self._wait.waited
        if waited is None or not self._started:
            return waited
        return max(self._started - (self._began or self._arrival), waited)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token; None before."""
        return self._first - self._arrival if self._first else None

    @property
    def prefill_time(self) -> float | None:
        """Seconds from admission to the first token; None before."""
        return self._first - self._admitted if self._first else None

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the last so far; None before the first."""
        return self._last_at - self._first if self._first else None

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first token of a completion; None without such tokens."""
        answers = len(self._last)
        if not answers or self.completion_tokens <= answers:
            return None
        return (self._last_at - self._first) * answers / (self.completion_tokens - answers)

    @property
    def inference_time(self) -> float | None:
        """Seconds from admission to the last token so far; None before the first."""
        return self._last_at - self._admitted if self._first else None

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end; None before."""
        return self._ended - self._arrival if self._ended else None

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the completions that have ended, in that order."""
        return list(self._finish_reasons)

    @property
    def max_tokens(self) -> int | None:
        """From the request."""
        return None if self._params is None else self._params.max_tokens

    @property
    def temperature(self) -> float | None:
        """From the request."""
        return None if self._params is None else self._params.temperature

    @property
    def top_p(self) -> float | None:
        """From the request."""
        return None if self._params is None else self._params.top_p

    @property
    def num_answers(self) -> int:
        """Completions per prompt."""
        return 1 if self._params is None else self._params.n
