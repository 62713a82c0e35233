"""`step`: what planning and committing cost, without a model."""

from __future__ import annotations

import gc
import random
import time
from array import array
from statistics import median

from octavo._core import Core
from octavo.bench.command import BenchOptions, Results, progress
from octavo.config import EngineConfig
from octavo.runner.fake import FakeRunner, fake_model_info

__all__ = ["step"]

_BLOCK_SIZE = 16
_PROMPT = 64
_WAITING_PROMPT = 16
_VOCABULARY = 30000
_CASES = ((1, 0), (32, 0), (256, 0), (1024, 0), (256, 10), (256, 10_000), (256, 100_000))
_TOKENS_A_RUN = 400


def step(config: EngineConfig, options: BenchOptions) -> Results:
    """`decode_rows`, `waiting`, `plan_us`, `commit_us`, `step_us`: medians over the steps of all runs."""
    results = []
    for rows, waiting in _CASES:
        progress(f"{options.workload}: {options.runs * _TOKENS_A_RUN} steps of {rows} rows, {waiting} waiting")
        results.append(_case(rows, waiting, options.runs, config))
    return results


def _case(rows: int, waiting: int, runs: int, config: EngineConfig) -> dict[str, int | float]:
    length = _PROMPT + runs * _TOKENS_A_RUN + 64
    info = fake_model_info(
        vocab_size=_VOCABULARY,
        num_blocks=rows * (length // _BLOCK_SIZE + 2) + 1,
        block_size=_BLOCK_SIZE,
        max_model_len=length,
    )
    core = Core(
        block_size=_BLOCK_SIZE,
        num_blocks=info.num_blocks,
        max_num_seqs=rows,
        max_num_batched_tokens=max(2048, rows),
        max_model_len=length,
        vocab_size=_VOCABULARY,
        eos_token_ids=[],
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    runner = FakeRunner(info)
    runner.attach(core)
    tokens = random.Random(f"step {rows} {waiting}")  # noqa: S311 - reproducible draws
    for request_id in range(rows + waiting):
        size = _PROMPT if request_id < rows else _WAITING_PROMPT
        prompt = array("i", [tokens.randrange(_VOCABULARY) for _ in range(size)])
        core.submit(
            request_id,
            prompt.tobytes(),
            arrival_us=request_id,
            max_tokens=length - size,
            temperature=0.0,
            ignore_eos=True,
        )
        if request_id == rows - 1:
            _prefill(core, runner, rows)
    plans, commits = _measured(core, runner, rows, runs * _TOKENS_A_RUN)
    wholes = [plan + commit for plan, commit in zip(plans, commits, strict=True)]
    return {
        "decode_rows": rows,
        "waiting": waiting,
        "plan_us": round(median(plans) / 1e3, 2),
        "commit_us": round(median(commits) / 1e3, 2),
        "step_us": round(median(wholes) / 1e3, 2),
        "runs": runs,
    }


def _measured(core: Core, runner: FakeRunner, rows: int, steps: int) -> tuple[list[int], list[int]]:
    """Nanoseconds of plan and commit in each of so many steps."""
    plans, commits = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            begin = time.perf_counter_ns()
            plan = core.plan()
            planned = time.perf_counter_ns()
            assert plan is not None
            assert plan.num_decode_rows == plan.num_rows == rows
            runner.launch(plan)
            launched = time.perf_counter_ns()
            core.commit(plan.step)
            committed = time.perf_counter_ns()
            plans.append(planned - begin)
            commits.append(committed - launched)
    finally:
        gc.enable()
    return plans, commits


def _prefill(core: Core, runner: FakeRunner, rows: int) -> None:
    """Step until every row decodes."""
    while True:
        plan = core.plan()
        assert plan is not None
        runner.launch(plan)
        core.commit(plan.step)
        if plan.num_decode_rows == rows:
            return
