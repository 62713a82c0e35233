"""The core through its binding: the four verbs, on arrays in memory that Python owns."""

from __future__ import annotations

import math
import struct
import weakref
from array import array
from typing import Any

import numpy as np
import pytest
from octavo import _core
from octavo.errors import CapacityExceeded, ConfigError, ContextLengthExceeded, InvalidRequest

SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 9,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 160,
    "vocab_size": 200,
    "eos_token_ids": [2],
}


class Engine:
    """A core with its memory. The model draws the position of a row's last token."""

    def __init__(self, **settings: Any) -> None:
        self.core = _core.Core(**{**SETTINGS, **settings})
        self.arenas = np.full((3, self.core.arena_len()), -7, np.int32)
        self.results = np.zeros((3, SETTINGS["max_num_seqs"]), np.int32)
        regions = [[(row.ctypes.data, row.size) for row in part] for part in (self.arenas, self.results)]
        self.core.attach(*regions, (self.arenas, self.results))
        self.layout = {name: slice(start, start + size) for name, start, size in self.core.layout()}

    def array(self, plan: _core.StepPlan, name: str, size: int) -> list[int]:
        return self.arenas[plan.arena][self.layout[name]][:size].tolist()

    def launch(self) -> _core.StepPlan | None:
        plan = self.core.plan()
        if plan is not None:
            positions = self.array(plan, "positions", plan.num_tokens)
            rows = self.array(plan, "logits_rows", plan.num_logits)
            self.results[plan.arena][: plan.num_logits] = [positions[row] for row in rows]
        return plan

    def step(self) -> _core.StepOutput:
        plan = self.launch()
        assert plan is not None
        return self.core.commit(plan.step)

    def run(self) -> dict[tuple[int, int], list[int]]:
        """Run until nothing is left; tokens by (request, answer)."""
        answers: dict[tuple[int, int], list[int]] = {}
        while self.core.has_work():
            frame = self.step()
            keys = zip(int64(frame.request_ids), int32(frame.sample_indices), strict=True)
            for key, token in zip(keys, int32(frame.token_ids), strict=True):
                answers.setdefault(key, []).append(token)
            self.core.check_invariants()
        return answers


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def int32(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def int64(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int64).tolist()


def test_answers_and_counts() -> None:
    engine = Engine()
    engine.core.submit(7, ids(*range(3, 23)), arrival_us=0, max_tokens=5)
    engine.core.submit(-8, ids(5, 6), arrival_us=1, max_tokens=3, n=2)
    assert engine.run() == {(7, 0): [19, 20, 21, 22, 23], (-8, 0): [1, 2], (-8, 1): [1, 2]}
    stats = engine.core.stats()
    expected = {"requests": 2, "finished_stop": 2, "finished_length": 1, "prompt_tokens": 22, "generated_tokens": 9}
    assert {name: stats[name] for name in expected} == expected
    assert stats["blocks_free"] == stats["blocks_total"] == 8
    assert engine.core.reset_prefix_cache() == 1


def test_plan_arrays_lie_where_the_layout_says() -> None:
    engine = Engine()
    names = [name for name, _, _ in engine.core.layout()]
    assert names[:4] == ["counts", "rows", "query_start", "seq_lens"]
    assert names[-3:] == ["token_ids", "positions", "slot_mapping"]
    # Every array begins on a cache line, right after the one before.
    ends = [-(-(start + size) // 32) * 32 for _, start, size in engine.core.layout()]
    assert [start for _, start, _ in engine.core.layout()] == [0, *ends[:-1]]
    assert ends[-1] == engine.core.arena_len()

    engine.core.submit(1, ids(*range(10, 28)), arrival_us=0, max_tokens=4, temperature=0.5, top_k=3, seed=-1)
    plan = engine.launch()
    assert plan is not None
    assert (plan.step, plan.arena, plan.num_tokens, plan.num_rows, plan.num_decode_rows) == (1, 1, 18, 1, 0)
    assert (plan.num_logits, plan.max_seq_len, plan.max_query_len) == (1, 18, 18)
    assert engine.array(plan, "token_ids", 18) == list(range(10, 28))
    assert engine.array(plan, "positions", 18) == list(range(18))
    blocks = engine.array(plan, "table_blocks", plan.num_table_updates)
    assert engine.array(plan, "table_indices", 2) == [0, 1]
    expected = [blocks[position // 16] * 16 + position % 16 for position in range(18)]
    assert engine.array(plan, "slot_mapping", 18) == expected
    assert engine.array(plan, "query_start", 2) == [0, 18]
    assert engine.array(plan, "logits_rows", 1) == [17]
    values = engine.array(plan, "param_values", 16)
    assert struct.pack("i", values[0]) == struct.pack("f", 0.5)
    assert values[6:9] == [3, -1, -1]
    assert engine.core.history(0) == ids(*range(10, 28))

    ahead = engine.core.plan()
    assert ahead is not None
    assert engine.array(ahead, "token_ids", 1) == [-1], "the token is on the device still"
    with pytest.raises(ValueError, match="two steps are open"):
        engine.core.plan()
    with pytest.raises(ValueError, match="not the oldest open step"):
        engine.core.commit(ahead.step)
    frame = engine.core.commit(plan.step)
    assert (frame.num_events, int32(frame.logit_indices), int32(frame.token_ids)) == (1, [0], [17])
    assert engine.core.history(0) == ids(*range(10, 28), 17)


def test_text_stop_and_cached_tokens() -> None:
    letters = [bytes([97 + token % 26]) for token in range(200)]
    engine = Engine(token_table=_core.TokenTable(letters, bytes(200)))
    prompt = ids(*range(3, 38))
    engine.core.submit(1, prompt, arrival_us=0, max_tokens=9, stop=[b"q", b"lm"])
    frames = []
    while engine.core.has_work():
        frames.append(engine.step())
    assert [frame.text for frame in frames] == [b"i", b"j", b"k", b"", b""]
    assert [int32(frame.finish_reasons) for frame in frames] == [[0], [0], [0], [0], [1]]
    assert int32(frames[-1].stop_reasons) == [-2]

    engine.core.submit(2, prompt, arrival_us=9, max_tokens=9, stop_token_ids=[36], include_stop_str_in_output=True)
    last = [engine.step() for _ in range(3)][-1]
    assert (int32(last.finish_reasons), int32(last.stop_reasons), last.text) == ([1], [36], b"k")
    assert int32(last.cached_tokens) == [32]
    engine.core.submit(3, prompt, arrival_us=9, max_tokens=1, cache_salt=b"mine")
    assert int32(engine.step().cached_tokens) == [0]


def test_abort_frees_and_tells_nothing() -> None:
    engine = Engine()
    engine.core.submit(1, ids(4, 5), arrival_us=0, max_tokens=9)
    plan = engine.launch()
    assert plan is not None
    assert engine.core.abort(1)
    assert not engine.core.abort(1)
    assert engine.core.has_work(), "a step is in flight"
    assert engine.core.commit(plan.step).num_events == 0
    assert not engine.core.has_work()
    assert engine.core.plan() is None


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"prompt_token_ids": b""}, InvalidRequest, "prompt"),
        ({"prompt_token_ids": b"abc"}, InvalidRequest, "prompt"),
        ({"prompt_token_ids": ids(-1)}, InvalidRequest, "prompt"),
        ({"prompt_token_ids": ids(200)}, InvalidRequest, "prompt"),
        ({"prompt_token_ids": ids(*[5] * 160)}, ContextLengthExceeded, "prompt"),
        ({"max_tokens": 140}, CapacityExceeded, "max_tokens"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"max_tokens": -5}, InvalidRequest, "max_tokens"),
        ({"min_tokens": -1}, InvalidRequest, "min_tokens"),
        ({"n": 5}, InvalidRequest, "n"),
        ({"temperature": float("nan")}, InvalidRequest, "temperature"),
        ({"top_p": 0.0}, InvalidRequest, "top_p"),
        ({"top_k": -2}, InvalidRequest, "top_k"),
        ({"min_p": 2.0}, InvalidRequest, "min_p"),
        ({"logprobs": -2}, InvalidRequest, "logprobs"),
        ({"stop": [b"x"]}, InvalidRequest, "stop"),
        ({"stop_token_ids": [200]}, InvalidRequest, "stop_token_ids"),
        ({"request_id": 1}, InvalidRequest, "request_id"),
    ],
)
def test_bad_requests_name_their_field(change: dict[str, Any], error: type[InvalidRequest], field: str) -> None:
    engine = Engine()
    good: dict[str, Any] = {"request_id": 2, "prompt_token_ids": ids(4), "arrival_us": 0, "max_tokens": 3}
    engine.core.submit(**{**good, "request_id": 1})
    with pytest.raises(error) as caught:
        engine.core.submit(**{**good, **change})
    assert type(caught.value) is error
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    if field in change and isinstance(change[field], int | float):
        assert f"{change[field]:g}" in str(caught.value).lower()
    engine.core.submit(**good)
    assert len(engine.run()) == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_blocks": 1}, "num_blocks"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
        ({"policy": "random"}, "policy"),
        ({"eos_token_ids": [200]}, "eos_token_ids"),
        ({"num_blocks": 1 << 27}, "num_blocks"),
    ],
)
def test_bad_settings_are_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        _core.Core(**{**SETTINGS, **change})


def test_memory_is_checked_once_and_kept_alive() -> None:
    core = _core.Core(**SETTINGS)
    core.submit(1, ids(4), arrival_us=0, max_tokens=1)
    with pytest.raises(ValueError, match="call attach first"):
        core.plan()
    size = core.arena_len()
    memory = np.zeros(4 * size, np.int32)
    start = memory.ctypes.data
    good = [(start, size)] * 3
    for arenas, message in [
        (good[:2], "2 given, but 3 are needed"),
        ([*good[:2], (start, size - 1)], "number 2 has"),
        ([(0, size), *good[:2]], "number 0 is not aligned"),
        ([(start + 2, size), *good[:2]], "number 0 is not aligned"),
        ([(2**64 - 4, size), *good[:2]], "number 0 ends past the address space"),
    ]:
        with pytest.raises(ValueError, match=message):
            core.attach(arenas, good, memory)
    with pytest.raises(ValueError, match="results: number 0 has 3 int32 elements, but 4 are needed"):
        core.attach(good, [(start, 3)] * 3, memory)
    core.attach(good, good, memory)
    alive = weakref.ref(memory)
    del memory
    assert core.plan() is not None
    assert alive() is not None
    del core
    assert alive() is None


def test_a_sampled_id_outside_the_vocabulary_is_refused() -> None:
    engine = Engine()
    engine.core.submit(1, ids(4), arrival_us=0, max_tokens=1)
    plan = engine.launch()
    assert plan is not None
    engine.results[plan.arena][0] = 200
    with pytest.raises(ValueError, match="200 at place 0 is outside the vocabulary of 200"):
        engine.core.commit(plan.step)
    engine.results[plan.arena][0] = 3
    assert engine.core.commit(plan.step).num_events == 1


def test_plans_are_written_into_tensors_in_place() -> None:
    import torch

    core = _core.Core(**SETTINGS)
    arenas = [torch.zeros(core.arena_len(), dtype=torch.int32) for _ in range(3)]
    results = [torch.zeros(SETTINGS["max_num_seqs"], dtype=torch.int32) for _ in range(3)]
    regions = [[(tensor.data_ptr(), tensor.numel()) for tensor in part] for part in (arenas, results)]
    core.attach(*regions, (arenas, results))
    starts = {name: start for name, start, _ in core.layout()}
    core.submit(1, ids(5, 6, 7), arrival_us=0, max_tokens=2)
    plan = core.plan()
    assert plan is not None
    start = starts["token_ids"]
    assert arenas[plan.arena][start : start + 3].tolist() == [5, 6, 7]
    results[plan.arena][0] = 9
    assert int32(core.commit(plan.step).token_ids) == [9]
    plan = core.plan()
    assert plan is not None
    assert arenas[plan.arena][start].item() == 9


def test_biases_and_masked_samples_are_in_the_plan() -> None:
    engine = Engine()
    prompt = array("i", range(20)).tobytes()
    engine.core.submit(7, prompt, arrival_us=0, max_tokens=3)
    engine.core.submit(8, prompt, arrival_us=0, max_tokens=3, n=2, constrained=True, logit_bias=[(5, -1.5), (2, 4.0)])
    seen: dict[tuple[int, int], int] = {}
    while engine.core.has_work():
        plan = engine.launch()
        assert plan is not None
        keys = np.frombuffer(engine.core.masked(), np.int64).reshape(-1, 2).tolist()
        counts = dict(zip(_core.COUNTS, engine.array(plan, "counts", len(_core.COUNTS)), strict=True))
        assert len(keys) == plan.num_masks == counts["num_masks"]
        masked = engine.array(plan, "mask_logits", plan.num_masks)
        count = plan.num_biases
        biased = engine.array(plan, "bias_logits", count)
        assert biased == [logit for logit in masked for _ in range(2)]
        assert engine.array(plan, "bias_tokens", count) == [5, 2] * plan.num_masks
        values = np.array(engine.array(plan, "bias_values", count), np.int32).view(np.float32)
        assert values.tolist() == [-1.5, 4.0] * plan.num_masks
        frame = engine.core.commit(plan.step)
        owners = zip(int64(frame.request_ids), int32(frame.sample_indices), strict=True)
        order = dict(zip(int32(frame.logit_indices), owners, strict=True))
        for logit, key in zip(masked, keys, strict=True):
            assert order[logit] == tuple(key)
            seen[tuple(key)] = seen.get(tuple(key), 0) + 1
    assert seen == {(8, 0): 3, (8, 1): 3}
    assert engine.core.masked()
    assert engine.core.plan() is None
    assert engine.core.masked() == b""


def test_biases_that_are_none_are_refused() -> None:
    engine = Engine()
    for bias in ([(200, 1.0)], [(3, math.nan)], [(3, math.inf)], [(3, 1.0), (3, 2.0)], [(3, 1.0)] * 1025):
        with pytest.raises(InvalidRequest) as caught:
            engine.core.submit(1, b"\0\0\0\0", arrival_us=0, max_tokens=3, logit_bias=bias)
        assert caught.value.field == "logit_bias"
    assert not engine.core.has_work()


def test_a_window_holds_fewer_blocks_than_full_attention() -> None:
    def most_blocks(windows: list[int]) -> int:
        engine = Engine(num_blocks=40, windows=windows)
        engine.core.submit(1, ids(*[7] * 150), arrival_us=0, max_tokens=8)
        most = 0
        while engine.core.has_work():
            engine.step()
            most = max(most, engine.core.stats()["blocks_used"])
        engine.core.check_invariants()
        return most

    # The last token drawn is never written: 157 tokens lie in 10 blocks. A window of 32 tokens and a row of 64 span 7.
    for windows, blocks in (([0], 10), ([32], 7), ([0, 32, 32], 24)):
        assert _core.max_blocks_per_sequence(157, 16, windows, 64) == blocks
        assert most_blocks(windows) == blocks
    with pytest.raises(ConfigError, match="windows: 0 cache groups"):
        Engine(windows=[])


def test_an_urgent_request_displaces_one_that_gives_the_same_tokens_later() -> None:
    engine = Engine(policy="priority", max_num_seqs=2)
    for request_id in (1, 2):
        engine.core.submit(request_id, ids(*[request_id] * 10), arrival_us=request_id, max_tokens=20, priority=1)
    for _ in range(3):
        engine.step()
    engine.core.submit(3, ids(5, 6, 7, 8, 9), arrival_us=9, max_tokens=4)
    assert int64(engine.step().request_ids) == [1, 3]
    assert engine.core.stats()["preemptions"] == 1
    answers = engine.run()
    assert answers[2, 0][-1] == 28
    assert sorted(map(len, answers.values())) == [3, 16, 17]
