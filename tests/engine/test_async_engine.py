"""AsyncEngine over a worker process without a model."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from engine_fakes import COMMAND, fake_config, text_of
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.outputs import OutputDelta
from octavo.errors import (
    CapacityExceeded,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
)
from octavo.log_format import configure
from octavo.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=None, ignore_eos=True)


async def idle(engine: AsyncEngine, within_s: float = 2.0) -> dict[str, Any]:
    """The engine's stats once it holds no block."""
    deadline = time.monotonic() + within_s
    while True:
        stats = await engine.stats()
        if stats["blocks_used"] == 0:
            return stats
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> list[OutputDelta]:
    return [delta async for delta in engine.stream(prompt, params)]


def test_streams_joined_are_what_generate_returns(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine() as engine:
            for params in (
                SamplingParams(max_tokens=40),
                SamplingParams(max_tokens=40, n=3),
                SamplingParams(max_tokens=1),
                SamplingParams(max_tokens=40, stop=["7>"]),
            ):
                prompts = [[number, 2, 3] for number in range(20)]
                streamed = await asyncio.gather(*(collect(engine, prompt, params) for prompt in prompts))
                whole = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
                for deltas, output in zip(streamed, whole, strict=True):
                    for answer in output.outputs:
                        mine = [delta for delta in deltas if delta.index == answer.index]
                        assert [token for delta in mine for token in delta.token_ids] == answer.token_ids
                        assert "".join(delta.text for delta in mine) == answer.text
                        assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
                        assert mine[-1].finish_reason == answer.finish_reason
                        assert mine[-1].stop_reason == answer.stop_reason
                        if not params.stop:
                            assert answer.text == text_of(answer.token_ids)
            assert len({output.request_id for output in whole}) == 20
            await idle(engine)

    run(main())


def test_what_cannot_be_served_ends_itself_alone(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:step_s=0.002", num_blocks=8, max_num_seqs=4) as engine:
            good = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(max_tokens=50)))
            bad: list[tuple[Any, type[InvalidRequest], str]] = [
                ([], InvalidRequest, "prompt"),
                ([512], InvalidRequest, "prompt"),
                ([-1], InvalidRequest, "prompt"),
                ([1] * 1024, ContextLengthExceeded, "prompt"),
                ([1] * 500, CapacityExceeded, "max_tokens"),
                ("text without a tokenizer", InvalidRequest, "prompt"),
            ]
            for prompt, kind, field in bad:
                with pytest.raises(kind) as caught:
                    await engine.generate(prompt, SamplingParams(max_tokens=4))
                assert type(caught.value) is kind
                assert caught.value.field == field
                with pytest.raises(kind):
                    await collect(engine, prompt, SamplingParams(max_tokens=4))
            assert len((await good).outputs[0].token_ids) == 50
            assert (await idle(engine))["open_requests"] == 0

    run(main())


def test_a_request_id_names_one_request_at_a_time(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:step_s=0.002") as engine:
            first = engine.stream([1], LONG, request_id="mine")
            await anext(first)
            with pytest.raises(InvalidRequest, match="mine") as caught:
                await engine.generate([1], request_id="mine")
            assert caught.value.field == "request_id"
            await first.aclose()
            assert (await engine.generate([1], request_id="mine")).request_id == "mine"

    run(main())


def test_a_closed_stream_and_a_cancelled_task_free_their_blocks(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:step_s=0.005") as engine:
            stream = engine.stream([1] * 100, LONG)
            await anext(stream)
            assert (await engine.stats())["blocks_used"] > 0
            await stream.aclose()
            await idle(engine, 0.5)
            for call in (engine.generate([1] * 100, LONG), collect(engine, [2] * 100, LONG)):
                task = asyncio.create_task(call)
                while (await engine.stats())["blocks_used"] == 0:
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await idle(engine, 0.5)

    run(main())


def test_abort_ends_a_stream_with_a_last_delta(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:step_s=0.002") as engine:
            deltas = []
            async for delta in engine.stream([1], SamplingParams(max_tokens=None, n=2), request_id="mine"):
                deltas.append(delta)
                if len(deltas) == 6:
                    assert engine.abort("mine")
            last = {delta.index: delta.finish_reason for delta in deltas}
            assert last == {0: "abort", 1: "abort"}
            assert not engine.abort("mine")
            waiting = asyncio.create_task(engine.generate([1], LONG, request_id="other"))
            await asyncio.sleep(0.05)
            engine.abort("other")
            output = await waiting
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].token_ids
            await idle(engine)

    run(main())


def test_a_slow_consumer_holds_nobody_up_and_gets_everything(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine() as engine:
            slow = engine.stream([1, 2], SamplingParams(max_tokens=900))
            parts = [await anext(slow)]
            fast = await engine.generate([3, 4], SamplingParams(max_tokens=900))
            assert len(fast.outputs[0].token_ids) == 900
            await idle(engine)
            async for delta in slow:
                parts.append(delta)
                await asyncio.sleep(0.01)
            assert len(parts) < 20, "what waited was merged"
            tokens = [token for delta in parts for token in delta.token_ids]
            assert tokens == (await engine.generate([1, 2], SamplingParams(max_tokens=900))).outputs[0].token_ids

    run(main())


def test_a_server_run_is_reproducible(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def seeds(seed: int) -> list[int]:
        async with fake_engine(seed=seed) as engine:
            made = []
            make = engine._requests.make

            def spy(*arguments: Any) -> Any:
                made.append(make(*arguments))
                return made[-1]

            engine._requests.make = spy
            for _ in range(3):
                await engine.generate([1], SamplingParams(max_tokens=1))
            return [bytes(request.params) for request in made]

    assert run(seeds(1)) == run(seeds(1))
    assert run(seeds(1)) != run(seeds(2))


def test_refused_models_raise_the_workers_own_error(run: Callable[..., Any]) -> None:
    async def main() -> None:
        stages = []
        with pytest.raises(ModelNotFound, match="there is no 'fake:load=refuse'"):
            await AsyncEngine.start(
                fake_config("fake:load=refuse"),
                worker_command=COMMAND,
                progress=lambda *stage: stages.append(stage),
            )
        assert stages == [("Loading", 0, 2)]
        with pytest.raises(EngineDead, match="exit code 1: ZeroDivisionError: a fault of the loader"):
            await AsyncEngine.start(fake_config("fake:load=crash"), worker_command=COMMAND)
        with pytest.raises(EngineDead, match="cannot be started"):
            await AsyncEngine.start(fake_config(), worker_command=["/no/such/program"])
        with pytest.raises(EngineDead, match="exit code 3"):
            await AsyncEngine.start(fake_config(), worker_command=["/bin/sh", "-c", "exit 3"])

    run(main())


def test_a_process_that_may_open_no_more_files_is_told_so_and_leaks_none(run: Callable[..., Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    # With JSON lines there is one pipe more.
    logs = configure("json")
    own = psutil.Process()

    async def main() -> None:
        outcomes = []
        before = own.num_fds()
        first = os.dup(2)
        os.close(first)
        for spare in range(0, 40, 2):
            resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, hard))
            try:
                engine = await AsyncEngine.start(fake_config(), worker_command=COMMAND)
            except EngineDead as error:
                outcomes.append(str(error))
            else:
                outcomes.append("")
                await engine.close()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            # A worker's heartbeat goes with the engine.
            gc.collect()
            assert own.num_fds() <= before + 1
        assert "Too many open files" in outcomes[0]
        assert outcomes[-1] == ""
        assert len(outcomes) - outcomes.count("") > 3

    try:
        run(main())
    finally:
        root.removeHandler(logs)
        root.handlers[:] = handlers
        root.setLevel(level)


def test_closing_ends_streams_and_later_calls(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:step_s=0.002") as engine:
            stream = engine.stream([1], LONG)
            await anext(stream)
            engine.check_health()
            begun = time.monotonic()
            await engine.close()
            assert time.monotonic() - begun < 2
            with pytest.raises(EngineDead, match="closed"):
                async for _ in stream:
                    pass
            for call in (engine.generate([1]), engine.stats(), anext(engine.stream([1]))):
                with pytest.raises(EngineDead, match="closed"):
                    await call
            with pytest.raises(EngineDead, match="closed"):
                engine.check_health()

    run(main())
