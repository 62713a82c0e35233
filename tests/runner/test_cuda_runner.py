"""What the GPU's runner does on the host: turns, faults, threads, and its end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo._core import NUM_ARENAS
from octavo.errors import EngineDead
from octavo.kernels.step import PlanLayout, Samples
from octavo.layers.backends.cuda_inputs import StepSize
from octavo.runner.cuda import CudaRunner
from octavo.runner.device import WHOLE_DEVICE
from octavo.runner.interface import ModelInfo
from plan_writer import MAX_NUM_SEQS, MAX_TOKENS, PlanWriter, params

TABLES = {0: [1, 2], 1: [3, 4], 2: [5, 6]}


class Step:
    """Stands in for `CudaStep`: notes what is launched."""

    def __init__(self, layout: PlanLayout, *, ring: int = 3, staging: int = 64) -> None:
        self.layout = layout
        self.arenas = torch.zeros((NUM_ARENAS, layout.length), dtype=torch.int32)
        self.ring = Samples.empty(MAX_NUM_SEQS, ring, torch.device("cpu"), ring=True)
        self.masks = torch.zeros((NUM_ARENAS, MAX_NUM_SEQS, 4), dtype=torch.int32)
        self.staging = torch.zeros((NUM_ARENAS, staging), dtype=torch.int32)
        self.launched: list[Any] = []
        self.fault: Exception | None = None

    def __call__(self, size: StepSize) -> None:
        if self.fault is not None:
            raise self.fault
        self.launched.append(size)

    def copy_blocks(self, turn: int) -> None:
        self.launched.append(("copy", turn))

    def count_history(self, tokens: torch.Tensor, slot: int, prompt_length: int) -> None:
        assert tokens.data_ptr() % 16 == 0
        self.launched.append((tokens.tolist(), slot, prompt_length))


class Device:
    """Stands in for `torch.cuda`: what was called, and whether the device still works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.broken = False
        self.current = threading.local()
        for name in ("set_device", "empty_cache", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_args, name=name: self.call(name))
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: getattr(self.current, "stream", "default"))
        monkeypatch.setattr(torch.cuda, "default_stream", lambda _device: "default")
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: self.object("stream"))
        monkeypatch.setattr(torch.cuda, "Event", lambda: self.object("event"))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")

    def object(self, name: str) -> Any:
        return SimpleNamespace(
            synchronize=lambda: self.call(f"{name} synchronize"), record=lambda _stream: self.call(f"{name} record")
        )

    def set_stream(self, stream: Any) -> None:
        self.current.stream = stream
        self.call("set_stream")

    def call(self, name: str) -> None:
        self.calls.append(name)
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


class Bench:
    """A runner whose steps are written by hand."""

    def __init__(self, device: str, **sizes: int) -> None:
        self.closed = 0
        self.core = PlanWriter()
        info = ModelInfo(
            name="m",
            architecture="M",
            max_model_len=64,
            vocab_size=99,
            num_blocks=9,
            block_size=16,
            max_num_seqs=MAX_NUM_SEQS,
            dtype="bfloat16",
            device="cuda",
            weights_bytes=0,
            kv_bytes=0,
        )

        def make(layout: PlanLayout) -> Any:
            self.step = Step(layout, **sizes)
            return self.step

        self.runner = CudaRunner(
            make,
            info,
            max_num_seqs=MAX_NUM_SEQS,
            max_tokens=MAX_TOKENS,
            device=torch.device(device),
            on_close=self.close,
        )
        self.runner.attach(self.core)  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed += 1

    def plan(self, *lengths: int, **changes: Any) -> Any:
        work = [(slot, list(range(length)), 0) for slot, length in enumerate(lengths)]
        return self.core.plan(work, TABLES, **changes)


def test_steps_go_by_kind_and_size() -> None:
    bench = Bench("cpu")
    for plan in (
        bench.plan(1),
        bench.plan(1, 1),
        bench.plan(1, 9),
        bench.plan(3, logits=[(0, slot) for slot in range(6)]),
        bench.plan(1, 1, copies=[(1, 2)]),
    ):
        bench.runner.launch(plan).result()
    for grouped in (bench.plan(1, 1), bench.plan(1, 1, 9)):
        grouped.num_groups = 1
        bench.runner.launch(grouped).result()
    copy = ("copy", 2)
    assert bench.step.launched == [
        ("decode", 1, 1),
        ("decode", 2, 2),
        ("mixed", 16, 6),
        ("mixed", 6, 6),
        copy,
        ("decode", 2, 2),
        ("grouped", 2, 2),
        ("mixed_grouped", 16, 6),
    ]


def test_two_steps_may_be_open_and_none_out_of_turn() -> None:
    bench = Bench("cpu")
    plans = [bench.plan(1) for _ in range(5)]
    with pytest.raises(RuntimeError, match="step 2 is out of turn"):
        bench.runner.launch(plans[1])
    handles = [bench.runner.launch(plan) for plan in plans[:2]]
    with pytest.raises(RuntimeError, match="step 3 is out of turn: 2 steps are open"):
        bench.runner.launch(plans[2])
    handles[0].result()
    bench.runner.launch(plans[2])


def test_log_probabilities_are_given_where_a_row_asks() -> None:
    bench = Bench("cpu")
    new = {0: params(logprobs=2), 1: params(), 2: params(logprobs=0)}
    both = bench.plan(1, 1, new_params=new)
    ring = bench.step.ring
    ring.top_ids[both.arena] = torch.arange(MAX_NUM_SEQS * 3, dtype=torch.int32).view(-1, 3)
    ring.logprobs[both.arena] = -torch.arange(MAX_NUM_SEQS, dtype=torch.float32)
    result = bench.runner.launch(both).result()
    assert result.num_logits == 2
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    assert result.logprobs.tolist() == [0, -1]
    assert result.top_ids.tolist() == [[0, 1], [3, 4]]
    assert result.top_logprobs.shape == (2, 2)

    chosen = bench.runner.launch(bench.core.plan([(2, [5], 0)], {2: [5]})).result()
    assert chosen.top_ids is not None
    assert chosen.top_ids.shape == (1, 0)
    assert bench.runner.launch(bench.core.plan([(1, [5], 0)], TABLES)).result().logprobs is None
    last = bench.plan(1, 1, new_params={0: params(), 2: params()})
    assert bench.runner.launch(last).result().logprobs is None


def test_histories_are_counted_before_the_step() -> None:
    bench = Bench("cpu", staging=16)
    bench.core.histories = {0: [4, 5, 6], 1: list(range(14)), 2: [7]}
    new = {0: params(presence=0.5, prompt_length=2), 1: params(repetition=1.5, prompt_length=14), 2: params()}
    bench.runner.launch(bench.plan(3, 14, new_params=new))
    assert bench.step.launched == [([4, 5, 6], 0, 2), (list(range(14)), 1, 14), ("mixed", 24, 6)]


def test_a_thread_that_launches_uses_the_steps_stream(cuda: Device) -> None:
    bench = Bench("cuda")
    cuda.calls.clear()
    bench.runner.launch(bench.plan(1)).result()
    assert cuda.calls == ["set_device", "set_stream", "event record", "event synchronize"]
    cuda.calls.clear()
    thread = threading.Thread(target=lambda: bench.runner.launch(bench.plan(3)).result())
    thread.start()
    thread.join()
    assert cuda.calls == ["set_device", "set_stream", "event record", "event synchronize"]
    cuda.calls.clear()
    bench.runner.close()
    assert cuda.calls == ["stream synchronize", "set_stream", "empty_cache"]
    assert cuda.current.stream == "default"


def test_engines_that_take_turns_in_a_thread_use_each_its_own_stream(cuda: Device) -> None:
    first, second = Bench("cuda"), Bench("cuda")
    for bench in (first, second):
        bench.runner._run = bench.step  # Nothing that could be captured.
    used = []
    for bench in (first, second, first, second):
        bench.runner.launch(bench.plan(1)).result()
        used.append(cuda.current.stream)
    assert used[:2] == used[2:]
    assert used[0] != used[1]
    first.runner.close()
    assert cuda.current.stream == used[1], "the second's, which goes on"
    cuda.calls.clear()
    second.runner.launch(second.plan(1)).result()
    assert "set_stream" not in cuda.calls


def test_what_concerns_the_whole_device_waits_for_captures(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("cuda")
    free: list[tuple[str, bool]] = []

    def probe(name: str) -> None:
        acquired = WHOLE_DEVICE.acquire(blocking=False)
        free.append((name, acquired))
        if acquired:
            WHOLE_DEVICE.release()

    def called(name: str) -> None:
        other = threading.Thread(target=probe, args=(name,))
        other.start()
        other.join()

    monkeypatch.setattr(cuda, "call", called)
    Bench("cuda")
    bench.runner.close()
    seen = [entry for entry in free if entry[0] in ("synchronize", "empty_cache")]
    assert seen == [("synchronize", False), ("empty_cache", False)]
    assert ("stream synchronize", True) in free


def test_a_fault_on_the_device_ends_the_engine_and_the_runner_still_closes(cuda: Device) -> None:
    bench = Bench("cuda")
    bench.runner._run = bench.step  # Nothing that could be captured.
    handle = bench.runner.launch(bench.plan(1))
    cuda.broken = True
    with pytest.raises(
        EngineDead, match=r"^a step failed on the GPU: CUDA error: an illegal memory access was encou\w+$"
    ):
        handle.result()
    with pytest.raises(EngineDead, match="launching a step failed on the GPU: CUDA error"):
        bench.runner.launch(bench.plan(1))
    bench.runner.close()
    bench.runner.close()
    assert bench.closed == 1
    assert bench.runner.arenas[0].size == bench.core.arena_len()


def test_a_fault_while_launching_ends_the_engine(cuda: Device) -> None:
    bench = Bench("cuda")
    bench.step.fault = RuntimeError("")
    with pytest.raises(EngineDead, match="launching a step failed on the GPU: RuntimeError"):
        bench.runner.launch(bench.plan(1))
    assert cuda.calls[-1] == "set_stream"
