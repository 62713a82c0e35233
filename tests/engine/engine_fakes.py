"""Engines without a model: the real core, loop and worker around a runner that samples hashes.

Run as a program, this is an engine worker. The settings' `model` says how it behaves, as `fake:key=value,...`:

    step_s    seconds a step takes
    stall_at  the step that takes half a minute
    crash_at  the step that raises
    exit_at   the step that ends the process at once, as a fault in native code would
    compute_at, compute_s   the step that computes for so many seconds
    load_s    seconds that loading takes
    refuse_while, larger_while   a file: while it is there the model is not, or has a token more
    load      `refuse`: the model is not there; `crash`: loading raises; `hang`: it never ends
    garbage   1: bytes that are no message follow the first step's outputs
    eos       1: the last token ends answers, so that they can be held to something
    compile_s seconds that compiling takes, of what has `<7>` in it
    fail_at   the step of its own at which a held request cannot be followed any further
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from octavo._core import TokenTable
from octavo.config import EngineConfig
from octavo.engine.connection import Connection
from octavo.engine.constraints import OutputConstraints
from octavo.engine.loop import EngineLoop
from octavo.engine.loop_builder import build_loop
from octavo.engine.protocol import StepOutputs
from octavo.engine.worker import main
from octavo.errors import InvalidRequest, ModelNotFound
from octavo.runner.fake import FakeRunner, fake_model_info
from octavo.runner.interface import ModelInfo

VOCAB_SIZE = 512
EOS = VOCAB_SIZE - 1
MAX_MODEL_LEN = 1024
COMMAND = (sys.executable, str(Path(__file__)))


def text_of(token_ids: list[int]) -> str:
    """The text the fake vocabulary gives for token ids."""
    return "".join(f"<{token}>" for token in token_ids)


def fake_config(model: str = "fake", **settings: Any) -> EngineConfig:
    """Settings of a fake engine."""
    return EngineConfig(model=model, **{"num_blocks": 256, "max_num_seqs": 64, **settings})


def fake_loop(config: EngineConfig) -> EngineLoop:
    """The loop of a fake engine in this process."""
    return load(config, lambda *_: None)[0]


class MisbehavingRunner(FakeRunner):
    """Sleeps, raises or ends the process, as told."""

    def __init__(self, info: ModelInfo, options: dict[str, str]) -> None:
        super().__init__(info)
        self._step_s = float(options.get("step_s", 0))
        self._stall_at = int(options.get("stall_at", -1))
        self._crash_at = int(options.get("crash_at", -1))
        self._exit_at = int(options.get("exit_at", -1))
        self._compute_at = int(options.get("compute_at", -1))
        self._compute_s = float(options.get("compute_s", 0))
        self._close_raises = bool(options.get("close_raises"))

    def launch(self, plan: Any) -> Any:
        if self._step_s:
            time.sleep(self._step_s)
        if self.num_steps == self._stall_at:
            time.sleep(30)
        if self.num_steps == self._compute_at:
            until = time.monotonic() + self._compute_s
            while time.monotonic() < until:
                pass
        if self.num_steps == self._crash_at:
            raise RuntimeError("the device is on fire")
        if self.num_steps == self._exit_at:
            os._exit(7)
        return super().launch(plan)

    def close(self) -> None:
        if self._close_raises:
            raise RuntimeError("the device does not answer")
        super().close()


def load(config: EngineConfig, progress: Any) -> tuple[EngineLoop, ModelInfo, None]:
    """What the worker's `build_engine` does, for a fake."""
    options = dict(item.split("=") for item in config.model.partition(":")[2].split(",") if item)
    progress("Loading", 0, 2)
    time.sleep(float(options.get("load_s", 0)))
    if options.get("load") == "refuse" or Path(options.get("refuse_while", "/nowhere")).exists():
        raise ModelNotFound(f"model: there is no {config.model!r}; name another")
    if options.get("load") == "crash":
        raise ZeroDivisionError("a fault of the loader")
    while options.get("load") == "hang":
        time.sleep(1)
    if options.get("garbage"):
        _send_garbage()
    progress("Loading", 2, 2)
    vocab_size = VOCAB_SIZE + Path(options.get("larger_while", "/nowhere")).exists()
    info = fake_model_info(
        vocab_size=vocab_size,
        num_blocks=config.num_blocks or 256,
        max_model_len=config.max_model_len or MAX_MODEL_LEN,
        max_num_seqs=config.sequence_counts("cpu")[0],
    )
    texts, flags = [f"<{token}>".encode() for token in range(vocab_size)], bytearray(vocab_size)
    if options.get("eos"):
        info = msgspec.structs.replace(info, eos_token_ids=(EOS,))
        texts[EOS], flags[EOS] = b"", 1
    loop = build_loop(config, MisbehavingRunner(info, options), info, TokenTable(texts, bytes(flags)))
    _slow_down(loop.constraints, options)
    return loop, info, None


def _slow_down(constraints: OutputConstraints, options: dict[str, str]) -> None:
    """Have some constraints take long, or fail on the way."""
    compile_now, fill = constraints.compile, constraints.fill
    compile_s, fail_at = float(options.get("compile_s", 0)), int(options.get("fail_at", 0))
    calls: dict[int, int] = {}

    def compile_slowly(constraint: Any) -> Any:
        if constraint.grammar is not None and "<7>" in constraint.grammar[1]:
            time.sleep(compile_s)
        return compile_now(constraint)

    def fill_and_fail(keys: bytes, masks: Any) -> Any:
        failures = fill(keys, masks)
        for request_id in set(memoryview(keys).cast("q").tolist()[::2]):
            calls[request_id] = calls.get(request_id, 0) + 1
            if calls[request_id] == fail_at:
                failures.append(
                    (request_id, InvalidRequest("structured_outputs: too many states", "structured_outputs"))
                )
        return failures

    constraints.compile = compile_slowly  # type: ignore[method-assign]
    if fail_at:
        constraints.fill = fill_and_fail  # type: ignore[method-assign]


def _send_garbage() -> None:
    """Have the worker send five bytes that are no message after each step's outputs."""
    send = Connection.send

    def send_more(self: Any, message: Any) -> None:
        send(self, message)
        if isinstance(message, StepOutputs):
            self._socket.send(b"\x05\x00\x00\x00hello")

    Connection.send = send_more  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(load=load))
