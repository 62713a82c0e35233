"""Answers held to sets of tokens, and logits that are changed, on a device: the same bits alone and among others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo import SamplingParams
from small_engine import Question, SmallEngine, bits, differences
from small_models import NEEDS_DEVICE, ON_CPU, write_model

pytestmark = NEEDS_DEVICE

VOCAB_SIZE = 1000
ROWS = 32 if ON_CPU else 256
SETTINGS = {"max_num_seqs": ROWS, "max_num_batched_tokens": 512, "max_model_len": 512}


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(length)]


def questions(count: int, seed: str) -> list[Question]:
    """Half of them held to one token, a few or many, half of them with biases, and some with neither."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 1.0)),
            seed=number,
            top_k=rng.choice((-1, 5)),
            top_p=rng.choice((1.0, 0.9)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
            n=2 if number % 7 == 3 else 1,
            logprobs=2,
            max_tokens=rng.randint(4, 20),
            ignore_eos=True,
            allowed_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice((1, 3, 40, 800))) if number % 2 else None,
            logit_bias={token: rng.uniform(-100, 100) for token in draw(rng, 30)} if number % 4 > 1 else None,
        )
        made.append((draw(rng, rng.randint(1, 200)), params))
    return made


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallEngine]:
    folder: Path = write_model("qwen3", tmp_path_factory.mktemp("qwen3"))
    with SmallEngine(folder, **SETTINGS) as made:
        yield made
        made.check()


def test_answers_are_held_and_the_same_alone_and_among_others(engine: SmallEngine) -> None:
    asked = questions(16, "asked")
    outputs = [engine.ask([question], f"alone {number}")[0] for number, question in enumerate(asked)]
    for output, (_, params) in zip(outputs, asked, strict=True):
        for answer in output.outputs:
            assert len(answer.token_ids) == params.max_tokens
            if params.allowed_token_ids is not None:
                assert set(answer.token_ids) <= set(params.allowed_token_ids)
    expected = [bits(output) for output in outputs]
    for others in (0, 2 * ROWS):
        got = engine.ask([*asked, *questions(others, "others")], f"among {others}")
        assert not differences(got[: len(asked)], expected, asked)
        # A second time prompts are found in the cache.
        got = engine.ask([*questions(others, "others"), *asked], f"among {others}")
        assert not differences(got[others:], expected, asked)


def test_steps_with_and_without_masks_take_turns(engine: SmallEngine) -> None:
    """Free answers are planned a step ahead beside held ones, whose rows come and go."""
    free = [(prompt, params) for prompt, params in questions(40, "free") if params.allowed_token_ids is None]
    held = [(prompt, params) for prompt, params in questions(40, "held") if params.allowed_token_ids is not None]
    expected = [bits(output) for output in engine.ask(free, "first")]
    for number in range(3):
        got = engine.ask([*free, *held[: 4 * number]], f"with {number}")
        assert not differences(got[: len(free)], expected, free)
