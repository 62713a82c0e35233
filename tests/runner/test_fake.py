from __future__ import annotations

import subprocess
import sys

import numpy as np
from octavo.runner.fake import FakeRunner, fake_model_info
from plan_writer import PlanWriter

TABLES = {slot: [slot + 1] for slot in range(6)}


def run(order: list[int]) -> dict[int, list[int]]:
    """Three tokens for each slot's prompt, the slots in some order in the batch."""
    runner, writer = FakeRunner(fake_model_info(vocab_size=500)), PlanWriter()
    runner.attach(writer)  # type: ignore[arg-type]
    plan = writer.plan([(slot, [slot + 40, 7, 9 + slot], 0) for slot in order], TABLES)
    answers: dict[int, list[int]] = {slot: [] for slot in order}
    for step in range(3):
        assert runner.launch(plan).result().num_logits == len(order)
        for slot, token in zip(order, writer.sampled(plan), strict=True):
            answers[slot].append(token)
        plan = writer.plan([(slot, [-1], 3 + step) for slot in order], TABLES)
    assert runner.num_steps == 3
    return answers


def test_answers_do_not_depend_on_the_batch() -> None:
    together = run([0, 1, 2, 3])
    assert together == {**run([3, 1]), **run([2]), **run([0])}
    assert len({tuple(answer) for answer in together.values()}) == 4


def test_tokens_are_spread_over_the_vocabulary() -> None:
    runner, writer = FakeRunner(fake_model_info(vocab_size=10)), PlanWriter()
    runner.attach(writer)  # type: ignore[arg-type]
    seen: list[int] = []
    plan = writer.plan([(0, [5, 6], 0)], {0: list(range(1, 40))})
    for position in range(2, 302):
        runner.launch(plan).result()
        seen += writer.sampled(plan)
        plan = writer.plan([(0, [-1], position)], {0: list(range(1, 40))})
    assert np.bincount(seen, minlength=10).min() > 10


def test_it_loads_no_torch() -> None:
    code = "import sys, octavo.runner.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
