"""A consumer that leaves: its request ends within the step that runs, streaming or not, and gives its blocks back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from octavo.engine.protocol import StepOutputs
from octavo.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=None, ignore_eos=True)
STEP_S = 0.15


@pytest.mark.parametrize("kind", ["stream closed", "task cancelled", "whole answer cancelled", "aborted by name"])
def test_a_request_ends_within_a_step_of_its_consumer(fake_engine: Any, run: Callable[..., Any], kind: str) -> None:
    async def main() -> None:
        async with fake_engine(f"fake:step_s={STEP_S}") as engine:
            events: list[tuple[int, list[int]]] = []
            receive = engine._receive

            def note(message: Any) -> None:
                if isinstance(message, StepOutputs):
                    ids = np.frombuffer(message.request_ids, np.int64).tolist()
                    events.append((engine._client.process.heartbeat.steps, ids))
                receive(message)

            engine._client._on_message = note
            stayer = engine.stream([1, 2], LONG)
            await anext(stayer)
            stream = engine.stream([3, 4], LONG, request_id="leaver")
            await anext(stream)
            if kind == "whole answer cancelled":
                await stream.aclose()
                task = asyncio.create_task(engine.generate([5, 6], LONG, request_id="leaver"))
                while len(events[-1][1]) != 2 or max(events[-1][1]) != 3:
                    await asyncio.sleep(0.01)
            number = engine._open_requests._numbers["leaver"]
            # In the middle of a step.
            await asyncio.sleep(STEP_S / 3)
            left_at = engine._client.process.heartbeat.steps
            if kind == "stream closed":
                await stream.aclose()
            elif kind == "aborted by name":
                assert engine.abort("leaver")
                assert [delta.finish_reason async for delta in stream] == ["abort"]
            else:
                if kind == "task cancelled":
                    task = asyncio.create_task(anext(stream))
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            seen = len(events)
            while len(events) < seen + 4:
                await anext(stayer)
            later = [step for step, ids in events[seen:] if number in ids]
            # The step that ran may have it; no step that was planned afterwards.
            assert all(step <= left_at + 1 for step in later), (left_at, events[seen:])
            assert len(later) <= 1
            stats = await engine.stats()
            assert (stats["running"], stats["open_requests"]) == (1, 1)
            await stayer.aclose()
            await asyncio.sleep(2 * STEP_S)
            assert (await engine.stats())["blocks_used"] == 0

    run(main())


def test_a_thousand_that_leave_at_once_leave_nothing(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:step_s=0.02", num_blocks=4096, max_num_seqs=256) as engine:
            tasks = [asyncio.create_task(engine.generate([n % 500, 7], LONG)) for n in range(1000)]
            await asyncio.sleep(0.3)
            before = await engine.stats()
            assert before["running"] == 256
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # All at once, not step by step.
            left_at = (await engine.stats())["steps"]
            await asyncio.sleep(0.3)
            stats = await engine.stats()
            assert (stats["running"], stats["waiting"], stats["blocks_used"], stats["open_requests"]) == (0, 0, 0, 0)
            assert stats["steps"] - left_at <= 2

    run(main())


def test_the_hosts_time_is_told_by_part(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:step_s=0.01") as engine:
            await engine.generate([1], SamplingParams(max_tokens=20, ignore_eos=True))
            stats = await engine.stats()
            assert stats["host_steps"] == 20
            # This runner computes when it is launched.
            assert 0.2 <= stats["host_launch_seconds"] < 2
            for part in ("receive", "plan", "wait", "commit", "send"):
                assert 0 < stats[f"host_{part}_seconds"] < 0.1
            await asyncio.sleep(0.3)
            idle = await engine.stats()
            parts = [name for name in stats if name.startswith("host_") and name.endswith("_seconds")]
            assert sum(idle[name] - stats[name] for name in parts) < 0.05

    run(main())
