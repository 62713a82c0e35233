"""What an engine is said to have taken of a GPU that it shares, and what is said of it."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from octavo.errors import NotEnoughMemory
from octavo.runner.cuda_build import RESERVE_BYTES, _check
from octavo.runner.device import Gpu
from octavo.runner.memory import MemoryPlan
from octavo.runner.memory_meter import MemoryMeter

MIB, GIB = 1 << 20, 1 << 30
DEVICE = torch.device("cuda", 0)
GPU = Gpu(0, "NVIDIA Test", (9, 0), 100 * GIB, 140 * GIB)
# 321 MiB beside what graphs and libraries take.
PLAN = MemoryPlan(
    model="m",
    device="cuda",
    dtype="bfloat16",
    free_bytes=GPU.free_bytes,
    usable_bytes=90 * GIB,
    process_bytes=RESERVE_BYTES,
    process="kernels, graphs and libraries",
    weights_bytes=200 * MIB,
    workspace_bytes=20 * MIB,
    state_bytes=1 * MIB,
    block_bytes=1 * MIB,
    block_size=16,
    num_blocks=100,
    max_model_len=1024,
    model_len_limit=8192,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    head_rows=8,
)


class Card:
    """What this process holds of a card, and what is free of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.reserved = 0
        self.free = GPU.free_bytes
        gc.collect()
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, GPU.total_bytes))

    def take(self, tensors: int, spare: int = 0) -> None:
        self.allocated += tensors
        self.reserved += tensors + spare
        self.free -= tensors + spare


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    return Card(monkeypatch)


def warnings(card: Card, meter: MemoryMeter, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        _check(PLAN, meter, GPU)
    return caplog.messages


def test_what_others_hold_does_not_count(card: Card, caplog: pytest.LogCaptureFixture) -> None:
    card.take(8 * GIB, spare=500 * MIB)  # an engine of this process
    meter = MemoryMeter(DEVICE)
    card.take(321 * MIB, spare=30 * MIB)
    card.free -= 40 * GIB  # another process
    assert warnings(card, meter, caplog) == []


@pytest.mark.parametrize(("tensors", "spare"), [(2 * GIB, 0), (321 * MIB, 2 * GIB)])
def test_more_than_was_planned(card: Card, caplog: pytest.LogCaptureFixture, tensors: int, spare: int) -> None:
    card.take(8 * GIB)
    meter = MemoryMeter(DEVICE)
    card.take(tensors, spare)
    (message,) = warnings(card, meter, caplog)
    assert message.startswith("GPU memory: 321.0 MiB were planned and 2.")


def test_tensors_where_memory_was_spare_count(card: Card) -> None:
    card.take(1 * GIB, spare=3 * GIB)
    meter = MemoryMeter(DEVICE)
    card.allocated += 2 * GIB
    assert meter.stop() == 2 * GIB


def test_engines_built_at_once_are_not_told_apart(card: Card, caplog: pytest.LogCaptureFixture) -> None:
    first, second = MemoryMeter(DEVICE), MemoryMeter(DEVICE)
    card.take(8 * GIB)
    assert warnings(card, first, caplog) == warnings(card, second, caplog) == []
    third = MemoryMeter(DEVICE)
    card.take(8 * GIB)
    assert len(warnings(card, third, caplog)) == 1
    abandoned = MemoryMeter(DEVICE)
    del abandoned
    assert MemoryMeter(DEVICE).stop() == 0


def test_no_room_for_graphs(card: Card) -> None:
    meter = MemoryMeter(DEVICE)
    card.take(321 * MIB)
    card.free = 200 * MIB
    with pytest.raises(NotEnoughMemory, match=r"^m: 200\.0 MiB of the GPU's memory are left of 100\.0 GiB, and CUDA"):
        _check(PLAN, meter, GPU)


@pytest.mark.gpu
def test_on_a_card() -> None:
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    meter = MemoryMeter(torch.device("cuda", torch.cuda.current_device()))
    more = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert meter.stop() == more.nbytes
    assert held.nbytes == 64 * MIB
