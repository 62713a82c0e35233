"""A device that fails in the middle of its answers: callers hear why, nothing waits, and a new process serves again."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fault_process import LONG, PROMPTS
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.backend import WorkerBackend
from octavo.engine.process import WorkerProcess
from octavo.errors import EngineDead
from small_models import NEEDS_DEVICE, SETTINGS, write_config

pytestmark = NEEDS_DEVICE

PROGRAM = Path(__file__).with_name("fault_process.py")
COMMAND = (sys.executable, str(PROGRAM), "worker")
FAULT = "an illegal memory access was encountered"
AT_ONCE_S = 5.0
# A driver takes its time to take down what a process had on a device.
EXIT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_config("qwen3", tmp_path_factory.mktemp("model")))


def check_exit(process: WorkerProcess) -> None:
    """It ends by itself, and says that it failed."""
    assert process.wait(EXIT_S)
    assert process.epitaph() == "the engine process ended with exit code 1"


def check_new_engine(model: str) -> None:
    """A new process serves on the same device."""
    with LLM(model, worker=True, **SETTINGS) as llm:
        answers = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [5] * len(PROMPTS)


def test_in_this_process(model: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "local", model],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for kind, message in report["errors"]:
        assert kind == "EngineDead"
        assert FAULT in message
        assert "\n" not in message
    assert report["close_s"] < AT_ONCE_S
    assert report["closed"] == ["EngineDead", "the engine was closed"]
    check_new_engine(model)


def test_in_a_worker(model: str) -> None:
    config = EngineConfig.of(model=model, **SETTINGS)
    backend = WorkerBackend.load(config, lambda *_: None, COMMAND)
    with LLM.from_backend(config, backend) as llm:
        for _ in range(2):
            with pytest.raises(EngineDead, match=f"EngineDead: [^\n]*{FAULT}$"):
                llm.generate(PROMPTS, LONG, use_tqdm=False)
        check_exit(backend._process)
        begin = time.monotonic()
        llm.close()
        assert time.monotonic() - begin < AT_ONCE_S
    check_new_engine(model)


def test_in_an_asyncio_programs_worker(model: str) -> None:
    async def main() -> None:
        async with await AsyncEngine.start(EngineConfig.of(model=model, **SETTINGS), worker_command=COMMAND) as engine:
            requests = [engine.generate(prompt, LONG) for prompt in PROMPTS]
            told = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), EXIT_S)
            for error in told:
                assert isinstance(error, EngineDead)
                assert FAULT in str(error)
                assert "\n" not in str(error)
            with pytest.raises(EngineDead, match=FAULT):
                engine.check_health()
            with pytest.raises(EngineDead, match=FAULT):
                await engine.generate(PROMPTS[0], LONG)
            process = engine._client._process
            assert process is not None
            await asyncio.to_thread(check_exit, process)

    asyncio.run(main())
    check_new_engine(model)
