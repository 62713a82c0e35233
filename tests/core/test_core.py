"""The core through its binding: the four verbs on arrays in memory that Python owns."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from octavo import _core

SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 9,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "vocab_size": 100,
    "eos_token_ids": [2],
}


class Engine:
    """A core with its memory; the model answers each sequence with the position of its last token."""

    def __init__(self, **settings: Any) -> None:
        self.core = _core.Core(**{**SETTINGS, **settings})
        arenas = np.zeros((3, self.core.arena_len()), np.int32)
        results = np.zeros((3, SETTINGS["max_num_seqs"]), np.int32)
        self.arenas, self.results = arenas, results
        self.core.attach(
            [(row.ctypes.data, row.size) for row in arenas],
            [(row.ctypes.data, row.size) for row in results],
            (arenas, results),
        )
        self.layout = {name: slice(start, start + size) for name, start, size in self.core.layout()}

    def array(self, plan: _core.StepPlan, name: str) -> np.ndarray:
        return self.arenas[plan.arena][self.layout[name]]

    def launch(self, plan: _core.StepPlan) -> None:
        rows = self.array(plan, "logits_rows")[: plan.num_logits]
        self.results[plan.arena][: plan.num_logits] = self.array(plan, "positions")[rows]

    def run(self) -> dict[tuple[int, int], list[int]]:
        """Run until nothing is left; tokens by (request, answer)."""
        answers: dict[tuple[int, int], list[int]] = {}
        while self.core.has_work():
            plan = self.core.plan()
            assert plan is not None
            self.launch(plan)
            frame = self.core.commit(plan.step)
            ids = np.frombuffer(frame.request_ids, np.int64).tolist()
            samples = np.frombuffer(frame.sample_indices, np.int32).tolist()
            for key, token in zip(
                zip(ids, samples, strict=True), np.frombuffer(frame.token_ids, np.int32), strict=True
            ):
                answers.setdefault(key, []).append(int(token))
            self.core.check_invariants()
        return answers


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def test_answers_and_counts() -> None:
    engine = Engine()
    engine.core.submit(7, ids(*range(3, 23)), arrival_us=0, max_tokens=5)
    engine.core.submit(-8, ids(5, 6), arrival_us=1, max_tokens=3, n=2)
    assert engine.run() == {(7, 0): [19, 20, 21, 22, 23], (-8, 0): [1, 2], (-8, 1): [1, 2]}
