"""Engines whose worker process dies, fails or hangs, and is started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from engine_fakes import COMMAND, fake_config
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.supervisor import RestartPolicy, SupervisedEngine
from octavo.errors import EngineDead, EngineRestarting, ModelNotFound
from octavo.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
QUICK = RestartPolicy(
    first_delay_s=0.02, max_delay_s=0.2, max_failures=3, stable_s=60, stall_s=1.0, stopped_s=0.5, wait_s=10
)


@asynccontextmanager
async def supervised(model: str = "fake", **policy: Any) -> AsyncIterator[SupervisedEngine]:
    settings = {name: getattr(QUICK, name) for name in QUICK.__struct_fields__}
    engine = await SupervisedEngine.start(
        fake_config(model, num_blocks=20_000, max_num_seqs=256),
        worker_command=COMMAND,
        policy=RestartPolicy(**{**settings, **policy}),
    )
    try:
        yield engine
    finally:
        await engine.close()


async def until(condition: Callable[[], bool], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.005)


async def failure(stream: Any) -> BaseException:
    """How a stream ends that must not end well."""
    with pytest.raises(EngineDead) as caught:
        async for _ in stream:
            pass
    return caught.value


async def check_serves(engine: SupervisedEngine) -> None:
    """It answers, and every block is free afterwards."""
    answer = await engine.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 5
    stats = await engine.stats()
    assert (stats["blocks_used"], stats["running"], stats["waiting"], stats["open_requests"]) == (0, 0, 0, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_worker_killed_amid_many_streams_is_started_again(run: Callable[..., Any], number: signal.Signals) -> None:
    async def main() -> None:
        async with supervised("fake:step_s=0.002") as engine:
            before, pid = engine.model, engine.state().pid
            streams = [engine.stream([n + 1], LONG) for n in range(100)]
            for stream in streams:
                await anext(stream)
            waiting = [asyncio.create_task(engine.generate([n + 1], LONG)) for n in range(50)]
            await asyncio.sleep(0.05)
            os.kill(pid, number)
            begun = time.monotonic()
            errors = await asyncio.gather(*map(failure, streams))
            errors += [error for error in await asyncio.gather(*waiting, return_exceptions=True) if error is not None]
            assert len(errors) == 150
            assert all(isinstance(error, EngineRestarting) for error in errors)
            assert number.name in str(errors[0])
            assert time.monotonic() - begun < 2
            await until(lambda: engine.state().name == "ready")
            state = engine.state()
            assert (state.restarts, engine.restarts) == (1, 1)
            assert state.pid != pid
            assert number.name in str(state.reason)
            assert engine.model == before
            await check_serves(engine)
        assert not psutil.pid_exists(pid)
        assert not psutil.pid_exists(state.pid)

    run(main())


def test_requests_of_a_restart_wait_for_it_or_are_told_when(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with supervised() as engine:
            os.kill(engine.state().pid, signal.SIGKILL)
            await until(lambda: engine.state().name == "restarting")
            with pytest.raises(EngineRestarting, match="SIGKILL") as caught:
                engine.check_health()
            assert caught.value.retry_after >= 1
            with pytest.raises(EngineRestarting):
                await engine.stats()
            answers = await asyncio.gather(*(engine.generate([n + 1], SamplingParams(max_tokens=3)) for n in range(20)))
            assert all(len(answer.outputs[0].token_ids) == 3 for answer in answers)
            engine.check_health()
        async with supervised(first_delay_s=30, max_delay_s=30, wait_s=5) as engine:
            os.kill(engine.state().pid, signal.SIGKILL)
            await until(lambda: engine.state().name == "restarting")
            begun = time.monotonic()
            with pytest.raises(EngineRestarting) as caught:
                await engine.generate([1])
            assert time.monotonic() - begun < 1
            assert 25 < caught.value.retry_after <= 31
        async with supervised(first_delay_s=0.9, max_delay_s=0.9, wait_s=30) as engine:
            pid = engine.state().pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda: engine.state().name == "restarting")
            waits = asyncio.create_task(engine.generate([1]))
            await asyncio.sleep(0.05)
            await engine.close()
            with pytest.raises(EngineDead, match="closed"):
                await waits

    run(main())


def test_a_stopped_worker_is_noticed_within_seconds(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with supervised("fake:step_s=0.002") as engine:
            for busy in (True, False):
                pid = engine.state().pid
                stream = engine.stream([1], LONG)
                if busy:
                    await anext(stream)
                os.kill(pid, signal.SIGSTOP)
                begun = time.monotonic()
                await until(lambda: engine.state().name == "restarting", 5)
                assert time.monotonic() - begun < 2.5
                if busy:
                    assert "stopped by a signal" in str(await failure(stream))
                await until(lambda: engine.state().name == "ready")
                assert not psutil.pid_exists(pid)
                await check_serves(engine)

    run(main())


def test_a_worker_that_is_stopped_for_a_moment_goes_on(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with supervised("fake:step_s=0.002", stopped_s=3) as engine:
            pid = engine.state().pid
            stream = engine.stream([1], LONG)
            await anext(stream)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.8)
            os.kill(pid, signal.SIGCONT)
            received = 0
            async for delta in stream:
                received += len(delta.token_ids)
            assert received > 100
            assert (engine.restarts, engine.state().pid) == (0, pid)

    run(main())


def test_a_step_that_hangs_is_ended_and_one_that_is_slow_is_not(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with supervised("fake:stall_at=5") as engine:
            stream = engine.stream([1], LONG)
            error = await failure(stream)
            assert isinstance(error, EngineRestarting)
            assert "made no progress for 1." in str(error)
            assert "step 6, launch" in str(error)
        async with supervised("fake:step_s=0.7") as engine:
            answer = await engine.generate([1], SamplingParams(max_tokens=3, ignore_eos=True))
            assert len(answer.outputs[0].token_ids) == 3
            assert engine.restarts == 0
        # Three times the limit, but it computes.
        async with supervised("fake:compute_at=2,compute_s=3") as engine:
            answer = await engine.generate([1], SamplingParams(max_tokens=5, ignore_eos=True))
            assert len(answer.outputs[0].token_ids) == 5
            assert engine.restarts == 0
        async with supervised("fake:compute_at=2,compute_s=20", step_limit_s=1.5) as engine:
            assert "more than 1.5 s for one step" in str(await failure(engine.stream([1], LONG)))

    run(main())


def test_a_reader_that_is_behind_is_no_stall(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with supervised("fake", stall_s=0.6) as engine:
            tasks = [asyncio.create_task(engine.generate([n + 1], LONG)) for n in range(60)]
            await asyncio.sleep(0.1)
            time.sleep(2.5)  # the event loop does nothing, the worker has to wait
            answers = await asyncio.gather(*tasks)
            assert len(answers) == 60
            assert engine.restarts == 0

    run(main())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("fake:crash_at=3", "exit code 1: RuntimeError: the device is on fire"),
        ("fake:exit_at=3", "exit code 7"),
        ("fake:garbage=1", "sent what is no message"),
    ],
)
def test_a_crash_loop_is_given_up_after_ever_longer_pauses(
    run: Callable[..., Any], caplog: pytest.LogCaptureFixture, model: str, reason: str
) -> None:
    async def main() -> None:
        async with supervised(model, first_delay_s=0.1, max_delay_s=1) as engine:
            pids = set()
            begun = time.monotonic()
            for count in range(4):
                pids.add(engine.state().pid)
                error = await failure(engine.stream([1], LONG))
                assert reason in str(error)
                assert isinstance(error, EngineRestarting) == (count < 3)
                if count < 3:
                    await until(lambda: engine.state().name == "ready")
            assert time.monotonic() - begun > 0.1 + 0.2 + 0.4
            assert re.findall("again in ([0-9.]+) s", caplog.text) == ["0.1", "0.2", "0.4"]
            state = engine.state()
            assert (state.name, state.restarts, len(pids)) == ("dead", 3, 4)
            assert "given up" in str(state.reason)
            assert reason in str(state.reason)
            with pytest.raises(EngineDead, match="given up"):
                engine.check_health()
            with pytest.raises(EngineDead, match="given up"):
                await engine.generate([1])

    run(main())


def test_an_engine_that_served_for_long_starts_to_count_anew(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with supervised(stable_s=0.1, max_failures=1) as engine:
            for count in range(1, 4):
                await asyncio.sleep(0.15)
                os.kill(engine.state().pid, signal.SIGKILL)
                await until(lambda: engine.state().name == "restarting")
                await until(lambda: engine.state().name == "ready")
                assert engine.restarts == count
            await check_serves(engine)

    run(main())


def test_a_first_load_that_fails_is_not_tried_again(run: Callable[..., Any]) -> None:
    async def main() -> None:
        with pytest.raises(ModelNotFound, match="there is no"):
            async with supervised("fake:load=refuse"):
                pass
        with pytest.raises(EngineDead, match="exit code 1: ZeroDivisionError"):
            async with supervised("fake:load=crash"):
                pass
        engine = SupervisedEngine(fake_config("fake:load=hang"), QUICK)
        loading = asyncio.create_task(engine.load(worker_command=COMMAND))
        await until(lambda: engine.state().progress is not None)
        assert engine.state().name == "loading"
        assert engine.state().progress == ("Loading", 0, 2)
        # Loading takes what it takes; a process that is stopped loads nothing.
        await asyncio.sleep(1.5)
        assert not loading.done()
        os.kill(engine.state().pid, signal.SIGSTOP)
        with pytest.raises(EngineDead, match="stopped by a signal"):
            await asyncio.wait_for(loading, 5)
        assert engine.state().name == "dead"

    run(main())


def test_a_restart_whose_load_fails_is_tried_again(run: Callable[..., Any], tmp_path: Any) -> None:
    async def main() -> None:
        flag = tmp_path / "refuse"
        async with supervised(f"fake:refuse_while={flag}") as engine:
            flag.touch()
            os.kill(engine.state().pid, signal.SIGKILL)
            await until(lambda: "could not be started again" in str(engine.state().reason))
            assert engine.state().name == "restarting"
            flag.unlink()
            await until(lambda: engine.state().name == "ready")
            assert engine.restarts == 2
            await check_serves(engine)
            flag.touch()
            os.kill(engine.state().pid, signal.SIGKILL)
            await until(lambda: engine.state().name == "dead")
            assert "there is no" in str(engine.state().reason)

    run(main())


def test_a_model_that_is_another_after_a_restart_is_not_served(run: Callable[..., Any], tmp_path: Any) -> None:
    async def main() -> None:
        flag = tmp_path / "larger"
        async with supervised(f"fake:larger_while={flag}") as engine:
            flag.touch()
            os.kill(engine.state().pid, signal.SIGKILL)
            await until(lambda: engine.state().name == "dead")
            assert "vocab_size was 512 and is 513" in str(engine.state().reason)
            with pytest.raises(EngineDead, match="files have changed"):
                await engine.generate([1])

    run(main())


def test_closing_at_any_time_leaves_no_process_and_no_task(run: Callable[..., Any]) -> None:
    async def main() -> None:
        before = set(psutil.Process().children())
        for pause in (0.0, 0.01, 0.05, 0.2, 0.4):
            engine = await SupervisedEngine.start(fake_config("fake:load_s=0.3"), worker_command=COMMAND, policy=QUICK)
            stream = engine.stream([1], LONG)
            await anext(stream)
            os.kill(engine.state().pid, signal.SIGKILL)
            await failure(stream)
            await asyncio.sleep(pause)
            await engine.close()
            assert engine.state().name == "dead"
        deadline = time.monotonic() + 5
        while set(psutil.Process().children()) - before and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not set(psutil.Process().children()) - before
        names = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
        assert not [name for name in names if "Engine" in name]

    run(main())


def test_restarts_while_requests_never_stop_lose_none_without_an_answer(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with supervised("fake:step_s=0.001", max_failures=20) as engine:
            outcomes: dict[str, int] = {"answered": 0, "restarting": 0}
            stop = False

            async def client(number: int) -> None:
                while not stop:
                    try:
                        answer = await asyncio.wait_for(
                            engine.generate([number + 1], SamplingParams(max_tokens=20, ignore_eos=True)), 10
                        )
                    except EngineRestarting:
                        outcomes["restarting"] += 1
                        await asyncio.sleep(0.01)
                    else:
                        assert len(answer.outputs[0].token_ids) == 20
                        outcomes["answered"] += 1

            clients = [asyncio.create_task(client(number)) for number in range(32)]
            for _ in range(4):
                await asyncio.sleep(0.4)
                await until(lambda: engine.state().name == "ready")
                os.kill(engine.state().pid, signal.SIGKILL)
                await until(lambda: engine.state().name != "ready")
            await until(lambda: engine.state().name == "ready")
            answered = outcomes["answered"]
            await until(lambda: outcomes["answered"] > answered + 32)
            stop = True
            await asyncio.gather(*clients)
            assert outcomes["restarting"] > 0
            assert engine.restarts == 4
            await check_serves(engine)

    run(main())


def test_a_plain_engine_says_where_it_stands(run: Callable[..., Any]) -> None:
    async def main() -> None:
        engine = AsyncEngine(fake_config())
        assert engine.state().name == "loading"
        await engine.load(worker_command=COMMAND)
        assert engine.state().name == "ready"
        os.kill(engine.state().pid, signal.SIGKILL)
        await until(lambda: engine.state().name == "dead")
        assert "SIGKILL" in str(engine.state().reason)
        await engine.close()

    run(main())


def test_a_fake_model_that_fails_restarts_with_its_tokenizer(run: Callable[..., Any]) -> None:
    async def main() -> None:
        config = EngineConfig(model="fake?fail_at=30", load_format="fake")
        engine = await SupervisedEngine.start(config, policy=QUICK)
        try:
            with pytest.raises(EngineRestarting, match="fake device failed"):
                await engine.generate("Hello", SamplingParams(max_tokens=100))
            answer = await engine.generate("Hello", SamplingParams(max_tokens=10, temperature=0))
            assert answer.outputs[0].text
            assert engine.model.name == "fake"
        finally:
            with contextlib.suppress(EngineDead):
                await engine.close()

    run(main())
