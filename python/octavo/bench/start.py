"""`start`: from process start to the first token."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import msgspec

from octavo.bench import workloads
from octavo.bench.command import BenchOptions, Results, progress
from octavo.config import EngineConfig
from octavo.errors import ConfigError

__all__ = ["start"]

_TIMEOUT = 1800.0


def start(config: EngineConfig, options: BenchOptions) -> Results:
    """`cold_s` with empty kernel caches (the first process), `warm_s` the median of those after it.

    The files of the model may be in the page cache either way.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-start-") as caches:
        environment = {**os.environ, "TRITON_CACHE_DIR": caches, "CUDA_CACHE_PATH": caches}
        times = []
        for repeat in range(options.runs + 1):
            kind = f"warm start {repeat} of {options.runs}" if repeat else "cold start"
            progress(f"{options.workload}: {kind} of {config.model}")
            times.append(_one(config, environment))
    return [{"cold_s": round(times[0], 3), "warm_s": round(median(times[1:]), 3), "runs": options.runs}]


def _one(config: EngineConfig, environment: dict[str, str]) -> float:
    settings = msgspec.json.encode(config).decode()
    begin = time.perf_counter()
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "octavo.bench.start", settings],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"start: the process failed: {lines[-1]}")
    # Both clocks are the system's monotonic one.
    return float(done.stdout.split()[-1]) - begin


def _first_token() -> None:
    """The process that is measured: prints the time of its first token."""
    from octavo.engine.llm import LLM
    from octavo.sampling_params import SamplingParams

    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    settings = {name: getattr(config, name) for name in config.__struct_fields__ if name != "model"}
    with LLM(config.model, **settings) as llm:
        ((prompt, _),) = workloads.demo("W2")
        prompt = [token % llm.model.vocab_size for token in prompt]
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
        sys.stdout.write(f"{time.perf_counter()}\n")


if __name__ == "__main__":
    _first_token()
