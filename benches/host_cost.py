"""What `LLM.generate` costs the host: workloads through the whole engine around a runner without a model.

    python benches/host_cost.py short offline

Prints one JSON object a workload: `requests_s` of the whole call, `step_us` of the loop (plan, commit and what it does
with the outputs, the runner's own time taken off), and where the time goes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench import workloads
from octavo.config import EngineConfig
from octavo.engine.backend import LocalBackend
from octavo.engine.loop_builder import build_loop
from octavo.runner.fake import FakeRunner, fake_model_info

WORKLOADS: dict[str, Callable[[int], list[workloads.Request]]] = {
    "short": workloads.short,
    "offline": workloads.offline,
    "shared": lambda repeat: workloads.shared(repeat)[1],
    "prefill": lambda repeat: workloads.prefill(8192, repeat),
}


class Stopwatch:
    """A function, timed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds, self.calls = 0.0, 0
        self.first = self.last = 0.0

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = self._function(*arguments)
        self.last = time.perf_counter()
        self.first = self.first or begin
        self.seconds += self.last - begin
        self.calls += 1
        return result


def once(llm: LLM, runner: FakeRunner, requests: list[workloads.Request]) -> dict[str, float]:
    """One call of `generate`, taken apart."""
    backend: Any = llm._backend
    backend.submit, backend.step = submit, step = (
        Stopwatch(type(backend).submit.__get__(backend)),
        Stopwatch(type(backend).step.__get__(backend)),
    )
    runner.launch = launch = Stopwatch(FakeRunner.launch.__get__(runner))  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True) for _, output in requests]
    begin = time.perf_counter()
    llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    end = time.perf_counter()
    return {
        "requests_s": len(requests) / (end - begin),
        "host_us_a_request": (end - begin - launch.seconds) / len(requests) * 1e6,
        "check_ms": (submit.first - begin) * 1e3,
        "submit_ms": submit.seconds * 1e3,
        "steps": float(launch.calls),
        "step_us": (step.last - step.first - launch.seconds) / launch.calls * 1e6,
        "results_ms": (end - step.last) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What LLM.generate costs the host.")
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    config = EngineConfig(model="fake", max_num_seqs=256, max_num_batched_tokens=8192, overlap=True)
    info = fake_model_info(vocab_size=151936, num_blocks=40000, max_model_len=9000)
    runner = FakeRunner(info)
    llm = LLM.from_backend(config, LocalBackend(build_loop(config, runner, info, None), info, None))
    for name in options.workloads:
        draw = WORKLOADS[name]
        once(llm, runner, draw(0))
        taken = [once(llm, runner, draw(repeat)) for repeat in range(1, options.runs + 1)]
        figures = {key: round(median(one[key] for one in taken), 2) for key in taken[0]}
        print(json.dumps({"workload": name, **figures, "runs": options.runs}), flush=True)


if __name__ == "__main__":
    main()
