"""The main promise: greedy tokens are transformers' (fp32), and nothing that happens around a request changes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from make_golden import GOLDEN, NUM_TOKENS, greedy, load
from octavo import LLM, SamplingParams

# In one process: what the tests share takes long to make.
pytestmark = [pytest.mark.demo, pytest.mark.xdist_group("sameness")]

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LIVE, LIVE_TOKENS = (0, 20, 49), 24
# One prompt at a time takes long: every fourth, or all with OCTAVO_TEST_ALL=1.
ALONE_STRIDE = 1 if os.environ.get("OCTAVO_TEST_ALL") else 4

Answers = list[list[int]]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def prompts(golden: dict[str, Any]) -> Answers:
    return [answer["prompt"] for answer in golden["answers"]]


@pytest.fixture(scope="module")
def expected(golden: dict[str, Any]) -> Answers:
    return [answer["tokens"] for answer in golden["answers"]]


def serve(prompts: Answers, *, alone: bool = False, **settings: Any) -> tuple[Answers, dict[str, Any]]:
    """Everyone's tokens, all prompts at once or one after the other, and the engine's stats after that."""
    settings = {"max_num_seqs": 64, "kv_cache_memory": 512 << 20, **settings}
    with LLM("demo", **settings) as llm:
        batches = [[prompt] for prompt in prompts] if alone else [prompts]
        outputs = [output for batch in batches for output in llm.generate(batch, PARAMS)]
        return [output.outputs[0].token_ids for output in outputs], llm.stats()


def check(got: Answers, expected: Answers, golden: dict[str, Any]) -> None:
    """Fail with every difference, where it begins, and how near to a tie the reference came."""
    differences = []
    stride = len(golden["answers"]) // len(got)
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        number = index * stride
        if mine != theirs:
            first = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            answer = golden["answers"][number]
            differences.append(
                f"prompt {number} ({answer['text'][:40]!r}), token {first}: {mine[first]} instead of {theirs[first]}; "
                f"least margin {answer['margin']}"
            )
    assert not differences, "\n".join([f"{len(differences)} of {len(expected)} differ", *differences])


MODES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "chunks of 64, overlap": {"max_num_batched_tokens": 64, "overlap": True},
    "chunks of 512, preemption": {"max_num_batched_tokens": 512, "num_blocks": 48, "max_model_len": 640},
    "preemption, overlap, blocks of 32": {"num_blocks": 25, "max_model_len": 640, "block_size": 32, "overlap": True},
}


def test_the_golden_file_is_what_it_says(golden: dict[str, Any], prompts: Answers, expected: Answers) -> None:
    assert len(prompts) >= 50
    assert all(len(tokens) == NUM_TOKENS for tokens in expected)
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "varied"


@pytest.mark.parametrize("mode", list(MODES)[1:4])
def test_fp32_is_transformers(mode: str, golden: dict[str, Any], prompts: Answers, expected: Answers) -> None:
    got, stats = serve(prompts, dtype="float32", **MODES[mode])
    check(got, expected, golden)
    assert (stats["preemptions"] > 0) == ("preemption" in mode)


def test_fp32_at_once_and_again_with_prefix_hits(golden: dict[str, Any], prompts: Answers, expected: Answers) -> None:
    with LLM("demo", dtype="float32", max_num_seqs=64, kv_cache_memory=512 << 20) as llm:
        for repeat in range(2):
            outputs = llm.generate(prompts, PARAMS)
            check([output.outputs[0].token_ids for output in outputs], expected, golden)
            if repeat:
                assert [output.num_cached_tokens for output in outputs] == [
                    (len(prompt) - 1) // 16 * 16 for prompt in prompts
                ]


def test_fp32_alone_is_transformers(golden: dict[str, Any], prompts: Answers, expected: Answers) -> None:
    got, _ = serve(prompts[::ALONE_STRIDE], dtype="float32", alone=True)
    check(got, expected[::ALONE_STRIDE], golden)


@pytest.fixture(scope="module")
def bfloat16_alone(prompts: Answers) -> Answers:
    return serve(prompts[::ALONE_STRIDE], dtype="bfloat16", alone=True)[0]


@pytest.mark.parametrize("mode", MODES)
def test_bf16_alone_and_in_company(
    mode: str, golden: dict[str, Any], prompts: Answers, bfloat16_alone: Answers
) -> None:
    got, stats = serve(prompts, dtype="bfloat16", **MODES[mode])
    check(got[::ALONE_STRIDE], bfloat16_alone, golden)
    assert (stats["preemptions"] > 0) == ("preemption" in mode)


def test_the_golden_file_is_what_transformers_says_today(golden: dict[str, Any], demo_file: Path) -> None:
    model, tokenizer = load(demo_file)
    for number in LIVE:
        answer = golden["answers"][number]
        assert tokenizer(answer["text"])["input_ids"] == answer["prompt"]
        assert greedy(model, answer["prompt"], LIVE_TOKENS)[0] == answer["tokens"][:LIVE_TOKENS]


def test_prompts_are_tokenized_as_transformers_does(golden: dict[str, Any], demo_file: Path) -> None:
    from octavo.loading.resolve import resolve_model
    from octavo.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_source(resolve_model(str(demo_file)))
    for answer in golden["answers"]:
        assert tokenizer.encode(answer["text"], add_special_tokens=False) == answer["prompt"]
