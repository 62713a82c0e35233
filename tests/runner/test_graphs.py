"""The sizes that steps are padded to, and when a step is captured."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, ClassVar

import pytest
import torch
from octavo.errors import EngineDead
from octavo.layers.backends.cuda_inputs import StepSize
from octavo.runner.device import WHOLE_DEVICE
from octavo.runner.graphs import StepGraphs, bucket_table, buckets, samples_bound, step_sizes


def test_sizes() -> None:
    sizes = buckets(256, 8192)
    assert sizes[:12] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80]
    rows = [size for size in sizes if 64 <= size <= 256]
    assert rows == [64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert [size for size in sizes if 256 < size <= 1536] == [384, 512, 640, 768, 896, 1024, 1280, 1536]
    assert sizes[-3:] == [7168, 7680, 8192]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 7), (5, 2048), (100, 100), (250, 1000), (1024, 8192)])
def test_every_step_has_a_size(rows: int, tokens: int) -> None:
    sizes = buckets(rows, tokens)
    table = bucket_table(sizes)
    assert len(table) == tokens + 1
    assert all(size >= max(count, 1) and size in sizes for count, size in enumerate(table))
    assert table[rows] == rows, "a full step of decode rows is not padded"
    assert table[tokens] == tokens
    assert all(size <= max(8, 2 * count) for count, size in enumerate(table) if count > 1)


@pytest.mark.parametrize(("count", "most", "bound"), [(0, 256, 8), (8, 256, 8), (9, 256, 256), (3, 4, 4), (1, 1, 1)])
def test_few_samples_are_padded_to_few(count: int, most: int, bound: int) -> None:
    assert samples_bound(count, most) == bound


def test_all_sizes_of_step() -> None:
    decode = [("decode", n, n) for n in (1, 2, 3)] + [("grouped", n, n) for n in (1, 2, 3)]
    prompts = [(kind, n, min(n, 3)) for kind in ("mixed", "mixed_grouped") for n in (1, 2, 3, 4, 8, 12)]
    assert sorted(step_sizes(3, 12)) == sorted(decode + prompts)
    # A few samples, and the most.
    assert {size.samples for size in step_sizes(100, 1000) if size[:2] == ("mixed", 1000)} == {8, 100}
    assert len(set(step_sizes(100, 1000))) == len(step_sizes(100, 1000))


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    made: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        self.calls: list[str] = []
        Graph.made.append(self)

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert pool == "pool"
        self.calls.append(f"begin {capture_error_mode}")

    def capture_end(self) -> None:
        self.calls.append("end")

    def replay(self) -> None:
        self.calls.append("replay")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")


@pytest.mark.usefixtures("graphs")
def test_the_first_step_of_a_kind_runs_and_later_ones_are_captured_once() -> None:
    launched: list[StepSize] = []
    steps = StepGraphs(launched.append)
    eight, four, mixed = StepSize("decode", 8, 8), StepSize("decode", 4, 4), StepSize("mixed", 8, 8)
    grouped = StepSize("mixed_grouped", 8, 8)
    for size in (eight, eight, eight, four, mixed, grouped, four):
        steps.run(size)
    assert launched == [eight, eight, four, mixed, grouped]
    assert [graph.calls for graph in Graph.made] == [
        ["begin relaxed", "end", "replay", "replay"],
        ["begin relaxed", "end", "replay", "replay"],
    ]
    assert steps.num_captured == 2


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_waits_for_the_device_while_a_graph_is_captured(fails: bool) -> None:
    free: list[bool] = []

    def probe() -> None:
        free.append(WHOLE_DEVICE.acquire(blocking=False))
        if free[-1]:
            WHOLE_DEVICE.release()

    def step(_size: StepSize) -> None:
        other = threading.Thread(target=probe)
        other.start()
        other.join()
        if fails and len(free) == 2:
            raise RuntimeError("out of memory")

    steps = StepGraphs(step)
    steps.run(StepSize("decode", 1, 1))
    with pytest.raises(EngineDead) if fails else contextlib.nullcontext():
        steps.run(StepSize("decode", 2, 2))
    probe()
    assert free == [True, False, True]


@pytest.mark.usefixtures("graphs")
def test_a_capture_that_fails_ends_the_engine() -> None:
    fails = False

    def step(_size: StepSize) -> None:
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing\nFor debugging, pass...")

    steps = StepGraphs(step)
    steps.run(StepSize("mixed", 16, 8))
    fails = True
    with pytest.raises(EngineDead, match=r"a mixed step of 32 tokens could not be captured .*: op.*capturing$"):
        steps.run(StepSize("mixed", 32, 8))
    assert Graph.made[-1].calls == ["begin relaxed", "end"]


@pytest.mark.usefixtures("graphs")
def test_the_end_of_a_broken_capture_hides_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(size: StepSize) -> None:
        if size.tokens == 32:
            raise RuntimeError("out of memory")

    def capture_end(_graph: Graph) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(Graph, "capture_end", capture_end)
    steps = StepGraphs(step)
    steps.run(StepSize("mixed", 16, 8))
    with pytest.raises(EngineDead, match="as a CUDA graph: out of memory"):
        steps.run(StepSize("mixed", 32, 8))
