"""An engine for looking into its steps: what `profile_step.py` and `tune_step.py` share."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import msgspec
from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine.loop import EngineLoop
from octavo.engine.loop_builder import build_loop
from octavo.engine.requests import RequestMaker, submit_checked
from octavo.loading.resolve import resolve_model
from octavo.runner import build_runner

__all__ = ["DEVICE", "Engine", "settings", "synchronize"]

DEVICE = os.environ.get("OCTAVO_TEST_DEVICE", "cuda")


def settings(model: str, changes: list[str]) -> EngineConfig:
    """Random weights and the sizes of the other benches, and what NAME=JSON changes."""
    values: dict[str, Any] = {"max_num_seqs": 256, "max_model_len": 9000, "load_format": "dummy", "dtype": "bfloat16"}
    for item in changes:
        name, _, value = item.partition("=")
        values[name] = msgspec.json.decode(value)
    return EngineConfig.of(model=model, device=DEVICE, **values)


class Engine:
    """A loop whose four parts of a step are timed.

    Attributes:
        loop: the engine.
        runner: the loop's.
        info: its model.
        times: seconds of each part, a step after the other.
        steps: launched so far.
    """

    def __init__(self, config: EngineConfig) -> None:
        runner, info = build_runner(config, resolve_model(config.model))
        self.loop: EngineLoop = build_loop(config, runner, info, None)
        self.info = info
        self.times: dict[str, list[float]] = {}
        self.steps = 0
        self.runner = runner
        self._core = self.loop.core
        self._maker = RequestMaker(info, 0)
        self._rng = random.Random(0)
        self._last_id = 0
        self._open: list[tuple[int, Any]] = []
        self._depth = 1 if (config.overlap if config.overlap is not None else DEVICE == "cuda") else 0

    def submit(self, prompt: int, output: int, *, prefix: list[int] | None = None) -> None:
        """A request of so many fresh tokens, after a prefix."""
        self._last_id += 1
        tokens = (prefix or []) + self.draw(prompt)
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        submit_checked(self._core, self._maker.check(self._last_id, tokens, params), self._last_id)

    def draw(self, count: int) -> list[int]:
        """Token ids."""
        return [self._rng.randrange(10, min(self.info.vocab_size, 30000)) for _ in range(count)]

    def has_work(self) -> bool:
        """Whether a step is left."""
        return bool(self._open) or self._core.has_work()

    def step(self) -> Any:
        """One step, as `EngineLoop.step`; gives the plan."""
        clock = time.perf_counter
        begin = clock()
        plan = self._core.plan()
        planned = clock()
        if plan is not None:
            self._open.append((plan.step, self.runner.launch(plan)))
            self.steps += 1
        launched = clock()
        if plan is not None and len(self._open) <= self._depth:
            return plan
        number, handle = self._open.pop(0)
        handle.result()
        there = clock()
        self._core.commit(number)
        committed = clock()
        for name, seconds in (
            ("plan", planned - begin),
            ("launch", launched - planned),
            ("wait", there - launched),
            ("commit", committed - there),
            ("whole", committed - begin),
        ):
            self.times.setdefault(name, []).append(seconds)
        return plan

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.has_work():
            self.step()

    def settle(self, batch: int, context: int, shared: int, output: int, steps: int) -> Any:
        """Bring rows to where a step is like the one before; gives the last plan.

        Args:
            batch: rows.
            context: tokens of a row's prompt.
            shared: of these, how many are common to all.
            output: tokens that each row may yet make.
            steps: of decode rows alone to have taken.
        """
        prefix = self.draw(shared)
        if shared:
            self.submit(0, 1, prefix=prefix)
            self.drain()
        for _ in range(batch):
            self.submit(context - shared, output, prefix=prefix)
        ready, plan = 0, None
        while ready < steps:
            plan = self.step()
            ready = ready + 1 if plan.num_decode_rows == plan.num_rows == batch else 0
        return plan

    def abandon(self, requests: int) -> None:
        """End the requests that were submitted last."""
        for request_id in range(self._last_id - requests + 1, self._last_id + 1):
            self.loop.core.abort(request_id)
        self.drain()


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        import torch

        torch.cuda.synchronize()
