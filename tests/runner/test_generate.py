"""Core and runner together, without text: greedy tokens equal transformers', however the steps are cut."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from octavo._core import Core
from octavo.config import EngineConfig
from octavo.loading.resolve import resolve_model
from octavo.runner.fake import FakeRunner, fake_model_info
from octavo.runner.interface import ModelInfo, Runner
from octavo.runner.runner_builder import build_runner

NEW_TOKENS = 20
LENGTHS = [1, 3, 15, 16, 17, 31, 40, 64, 70, 33]


def prompts() -> list[list[int]]:
    """Prompts of all sorts of lengths; two of them share their first 32 tokens."""
    generator = torch.Generator().manual_seed(2)
    made = [torch.randint(0, 101, (length,), generator=generator).tolist() for length in LENGTHS]
    made[-1] = made[7][:32] + made[-1][32:]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    answers = []
    for prompt in prompts():
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def make_core(config: EngineConfig, info: ModelInfo) -> Core:
    return Core(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens("cpu"),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=[],
        enable_prefix_caching=config.enable_prefix_caching,
    )


def generate(core: Core, runner: Runner, *, overlap: bool, **params: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Answers in the order of the prompts (all first samples, then all second ones), and the core's statistics."""
    runner.attach(core)
    for index, prompt in enumerate(prompts()):
        settings = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "arrival_us": index, **params}
        core.submit(index, np.array(prompt, dtype=np.int32).tobytes(), **settings)
    answers: dict[int, list[int]] = defaultdict(list)
    opened: list[Any] = []
    while core.has_work() or opened:
        plan = core.plan()
        if plan is not None:
            opened.append((plan.step, runner.launch(plan)))
        if opened and (plan is None or len(opened) > overlap):
            step, handle = opened.pop(0)
            handle.result()
            frame = core.commit(step)
            requests = np.frombuffer(frame.request_ids, dtype=np.int64).tolist()
            samples = np.frombuffer(frame.sample_indices, dtype=np.int32).tolist()
            tokens = np.frombuffer(frame.token_ids, dtype=np.int32).tolist()
            for request, sample, token in zip(requests, samples, tokens, strict=True):
                answers[request + sample * len(LENGTHS)].append(token)
        core.check_invariants()
    return [answers[index] for index in range(len(answers))], core.stats()


def run(folder: Path, *, overlap: bool = False, **changes: Any) -> tuple[list[list[int]], dict[str, int]]:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_blocks": 80,
        **changes,
    }
    config = EngineConfig(model=str(folder), max_model_len=112, **settings)
    runner, info = build_runner(config, resolve_model(config.model))
    answers = generate(make_core(config, info), runner, overlap=overlap)
    runner.close()
    return answers


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 2048},
        {"block_size": 32},
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(
    changes: dict[str, Any], overlap: bool, folder: Path, expected: list[list[int]]
) -> None:
    assert run(folder, overlap=overlap, **changes)[0] == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_sequences_go_on_with_the_same_tokens(overlap: bool, folder: Path, expected: list[list[int]]) -> None:
    answers, stats = run(folder, overlap=overlap, num_blocks=10)
    assert answers == expected
    assert stats["preemptions"] > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_penalties_survive_preemption_and_overlap(overlap: bool, folder: Path) -> None:
    def answers(**changes: Any) -> list[list[int]]:
        config = EngineConfig(
            model=str(folder), device="cpu", dtype="float32", max_model_len=112, max_num_batched_tokens=64, **changes
        )
        runner, info = build_runner(config, resolve_model(config.model))
        core = make_core(config, info)
        return generate(core, runner, overlap=overlap, repetition_penalty=1.3, frequency_penalty=0.5)[0]

    together = answers(max_num_seqs=8, num_blocks=10)
    assert together == answers(max_num_seqs=1, num_blocks=80)
    assert all(len(set(answer)) > 6 for answer in together)


@pytest.mark.parametrize("num_blocks", [80, 12])
def test_greedy_samples_of_one_prompt_are_equal(num_blocks: int, folder: Path) -> None:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=112,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        num_blocks=num_blocks,
    )
    runner, info = build_runner(config, resolve_model(config.model))
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.4}
    single, _ = generate(make_core(config, info), runner, overlap=False, **params)
    double, _ = generate(make_core(config, info), runner, overlap=True, n=2, **params)
    assert double == single + single


def test_fake_runner_serves_the_same_core() -> None:
    config = EngineConfig(model="fake", max_num_seqs=4, max_num_batched_tokens=32)
    info = fake_model_info(vocab_size=101, num_blocks=40, max_model_len=112)
    together, _ = generate(make_core(config, info), FakeRunner(info), overlap=True)
    alone, _ = generate(
        make_core(EngineConfig(model="fake", max_num_seqs=1, max_num_batched_tokens=32), info),
        FakeRunner(info),
        overlap=False,
    )
    assert together == alone
    assert all(len(answer) == NEW_TOKENS for answer in together)
