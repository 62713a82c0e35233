"""The GPU's runner end to end in Triton's interpreter: the same tokens as the CPU's, however the steps are cut."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from octavo.config import EngineConfig
from octavo.engine.constraints import OutputConstraints
from octavo.engine.loop_builder import build_loop
from octavo.layers.backends.cuda_inputs import StepSize
from octavo.loading.model_files import load_model_config, open_weights
from octavo.loading.resolve import resolve_model
from octavo.models.registry import build_decoder
from octavo.runner.interface import ModelInfo, Runner
from octavo.runner.runner_builder import build_runner

if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)

from octavo.runner.cuda import CudaRunner
from octavo.runner.cuda_build import cuda_needs, make_step
from octavo.runner.cuda_step import CudaStep
from octavo.runner.memory import plan_memory

# Rows that pad a step hold whatever memory held, and the interpreter sums them with numpy.
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in reduce:RuntimeWarning"),
]

SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 96}


def saved(config_class: Any, path: Path, **keys: Any) -> Path:
    config = config_class(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=None,
        **keys,
    )
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(transformers.Qwen3Config, tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers form two cache groups."""
    keys = {"num_hidden_layers": 4, "sliding_window": 17}
    return saved(transformers.Gemma2Config, tmp_path_factory.mktemp("sliding"), **keys)


def cpu_runner(config: EngineConfig) -> tuple[Runner, ModelInfo]:
    return build_runner(config, resolve_model(config.model))


def gpu_runner(config: EngineConfig) -> tuple[Runner, ModelInfo]:
    """The GPU's runner, of tensors on the CPU."""
    source = resolve_model(config.model)
    decoder = build_decoder(load_model_config(source))
    needs = cuda_needs(config, decoder, config.sequence_counts("cuda")[-1])
    plan = plan_memory(config, decoder, name="m", dtype="float32", free_bytes=4 << 30, needs=needs)
    device = torch.device("cpu")
    make, weights_bytes, kv_bytes = make_step(
        config, decoder, plan, lambda: open_weights(source, decoder.parameters()), device
    )
    info = ModelInfo(
        name="m",
        architecture=decoder.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=decoder.vocab_size,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_num_seqs=plan.max_num_seqs,
        dtype=plan.dtype,
        device="cuda",
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        cache_windows=plan.cache_windows,
        group_min_blocks=1,
    )
    max_tokens = plan.max_num_batched_tokens
    return CudaRunner(make, info, max_num_seqs=plan.max_num_seqs, max_tokens=max_tokens, device=device), info


@dataclasses.dataclass
class Answers:
    """Tokens by (request, sample), log probabilities likewise, and the core's statistics."""

    tokens: dict[tuple[int, int], list[int]]
    logprobs: dict[tuple[int, int], list[tuple[float, list[int], list[float]]]]
    stats: dict[str, int]


class RandomMasks(OutputConstraints):
    """Has each masked sample choose among some 30 of the tokens, others for every answer and every place of it."""

    def __init__(self) -> None:
        super().__init__(None, (), 1)
        self.drawn: dict[tuple[int, int], int] = defaultdict(int)

    def fill(self, keys: bytes, masks: Any) -> list[Any]:
        samples = np.frombuffer(keys, dtype=np.int64).reshape(-1, 2).tolist()
        for words, (request, sample) in zip(masks, samples, strict=False):
            self.drawn[request, sample] += 1
            rng = np.random.default_rng([request, sample, self.drawn[request, sample]])
            words[:] = np.packbits(rng.random(128) < 0.3, bitorder="little").view(np.int32)
        return []


def answer(make: Any, folder: Path, requests: list[tuple[list[int], dict[str, Any]]], **changes: Any) -> Answers:
    config = EngineConfig(model=str(folder), device="cpu", **{**SETTINGS, "num_blocks": 24, **changes})
    runner, info = make(config)
    loop = build_loop(config, runner, info, None)
    loop.constraints = RandomMasks()
    for number, (prompt, params) in enumerate(requests):
        settings = {"max_tokens": 4, "temperature": 0.0, "arrival_us": number} | params
        loop.core.submit(number, np.array(prompt, dtype=np.int32).tobytes(), **settings)
    tokens, logprobs = defaultdict(list), defaultdict(list)
    while loop.has_work():
        outputs = loop.step()
        loop.core.check_invariants()
        if outputs is None:
            continue
        keys = zip(
            np.frombuffer(outputs.request_ids, dtype=np.int64).tolist(),
            np.frombuffer(outputs.sample_indices, dtype=np.int32).tolist(),
            strict=True,
        )
        ids = np.frombuffer(outputs.token_ids, dtype=np.int32).tolist()
        for row, (key, token) in enumerate(zip(keys, ids, strict=True)):
            tokens[key].append(token)
            if outputs.logprobs is not None:
                given = outputs.logprobs
                width = given.width
                tops = np.frombuffer(given.top_ids, dtype=np.int32).reshape(-1, width)[row]
                values = np.frombuffer(given.top, dtype=np.float32).reshape(-1, width)[row]
                chosen = float(np.frombuffer(given.chosen, dtype=np.float32)[row])
                logprobs[key].append((chosen, tops.tolist(), values.tolist()))
    stats = loop.core.stats()
    loop.close()
    return Answers(dict(tokens), dict(logprobs), stats)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 101, length).tolist()


SHARED = prompt(33, 9)
REQUESTS: dict[str, list[tuple[list[int], dict[str, Any]]]] = {
    "mixed lengths, chunked": [(prompt(60, 1), {}), (prompt(1, 2), {}), (prompt(17, 3), {"max_tokens": 6})],
    "shared prefixes": [(SHARED, {}), ([*SHARED, 5], {}), ([*SHARED, 7, 8], {}), (SHARED, {})],
    "several samples": [(prompt(20, 4), {"n": 3, "temperature": 0.9, "seed": 5}), (prompt(3, 5), {})],
    "masks and biases": [
        (prompt(25, 1), {"constrained": True, "max_tokens": 6, "logit_bias": [(3, 4.0), (7, -3.0), (50, -math.inf)]}),
        (prompt(9, 2), {"constrained": True, "n": 2, "temperature": 1.2, "seed": 4, "frequency_penalty": 0.5}),
        (prompt(3, 3), {"logit_bias": [(token, token % 5 - 2.0) for token in range(101)], "max_tokens": 6}),
    ],
    "penalties and bans": [
        (prompt(18, 6), {"repetition_penalty": 1.3, "presence_penalty": 0.5, "max_tokens": 6}),
        (prompt(5, 7), {"frequency_penalty": 0.7, "min_tokens": 4, "stop_token_ids": list(range(60)), "max_tokens": 6}),
        (prompt(9, 8), {"temperature": 0.8, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.01}),
    ],
}


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_tokens_are_those_of_the_cpu(folder: Path, requests: Any) -> None:
    expected = answer(cpu_runner, folder, requests)
    got = answer(gpu_runner, folder, requests)
    assert got.tokens == expected.tokens
    assert got.stats["blocks_free"] == got.stats["blocks_total"]


def test_layers_of_two_cache_groups(sliding: Path) -> None:
    requests = [(SHARED, {"n": 2}), (prompt(70, 1), {}), (SHARED[:33], {"max_tokens": 9})]
    expected = answer(cpu_runner, sliding, requests, num_blocks=60)
    got = answer(gpu_runner, sliding, requests, num_blocks=60)
    assert got.tokens == expected.tokens
    assert got.stats["blocks_free"] == got.stats["blocks_total"]


def test_prefixes_are_shared_beside_prompt_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [(SHARED, {"n": 2}), (prompt(80, 1), {})]
    expected = answer(cpu_runner, folder, requests)
    kinds = []
    launch = CudaStep.__call__

    def note(step: CudaStep, size: StepSize) -> None:
        kinds.append(size.kind)
        launch(step, size)

    monkeypatch.setattr(CudaStep, "__call__", note)
    got = answer(gpu_runner, folder, requests)
    assert got.tokens == expected.tokens
    assert {"mixed", "mixed_grouped", "grouped"} <= set(kinds)


def test_log_probabilities_are_those_of_the_cpu(folder: Path) -> None:
    requests = [(prompt(6, 1), {"logprobs": 3}), (prompt(4, 2), {}), (prompt(2, 3), {"logprobs": 0})]
    expected = answer(cpu_runner, folder, requests)
    got = answer(gpu_runner, folder, requests)
    assert got.tokens == expected.tokens
    for request, width in ((0, 3), (2, 0)):
        for mine, theirs in zip(got.logprobs[request, 0], expected.logprobs[request, 0], strict=True):
            assert mine[0] == pytest.approx(theirs[0], abs=1e-4)
            assert mine[1][:width] == theirs[1][:width]
            assert mine[2][:width] == pytest.approx(theirs[2][:width], abs=1e-4)


def test_preempted_answers_go_on_as_they_were(folder: Path) -> None:
    requests = [(prompt(30, seed), {"max_tokens": 7, "frequency_penalty": 0.2}) for seed in range(2)]
    expected = answer(cpu_runner, folder, requests)
    got = answer(gpu_runner, folder, requests, num_blocks=6, max_model_len=64)
    assert got.stats["preemptions"] > 0
    assert got.tokens == expected.tokens
