"""The main promise on a device: the same tokens and the same bits of log probability, whatever happens around them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from octavo import SamplingParams
from octavo.engine.outputs import RequestOutput
from small_engine import Question, SmallEngine, bits, differences
from small_models import CONFIGS, NEEDS_DEVICE, ON_CPU

pytestmark = NEEDS_DEVICE

# Prompts are as many times shorter on a CPU.
SHRINK = 16 if ON_CPU else 1
ROWS = 32 if ON_CPU else 256
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 4096 // SHRINK
BLOCK_SIZE = 16
LENGTHS = (
    *(1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 258, 300, 511, 512, 513, 767, 768, 769),
    *(1000, 1023, 1024, 1025, 1500, 2047, 2048, 2049, 2300, 2999, 3000),
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    *({"temperature": 0.0},) * 5,
    {"temperature": 0.9, "seed": 7, "top_p": 0.9},
    {"temperature": 1.1, "seed": 8, "top_k": 50, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "structured_outputs": {"regex": "([a-m]{1,5}[n-z]{1,5}){9,}"}},
    {"temperature": 1.0, "seed": 9, "allowed_token_ids": [*range(300, 700)], "logit_bias": {310: 3.0, 311: -100.0}},
)
BASE: dict[str, Any] = {"max_num_seqs": ROWS, "max_num_batched_tokens": 8192 // SHRINK, "max_model_len": MAX_MODEL_LEN}


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(length)]


def questions() -> list[Question]:
    """64 prompts of all lengths, most greedy; sampled ones have a seed."""
    rng = random.Random("questions")
    lengths = [max(length // SHRINK, 1) for length in LENGTHS]
    lengths += [rng.randint(1, 3000 // SHRINK) for _ in range(64 - len(lengths))]
    rng.shuffle(lengths)
    return [
        (
            draw(rng, length),
            SamplingParams(
                **SAMPLINGS[number % len(SAMPLINGS)], max_tokens=rng.randint(8, 40), logprobs=2, ignore_eos=True
            ),
        )
        for number, length in enumerate(lengths)
    ]


def traffic(count: int) -> list[Question]:
    """Others' requests: short and long, sampled without a seed, with several answers, some that share a prefix."""
    rng = random.Random(f"traffic {count}")
    prefix = draw(rng, 600 // SHRINK)
    made = []
    for number in range(count):
        prompt = draw(rng, rng.choice((1, 20, 100, 700)) // SHRINK + 1)
        params = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            top_k=rng.choice((-1, 5)),
            structured_outputs=rng.choice((None, None, {"regex": "[a-c]+[d-z]+"})),
            frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
            n=3 if number % 17 == 0 else 1,
            logprobs=rng.choice((None, None, 5)),
            max_tokens=rng.randint(1, 50),
            ignore_eos=True,
        )
        made.append((prefix + prompt if number % 5 == 0 else prompt, params))
    return made


def mixed(asked: Sequence[Question], others: Sequence[Question]) -> tuple[list[Question], list[int]]:
    """Both in one shuffled list, and where the first ones are in it."""
    rng = random.Random(f"mixed {len(asked)} {len(others)}")
    whole = [*enumerate(asked), *((-1, other) for other in others)]
    rng.shuffle(whole)
    places = {number: place for place, (number, _) in enumerate(whole) if number >= 0}
    return [question for _, question in whole], [places[number] for number in range(len(asked))]


def alone(engine: SmallEngine, asked: Sequence[Question], salt: str) -> list[RequestOutput]:
    """One after the other, without a prefix hit."""
    outputs = [engine.ask([question], f"{salt} {number}")[0] for number, question in enumerate(asked)]
    assert not any(output.num_cached_tokens for output in outputs)
    return outputs


def assert_same(got: Sequence[RequestOutput], expected: Sequence[list[bytes]], asked: Sequence[Question]) -> None:
    found = differences(got, expected, asked)
    assert not found, found


class Case:
    """A model, the engine that most tests share, and what each question is answered alone."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.engines = ENGINES_OF.get(name, tuple(ENGINES))
        self.engine = SmallEngine(folder, **BASE)
        self.asked = questions()
        self.outputs = alone(self.engine, self.asked, "alone")
        self.expected = [bits(output) for output in self.outputs]


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    from small_models import write_model

    made = Case(write_model(request.param, tmp_path_factory.mktemp(request.param)), request.param)
    yield made
    made.engine.check()
    made.engine.llm.close()


def test_answers_are_worth_comparing(case: Case) -> None:
    texts = [tuple(output.outputs[0].token_ids) for output in case.outputs]
    assert len(set(texts)) == len(texts), "they differ from each other"
    greedy = [
        output.outputs[0]
        for output, (_, params) in zip(case.outputs, case.asked, strict=True)
        if params.temperature == 0 and params.repetition_penalty == 1 and not params.is_constrained
    ]
    for answer in greedy:
        assert answer.logprobs is not None
        assert all(entry.token_id == entry.top[0][0] for entry in answer.logprobs)
        assert all(entry.logprob == entry.top[0][1] < 0 for entry in answer.logprobs)
    for output, (_, params) in zip(case.outputs, case.asked, strict=True):
        if params.structured_outputs is not None:
            assert re.match("([a-m]+[n-z]+)+", output.outputs[0].text)
        if params.allowed_token_ids is not None:
            assert {*output.outputs[0].token_ids} <= {*params.allowed_token_ids} - {311}
    assert_same(alone(case.engine, case.asked[:4], "alone again"), case.expected[:4], case.asked[:4])


def test_in_batches_of_every_size(case: Case) -> None:
    start = 0
    for size in (2, 3, 5, 8, 12, 33):
        asked = case.asked[start : start + size]
        got = case.engine.ask(asked, f"batch of {size}")
        assert_same(got, case.expected[start : start + size], asked)
        start += size
    assert start >= len(case.asked) - 1


def test_in_a_full_batch_with_other_traffic(case: Case) -> None:
    asked, places = mixed(case.asked, traffic(ROWS - 64 if ROWS > 64 else 16))
    outputs = case.engine.ask(asked, "traffic")
    assert_same([outputs[place] for place in places], case.expected, case.asked)


def test_with_prefix_hits(case: Case) -> None:
    case.engine.ask(case.asked, "hits")
    outputs = case.engine.ask(case.asked, "hits")
    assert [output.num_cached_tokens for output in outputs] == [
        (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt, _ in case.asked
    ]
    assert_same(outputs, case.expected, case.asked)


def test_prefix_hits_on_generated_tokens(case: Case) -> None:
    """A second turn whose cached part was computed by decode steps, against the same computed as a prompt."""
    rng = random.Random("turns")
    long = [number for number, (_, params) in enumerate(case.asked) if (params.max_tokens or 0) >= 24][:24]
    case.engine.ask([case.asked[number] for number in long], "turns")
    asked = []
    for number in long:
        prompt, params = case.asked[number]
        asked.append((prompt + case.outputs[number].outputs[0].token_ids + draw(rng, 9), params))
    expected = [bits(output) for output in alone(case.engine, asked, "second turn")]
    outputs = case.engine.ask(asked, "turns")
    assert_same(outputs, expected, asked)
    cached = [
        output.num_cached_tokens - len(case.asked[number][0]) for output, number in zip(outputs, long, strict=True)
    ]
    assert sum(tokens > 0 for tokens in cached) >= len(cached) // 2, "generated tokens were found"


def test_rows_with_a_common_prefix(case: Case) -> None:
    """Two families of rows, one with a second common part, read their common blocks together; then alone."""
    rng = random.Random("families")
    first, second, third = draw(rng, 2000 // SHRINK), draw(rng, 300 // SHRINK), draw(rng, 1100 // SHRINK)
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=2, ignore_eos=True)
    sizes = (3, 5, 2) if ON_CPU else (40, 17, 2)
    prompts = [first + draw(rng, 1 + 7 * number) for number in range(sizes[0])]
    prompts += [first + second + draw(rng, 5 + number) for number in range(sizes[1])]
    prompts += [third + draw(rng, 30) for _ in range(sizes[2])]
    asked = [(prompt, params) for prompt in prompts]
    # Every row of the small families, every fourth of the large one.
    chosen = [*range(0, sizes[0], 4), *range(sizes[0], len(asked), 3), len(asked) - 1]
    expected = [bits(output) for output in alone(case.engine, [asked[number] for number in chosen], "apart")]
    case.engine.ask([(prefix, params) for prefix in (first, first + second, third)], "families")
    case.engine.most_groups = 0
    whole, places = mixed(asked, traffic(20))
    outputs = case.engine.ask(whole, "families")
    assert_same([outputs[places[number]] for number in chosen], expected, [asked[number] for number in chosen])
    if not ON_CPU:
        assert case.engine.most_groups >= 2, "their common blocks were read once for all"


def test_one_prompt_with_several_answers(case: Case) -> None:
    """Answers that fork from one prompt share its blocks, and a greedy one equals the answer alone."""
    numbers = [number for number, (_, params) in enumerate(case.asked) if not params.temperature][:8]
    asked = []
    for number in numbers:
        prompt, params = case.asked[number]
        params = params.__copy__()
        params.n = 3
        asked.append((prompt, params))
    expected = [case.expected[number] * 3 for number in numbers]
    assert_same(case.engine.ask(asked, "answers"), expected, asked)


# Room for all that grows past it is little, so that rows which decode run out of blocks.
SMALL_MODEL_LEN = 256 if ON_CPU else 1024
ENGINES: dict[str, dict[str, Any]] = {
    "chunks of 128": {"max_num_batched_tokens": 128 // SHRINK, "max_num_seqs": min(ROWS, 128 // SHRINK)},
    "chunks of 512": {"max_num_batched_tokens": 512 // SHRINK, "max_num_seqs": min(ROWS, 512 // SHRINK)},
    "chunks of 2048, no overlap": {"max_num_batched_tokens": 2048 // SHRINK, "overlap": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "preemption": {
        "max_num_batched_tokens": 1024 // SHRINK,
        "max_num_seqs": 64 if not ON_CPU else 32,
        "max_model_len": SMALL_MODEL_LEN,
        "num_blocks": SMALL_MODEL_LEN // BLOCK_SIZE + 40,
    },
    "preemption by priority, blocks of 32, no overlap": {
        "max_num_batched_tokens": 2048 // SHRINK,
        "max_model_len": SMALL_MODEL_LEN,
        "num_blocks": SMALL_MODEL_LEN // 32 + 20,
        "block_size": 32,
        "overlap": False,
        "scheduling_policy": "priority",
    },
}
PREEMPTING = [name for name in ENGINES if "preemption" in name]
# Of the models not named here, all: building an engine takes longer than most tests.
ENGINES_OF = {
    "llama": ("chunks of 128", "chunks of 512", "preemption"),
    "mistral-window": ("chunks of 512", "preemption by priority, blocks of 32, no overlap"),
}


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in PREEMPTING])
def test_in_another_engine(case: Case, name: str) -> None:
    if name not in case.engines:
        pytest.skip("others are enough for this model")
    with SmallEngine(case.folder, **BASE | ENGINES[name]) as engine:
        asked, places = mixed(case.asked, traffic(24))
        for repeat in range(2):
            outputs = engine.ask(asked, "the same")
            assert_same([outputs[place] for place in places], case.expected, case.asked)
            if "chunks" in name and repeat:
                assert sum(output.num_cached_tokens for output in outputs) > 0
        assert not engine.llm.stats()["preemptions"]
        engine.check()


@pytest.mark.parametrize("name", PREEMPTING)
def test_with_preemptions(case: Case, name: str) -> None:
    """Others' answers grow until blocks are short; where priorities count, the rows that are compared give way."""
    if name not in case.engines:
        pytest.skip("others are enough for this model")
    longest = SMALL_MODEL_LEN - (40 if ON_CPU else 200)
    chosen = [number for number, (prompt, _) in enumerate(case.asked) if len(prompt) <= longest]
    asked, expected = [case.asked[number] for number in chosen], [case.expected[number] for number in chosen]
    rng = random.Random(name)
    others = [
        (
            draw(rng, rng.randint(1, 40)),
            SamplingParams(
                temperature=rng.choice((0.0, 1.0)), max_tokens=rng.randint(60, 150), ignore_eos=True, priority=-1
            ),
        )
        for _ in range(24)
    ]
    with SmallEngine(case.folder, **BASE | ENGINES[name]) as engine:
        whole, places = mixed(asked, others)
        before = 0
        for _ in range(2):
            outputs = engine.ask(whole, "the same")
            assert_same([outputs[place] for place in places], expected, asked)
            preemptions = engine.llm.stats()["preemptions"]
            assert preemptions >= before + 5
            before = preemptions
        engine.check()


def test_two_engines_take_turns(case: Case) -> None:
    """In one process and one thread, each with its own memory, settings and stream."""
    if len(case.engines) < len(ENGINES):
        pytest.skip("one model is enough")
    asked, expected = case.asked[:8], case.expected[:8]
    with SmallEngine(case.folder, **BASE | {"max_num_seqs": 16}) as other:
        for turn in range(3):
            assert_same(other.ask(asked, f"turn {turn}"), expected, asked)
            assert_same(case.engine.ask(asked, f"turn {turn}"), expected, asked)
        other.check()
    assert_same(case.engine.ask(asked, "after the other has closed"), expected, asked)
