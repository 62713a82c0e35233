"""Held answers through the worker: compiling delays nobody, and what fails hurts its own request alone."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_fakes import COMMAND, fake_config, load
from octavo import LLM
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.backend import LocalBackend, WorkerBackend
from octavo.engine.supervisor import SupervisedEngine
from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=None, ignore_eos=True)
HELD = SamplingParams(max_tokens=40, structured_outputs={"regex": "(<[1-6]>){9}"})
SLOW = SamplingParams(max_tokens=40, structured_outputs={"choice": ["<7><3>", "<7><4>"]})
BAD = SamplingParams(structured_outputs={"regex": "("})
SLOW_AND_BAD = SamplingParams(structured_outputs={"regex": "<7>("})


async def settled(engine: AsyncEngine) -> dict[str, Any]:
    deadline = time.monotonic() + 5
    while (stats := await engine.stats())["blocks_used"] or stats["running"] or stats["waiting"]:
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)
    return stats


def test_compiling_delays_no_one_that_runs(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:step_s=0.005,eos=1,compile_s=0.8") as engine:
            runner = engine.stream([1], LONG)
            await anext(runner)
            slow = asyncio.create_task(engine.generate([2], SLOW))
            begun = last = time.monotonic()
            gap = 0.0
            while not slow.done():
                await anext(runner)
                now = time.monotonic()
                gap, last = max(gap, now - last), now
                if now - begun < 0.5:
                    quick = await engine.generate([3], SamplingParams(max_tokens=2))
                    assert len(quick.outputs[0].token_ids) == 2
                    last = time.monotonic()
            assert time.monotonic() - begun > 0.7
            assert gap < 0.3
            assert (await slow).outputs[0].text in ("<7><3>", "<7><4>")
            await runner.aclose()
            await settled(engine)

    run(main())


def test_an_idle_worker_wakes_when_a_constraint_is_ready(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:eos=1,compile_s=0.2") as engine:
            for params in (SLOW, HELD, SLOW):
                output = await asyncio.wait_for(engine.generate([1], params), 5)
                assert output.outputs[0].finish_reason == "stop"
            with pytest.raises(InvalidRequest, match="regular expression") as caught:
                await asyncio.wait_for(engine.generate([1], BAD), 5)
            assert caught.value.field == "structured_outputs"

    run(main())


def test_who_leaves_while_it_compiles_leaves_nothing(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:eos=1,compile_s=0.4") as engine:
            tasks = [asyncio.create_task(engine.generate([n], SLOW)) for n in range(1, 6)]
            await asyncio.sleep(0.1)
            stats = await engine.stats()
            assert (stats["deferred"], stats["waiting"], stats["running"]) == (5, 0, 0)
            for task in tasks[1:]:
                task.cancel()
            await asyncio.wait(tasks)
            assert tasks[0].result().outputs[0].finish_reason == "stop"
            stats = await settled(engine)
            assert (stats["requests"], stats["open_requests"], stats["deferred"]) == (1, 0, 0)
            await asyncio.sleep(1)
            assert (await engine.stats())["requests"] == 1

    run(main())


def test_what_was_left_is_not_compiled(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:eos=1,compile_s=0.3") as engine:
            tasks = [asyncio.create_task(engine.generate([1], SLOW)) for _ in range(60)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait_for(engine.generate([1], HELD), 2.5)
            await settled(engine)

    run(main())


def test_what_cannot_be_followed_ends_its_request_alone(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:eos=1,fail_at=6,step_s=0.002") as engine:
            others = [asyncio.create_task(engine.generate([n], LONG)) for n in range(1, 4)]
            short = SamplingParams(structured_outputs={"regex": "(<[1-6]>){3}"})
            many = [asyncio.create_task(engine.generate([n, 2], short)) for n in range(1, 4)]
            pieces = []

            async def read() -> None:
                async for delta in engine.stream([9], HELD):
                    pieces.append(delta.text)

            with pytest.raises(InvalidRequest, match="too many states"):
                await read()
            assert re.fullmatch("(<[1-6]>){5}", "".join(pieces))
            with pytest.raises(InvalidRequest, match="too many states"):
                await engine.generate([9], HELD)
            assert all(len(one.outputs[0].token_ids) == 1023 for one in await asyncio.gather(*others))
            assert all(re.fullmatch("(<[1-6]>){3}", one.outputs[0].text) for one in await asyncio.gather(*many))
            await settled(engine)

    run(main())


def test_a_client_that_goes_takes_what_compiles_with_it(run: Callable[..., Any]) -> None:
    async def main() -> None:
        from octavo.engine.attached import AttachedEngine

        config = fake_config("fake:eos=1,compile_s=0.5")
        async with await SupervisedEngine.start(config, worker_command=COMMAND) as owner:
            leaver = AttachedEngine(config, owner.invite, 1)
            await leaver.load(worker_command=COMMAND)
            tasks = [asyncio.create_task(leaver.generate([n], SLOW)) for n in range(1, 9)]
            await asyncio.sleep(0.1)
            await leaver.close()
            await asyncio.wait(tasks)
            assert (await owner.generate([1], HELD)).outputs[0].finish_reason == "stop"
            await asyncio.sleep(1.2)
            assert (await settled(owner))["requests"] == 1

    run(main())


@pytest.fixture(params=["local", "worker"])
def make_llm(request: pytest.FixtureRequest) -> Iterator[Callable[[str], LLM]]:
    made: list[LLM] = []

    def make(model: str) -> LLM:
        config = fake_config(model)
        if request.param == "local":
            made.append(LLM.from_backend(config, LocalBackend(*load(config, lambda *_: None))))
        else:
            made.append(LLM.from_backend(config, WorkerBackend.load(config, lambda *_: None, COMMAND)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_a_batch_is_taken_whole_or_not_at_all(make_llm: Callable[[str], LLM]) -> None:
    llm = make_llm("fake:eos=1,compile_s=0.2")
    prompts = [[1], [2], [3], [4]]
    for bad in (BAD, SLOW_AND_BAD):
        with pytest.raises(InvalidRequest, match="regular expression"):
            llm.generate(prompts, [LONG, SLOW, bad, HELD])
        stats = llm.stats()
        assert stats["blocks_used"] == stats["waiting"] == stats["running"] == stats["generated_tokens"] == 0
    # What the core refuses comes after all is compiled.
    with pytest.raises(InvalidRequest, match="n"):
        llm.generate(prompts, [LONG, SLOW, SamplingParams(n=100), HELD])
    assert llm.stats()["generated_tokens"] == 0
    plain, slow, _, held = llm.generate(prompts, [LONG, SLOW, LONG, HELD])
    assert len(plain.outputs[0].token_ids) == 1023
    assert slow.outputs[0].text in ("<7><3>", "<7><4>")
    assert re.fullmatch("(<[1-6]>){9}", held.outputs[0].text)
    assert plain.error is slow.error is held.error is None


def test_an_answer_that_fails_is_told_of_in_its_output(make_llm: Callable[[str], LLM]) -> None:
    llm = make_llm("fake:eos=1,fail_at=6")
    good, bad, plain = llm.generate(
        [[1], [2], [3]],
        [SamplingParams(structured_outputs={"regex": "(<[1-6]>){3}"}), HELD, SamplingParams(max_tokens=50)],
    )
    assert re.fullmatch("(<[1-6]>){3}", good.outputs[0].text)
    assert len(plain.outputs[0].token_ids) <= 50
    assert isinstance(bad.error, InvalidRequest)
    assert "too many states" in str(bad.error)
    assert bad.outputs[0].finish_reason == "error"
    assert re.fullmatch("(<[1-6]>){5}", bad.outputs[0].text)
    again = llm.generate([[1]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(again[0].outputs[0].token_ids) == 5
    assert llm.stats()["blocks_used"] == 0
