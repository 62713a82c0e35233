"""A GPU's memory: engines keep to their share of it, say what they lack, and take no more while they serve."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.runner.memory import format_bytes
from small_engine import SmallEngine
from small_models import DEVICE, NEEDS_DEVICE, ON_CPU, SETTINGS, write_config

MIB = 1 << 20
GIB = 1 << 30
# Beside an engine's share: the CUDA context of its process.
CONTEXT_BYTES = GIB
# For a moment, while a graph is recorded: a workspace of cuBLASLt.
RECORDING_BYTES = MIB
PROMPTS = [[3 + number, 5, 7, 11] * (1 + number) for number in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

pytestmark = NEEDS_DEVICE


def settings(**changes: Any) -> dict[str, Any]:
    """As `SETTINGS`, with a cache as large as other settings say."""
    return {name: value for name, value in SETTINGS.items() if name != "num_blocks"} | changes


def free_bytes() -> int:
    return 0 if ON_CPU else torch.cuda.mem_get_info()[0]


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_config("qwen3", tmp_path_factory.mktemp("model")))


@pytest.fixture
def held() -> Iterator[list[torch.Tensor]]:
    """Tensors that are given back to the device at the end."""
    tensors: list[torch.Tensor] = []
    yield tensors
    tensors.clear()
    if not ON_CPU:
        torch.cuda.empty_cache()


def test_the_cache_is_as_large_as_asked(model: str) -> None:
    asked = 64 * MIB if ON_CPU else GIB
    with LLM(model, worker=True, **settings(kv_cache_memory=asked)) as llm:
        info = llm.model
        assert asked - info.kv_bytes // info.num_blocks < info.kv_bytes <= asked
        assert [len(answer) for answer in answers(llm)] == [8] * len(PROMPTS)


def test_more_cache_than_there_is_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory [0-9.]+ TiB asks for .* free, .* may be used"):
        LLM(model, worker=True, **settings(kv_cache_memory=1 << 50))


def test_two_engines_side_by_side(model: str) -> None:
    share = 0.3
    at_first = free_bytes()
    with LLM(model, worker=True, **settings(gpu_memory_utilization=share)) as first:
        beside_one = free_bytes()
        with LLM(model, worker=True, **settings(gpu_memory_utilization=share)) as second:
            assert answers(first) == answers(second) == answers(first)
            beside_two = free_bytes()
    assert at_first - beside_one <= share * at_first + CONTEXT_BYTES
    # The first may have recorded some graphs meanwhile: what it kept back for them is of its own share.
    assert at_first - beside_two <= share * (at_first + beside_one) + 2 * CONTEXT_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("left", [6 * GIB, 2 * GIB, 700 * MIB])
def test_another_process_holds_most_of_the_device(model: str, held: list[torch.Tensor], left: int) -> None:
    torch.cuda.empty_cache()
    held.append(torch.empty(free_bytes() - left, dtype=torch.uint8, device=DEVICE))
    before = free_bytes()
    assert before < left + 64 * MIB
    try:
        llm = LLM(model, worker=True, **settings(gpu_memory_utilization=0.9))
    except ConfigError as error:
        refused = str(error)
    else:
        with llm:
            assert llm.model.weights_bytes + llm.model.kv_bytes < 0.9 * before
            assert [len(answer) for answer in answers(llm)] == [8] * len(PROMPTS)
        return
    assert left < 6 * GIB, f"{format_bytes(left)} are enough: {refused}"
    # With figures; where not even a context fits, in CUDA's words.
    assert "may be used" in refused or "are left of" in refused or "out of memory" in refused


def test_a_full_pool_of_the_longest_prompts_takes_no_more_memory(model: str) -> None:
    length, output, rows = (256, 8, 8) if ON_CPU else (2048, 48, 64)
    # Half of what the rows will need: some are put off, and begin anew.
    num_blocks = rows * length // 16 // 2
    changes = {"max_num_seqs": rows, "max_model_len": length, "num_blocks": num_blocks, "enable_prefix_caching": False}
    questions = [
        (
            [(number * 7919 + place * 104729) % 1000 + 3 for place in range(length - output)],
            SamplingParams(
                temperature=float(number % 2),
                seed=number,
                logprobs=20,
                repetition_penalty=1.1,
                presence_penalty=0.5,
                frequency_penalty=0.5,
                max_tokens=output,
                ignore_eos=True,
            ),
        )
        for number in range(2 * rows)
    ]
    own = {name: value for name, value in settings(**changes).items() if name not in ("device", "dtype")}
    with SmallEngine(Path(model), **own) as engine:
        first = engine.ask(questions, "")
        gc.collect()
        if not ON_CPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        second = engine.ask(questions, "")
        if not ON_CPU:
            assert torch.cuda.memory_allocated() == before
            assert torch.cuda.max_memory_allocated() < before + RECORDING_BYTES
        engine.check()
    for one, other in zip(first, second, strict=True):
        (mine,), (theirs,) = one.outputs, other.outputs
        assert len(mine.token_ids) == output
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs is not None
        assert all(len(entry.top) == 20 for entry in mine.logprobs)
