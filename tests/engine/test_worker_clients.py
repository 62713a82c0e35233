"""Several clients of one worker: none sees another's answers, and one that goes ends its own requests alone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_fakes import COMMAND, fake_config
from octavo.engine.attached import AttachedEngine
from octavo.engine.clients import ID_BITS, split
from octavo.engine.protocol import Logprobs, StepOutputs
from octavo.engine.supervisor import RestartPolicy, SupervisedEngine
from octavo.errors import EngineRestarting, InvalidRequest
from octavo.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
QUICK = RestartPolicy(first_delay_s=0.02, max_delay_s=0.2, max_failures=5, wait_s=10)


@asynccontextmanager
async def engines(count: int, model: str = "fake") -> AsyncIterator[tuple[SupervisedEngine, list[AttachedEngine]]]:
    config = fake_config(model, num_blocks=20_000, max_num_seqs=256)
    owner = await SupervisedEngine.start(config, worker_command=COMMAND, policy=QUICK)
    others = []
    try:
        for number in range(1, count + 1):
            other = AttachedEngine(config, owner.invite, number)
            others.append(other)
            await other.load(worker_command=COMMAND)
        yield owner, others
    finally:
        for other in others:
            await other.close()
        await owner.close()


async def drained(engine: SupervisedEngine, within_s: float = 5) -> None:
    deadline = time.monotonic() + within_s
    while (stats := await engine.stats())["blocks_used"] or stats["running"] or stats["waiting"]:
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)


def test_each_client_gets_its_own_answers(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with engines(3) as (owner, others):
            params = SamplingParams(max_tokens=40, n=2, temperature=0, logprobs=None, ignore_eos=True)
            alone = [(await owner.generate([n + 1, 7], params)).outputs for n in range(24)]
            together = await asyncio.gather(
                *(engine.generate([n + 1, 7], params) for engine in (owner, *others) for n in range(24))
            )
            for index, answer in enumerate(together):
                assert [one.text for one in answer.outputs] == [one.text for one in alone[index % 24]]
            with pytest.raises(InvalidRequest, match="vocabulary"):
                await others[0].generate([100_000])
            assert (await others[1].stats())["finished_length"] == 2 * 24 * 5
            await drained(owner)

    run(main())


def test_a_client_that_goes_ends_its_requests_alone(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with engines(2, "fake:step_s=0.002") as (owner, (leaver, stayer)):
            mine = [asyncio.create_task(owner.generate([n + 1], LONG)) for n in range(5)]
            theirs = [asyncio.create_task(stayer.generate([n + 1], LONG)) for n in range(5)]
            lost = [leaver.stream([n + 1], LONG) for n in range(20)]
            for stream in lost:
                await anext(stream)
            assert (await owner.stats())["running"] == 30
            leaver._client._transport.abort()  # type: ignore[union-attr]
            deadline = time.monotonic() + 2
            while (await owner.stats())["running"] != 10:
                assert time.monotonic() < deadline
            for stream in lost:
                with pytest.raises(EngineRestarting):
                    [delta async for delta in stream]
            # It comes back by itself, as a new client.
            again = await leaver.generate([1, 2], SamplingParams(max_tokens=5))
            assert len(again.outputs[0].token_ids) == 5
            answers = await asyncio.gather(*mine, *theirs)
            assert all(len(answer.outputs[0].token_ids) == 1023 for answer in answers)
            await drained(owner)

    run(main())


def test_every_client_outlives_the_worker(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with engines(2, "fake:step_s=0.002") as (owner, others):
            tasks = [asyncio.create_task(engine.generate([1], LONG)) for engine in (owner, *others)]
            await asyncio.sleep(0.1)
            os.kill(owner.state().pid, signal.SIGKILL)
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, EngineRestarting)
            for engine in (owner, *others):
                answer = await engine.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
                assert len(answer.outputs[0].token_ids) == 5
                assert engine.state().name == "ready"
                assert engine.restarts == 1
            await drained(owner)

    run(main())


@pytest.mark.parametrize("data", [struct.pack("<I", 5) + b"hello", b"\xff" * 64], ids=["garbage", "too long"])
def test_a_client_that_sends_nonsense_is_given_up_alone(run: Callable[..., Any], data: bytes) -> None:
    async def main() -> None:
        async with engines(0) as (owner, _):
            wild = await owner.invite()
            wild.sendall(data)
            wild.settimeout(5)
            heard = await asyncio.to_thread(_read_all, wild)
            assert heard[4:].startswith(b"\x82\xa4type\xa5ready")
            assert len((await owner.generate([1], SamplingParams(max_tokens=3))).outputs[0].token_ids) == 3
            assert owner.restarts == 0

    run(main())


def _read_all(sock: socket.socket) -> bytes:
    with sock:
        data = b""
        while chunk := sock.recv(65536):
            data += chunk
        return data


def test_a_client_that_does_not_read_holds_the_others_for_seconds_only(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with engines(1) as (owner, (reader,)):
            stuck = AttachedEngine(owner.config, owner.invite, 9)
            await stuck.load(worker_command=COMMAND)
            many = SamplingParams(max_tokens=None, n=128, ignore_eos=True)
            tasks = [asyncio.create_task(stuck.generate([n + 1], many)) for n in range(8)]
            await asyncio.sleep(0.05)
            stuck._client._transport.pause_reading()  # type: ignore[union-attr]
            begun = time.monotonic()
            while (await reader.stats())["finished_abort"] == 0:
                await asyncio.sleep(0.05)
                assert time.monotonic() - begun < 30
            answer = await reader.generate([1], SamplingParams(max_tokens=3))
            assert len(answer.outputs[0].token_ids) == 3
            await drained(owner)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await stuck.close()

    run(main())


def test_a_step_is_split_by_client() -> None:
    ids = [1, 2 << ID_BITS | 1, 7, 2 << ID_BITS | 9, 1]
    texts = [b"a", "é".encode(), b"", b"xyz", b"b"]

    def ints(*values: int) -> bytes:
        return np.array(values, np.int32).tobytes()

    def floats(*values: float) -> bytes:
        return np.array(values, np.float32).tobytes()

    whole = StepOutputs(
        np.array(ids, np.int64).tobytes(),
        ints(0, 1, 2, 3, 4),
        ints(10, 11, 12, 13, 14),
        np.cumsum([len(text) for text in texts]).astype(np.int32).tobytes(),
        b"".join(texts),
        ints(0, 1, 0, 2, 0),
        ints(*[-(1 << 31)] * 5),
        ints(0, 16, 0, 32, 0),
        Logprobs(floats(0, 1, 2, 3, 4), 2, ints(*range(10)), floats(*range(10))),
        np.array([3 << ID_BITS | 4, 2 << ID_BITS | 9], np.int64).tobytes(),
        12.5,
    )
    parts = dict(split(whole))
    assert list(parts) == [0, 2, 3]
    # A prompt's first chunk has no event.
    assert (parts[3].request_ids, parts[3].text, parts[3].started_at) == (b"", b"", 12.5)
    assert np.frombuffer(parts[3].started, np.int64).tolist() == [4]
    assert np.frombuffer(parts[2].started, np.int64).tolist() == [9]
    assert (parts[0].started, parts[0].started_at) == (b"", 0.0)
    alone = msgspec.structs.replace(parts[0], started=np.array([3 << ID_BITS | 4], np.int64).tobytes(), request_ids=b"")
    ((number, told),) = split(alone)
    assert (number, np.frombuffer(told.started, np.int64).tolist()) == (3, [4])
    part = parts[2]
    assert np.frombuffer(part.request_ids, np.int64).tolist() == [1, 9]
    assert (part.token_ids, part.sample_indices) == (ints(11, 13), ints(1, 3))
    assert (part.text, part.text_ends) == ("éxyz".encode(), ints(2, 5))
    assert (part.finish_reasons, part.cached_tokens) == (ints(1, 2), ints(16, 32))
    assert part.logprobs == Logprobs(floats(1, 3), 2, ints(2, 3, 6, 7), floats(2, 3, 6, 7))
    assert parts[0].text == b"ab"
    assert np.frombuffer(parts[0].request_ids, np.int64).tolist() == [1, 7, 1]
    assert dict(split(parts[0])) == {0: parts[0]}
