"""An engine over a model without a tokenizer, and answers as bytes that either are equal or are not."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from octavo import LLM, SamplingParams
from octavo._core import TokenTable
from octavo.config import EngineConfig
from octavo.engine.backend import LocalBackend
from octavo.engine.loop_builder import build_loop
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.loading.resolve import resolve_model
from octavo.runner import build_runner
from small_models import DEVICE, ON_CPU

KV_BYTES = 512 << 20 if ON_CPU else 8 << 30

Question = tuple[list[int], SamplingParams]


class SmallEngine:
    """`LLM` with its parts at hand. Each token is one to three times the same letter, the last one ends answers.

    Attributes:
        llm: the engine.
        most_groups: the most groups of rows with a common prefix that one step had.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        if "num_blocks" not in settings:
            settings["kv_cache_memory"] = KV_BYTES
        config = EngineConfig(model=str(folder), device=DEVICE, dtype="bfloat16", **settings)  # type: ignore[arg-type]
        runner, info = build_runner(config, resolve_model(config.model))
        end = info.vocab_size - 1
        info = msgspec.structs.replace(info, eos_token_ids=(end,))
        texts = [bytes([97 + token % 26]) * (1 + token // 26 % 3) for token in range(end)]
        self._loop = build_loop(config, runner, info, TokenTable([*texts, b""], bytes(end) + b"\1"))
        self.llm = LLM.from_backend(config, LocalBackend(self._loop, info, None))
        self.most_groups = 0
        launch = runner.launch

        def watched(plan: Any) -> Any:
            self.most_groups = max(self.most_groups, plan.num_groups)
            return launch(plan)

        runner.launch = watched  # type: ignore[method-assign]

    def ask(self, questions: Sequence[Question], salt: str) -> list[RequestOutput]:
        """Answer all at once; only questions of the same salt share a prefix."""
        params = []
        for _, one in questions:
            one = one.__copy__()
            one.cache_salt = salt
            params.append(one)
        return self.llm.generate([prompt for prompt, _ in questions], params, use_tqdm=False)

    def check(self) -> None:
        """Nothing runs: every block is free and the core agrees with itself."""
        stats = self.llm.stats()
        assert stats["blocks_used"] == stats["running"] == stats["waiting"] == 0
        assert stats["blocks_free"] == stats["blocks_total"]
        self._loop.core.check_invariants()

    def __enter__(self) -> SmallEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.llm.close()


def bits(output: RequestOutput) -> list[bytes]:
    """Each answer's tokens and the bits of its log probabilities."""
    return [_bits(answer) for answer in output.outputs]


def _bits(answer: CompletionOutput) -> bytes:
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    packed = b""
    for entry in answer.logprobs:
        packed += struct.pack("<if", entry.token_id, entry.logprob)
        packed += b"".join(struct.pack("<if", token, value) for token, value in entry.top)
    return packed


def differences(got: Sequence[RequestOutput], expected: Sequence[list[bytes]], questions: Sequence[Question]) -> str:
    """Where answers differ, for people; empty when none does."""
    found = []
    for number, (output, wanted, (prompt, params)) in enumerate(zip(got, expected, questions, strict=True)):
        if bits(output) == wanted:
            continue
        for answer, mine, theirs in zip(output.outputs, bits(output), wanted, strict=True):
            size = 8 * (1 + (params.logprobs or 0))
            pairs = zip(_cut(mine, size), _cut(theirs, size), strict=False)
            place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
            if place is None and len(mine) == len(theirs):
                continue
            words = "lengths" if place is None else f"token {place}"
            if place is not None:
                a, b = (struct.unpack_from("<if", data, place * size) for data in (mine, theirs))
                words += f": {a[0]} ({a[1]:.7g}) instead of {b[0]} ({b[1]:.7g})"
            found.append(f"prompt {number} of {len(prompt)} tokens, answer {answer.index}, {words}")
    return "\n".join([f"{len(found)} of {len(got)} differ", *found[:20]]) if found else ""


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
