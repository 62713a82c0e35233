from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from typing import Any

import numpy as np
from octavo import LLM, SamplingParams
from octavo.runner.fake import FakeOptions, FakeRunner, FakeTextRunner, fake_model_info
from octavo.text.fake_tokenizer import fake_tokenizer
from plan_writer import PlanWriter, params

TABLES = {slot: [slot + 1] for slot in range(6)}


def run(order: list[int]) -> dict[int, list[int]]:
    """Three tokens for each slot's prompt, the slots in some order in the batch."""
    runner, writer = FakeRunner(fake_model_info(vocab_size=500)), PlanWriter()
    runner.attach(writer)  # type: ignore[arg-type]
    plan = writer.plan([(slot, [slot + 40, 7, 9 + slot], 0) for slot in order], TABLES)
    answers: dict[int, list[int]] = {slot: [] for slot in order}
    for step in range(3):
        assert runner.launch(plan).result().num_logits == len(order)
        for slot, token in zip(order, writer.sampled(plan), strict=True):
            answers[slot].append(token)
        plan = writer.plan([(slot, [-1], 3 + step) for slot in order], TABLES)
    assert runner.num_steps == 3
    return answers


def test_answers_do_not_depend_on_the_batch() -> None:
    together = run([0, 1, 2, 3])
    assert together == {**run([3, 1]), **run([2]), **run([0])}
    assert len({tuple(answer) for answer in together.values()}) == 4


def test_tokens_are_spread_over_the_vocabulary() -> None:
    runner, writer = FakeRunner(fake_model_info(vocab_size=10)), PlanWriter()
    runner.attach(writer)  # type: ignore[arg-type]
    seen: list[int] = []
    plan = writer.plan([(0, [5, 6], 0)], {0: list(range(1, 40))})
    for position in range(2, 302):
        runner.launch(plan).result()
        seen += writer.sampled(plan)
        plan = writer.plan([(0, [-1], position)], {0: list(range(1, 40))})
    assert np.bincount(seen, minlength=10).min() > 10


def allow(runner: FakeRunner | FakeTextRunner, arena: int, index: int, tokens: list[int]) -> None:
    """Let a step's masked row have some tokens."""
    bits = np.zeros(32 * runner.masks[arena].shape[1], dtype=np.uint8)
    bits[tokens] = 1
    runner.masks[arena][index] = np.packbits(bits, bitorder="little").view(np.int32)


def test_rows_are_held_to_masks_biases_and_bans() -> None:
    runner, writer = FakeRunner(fake_model_info(vocab_size=500)), PlanWriter()
    runner.attach(writer)  # type: ignore[arg-type]
    free = run([0, 1, 2, 3, 4])
    seen: set[int] = set()
    for position in range(30):
        biases = [(1, 17, 2.0), (1, 18, 3.0), (4, free[4][0], -math.inf), (3, 9, 100.0), (3, 8, -1.0)]
        plan = writer.plan(
            [(slot, [slot + 40, 7, 9 + slot], position) for slot in range(5)],
            {slot: list(range(1, 9)) for slot in range(5)},
            biases=biases,
            masks=[3, 0],
        )
        allow(runner, plan.arena, 1, [3, 31, 32, 499])
        allow(runner, plan.arena, 0, [7, 8])
        runner.launch(plan).result()
        got = writer.sampled(plan)
        assert got[0] in (3, 31, 32, 499)
        assert got[1] == 18
        assert got[3] == 7
        if not position:
            assert got[2] == free[2][0]
            assert got[4] != free[4][0]
        seen.add(got[0])
    assert len(seen) == 4


def test_a_row_that_is_left_nothing_gets_the_lowest_token() -> None:
    runner, writer = FakeRunner(fake_model_info(vocab_size=50)), PlanWriter()
    runner.attach(writer)  # type: ignore[arg-type]
    plan = writer.plan([(0, [5], 0)], TABLES, masks=[0])
    runner.launch(plan).result()
    assert writer.sampled(plan) == [0]


def answer_text(mask: bytes | None, end: bool, biases: list[tuple[int, int, float]] = (), end_after: int = 0) -> str:
    """100 tokens, or fewer where the answer ends, held to some bytes; the end token is one of what may be had."""
    tokenizer = fake_tokenizer()
    passage = [(token, tokenizer.decode([token]).encode()) for token in tokenizer.encode(" It was the year")]
    info = fake_model_info(vocab_size=600)
    runner = FakeTextRunner(info, passage, 258, FakeOptions(end_after=end_after))
    writer = PlanWriter()
    runner.attach(writer)  # type: ignore[arg-type]
    writer.histories[0] = [70, 71]
    table, new = {0: list(range(1, 9))}, {0: params(prompt_length=2)}
    plan = writer.plan([(0, [70, 71], 0)], table, new_params=new, masks=[0] * (mask is not None), biases=biases)
    tokens: list[int] = []
    for position in range(2, 102):
        if mask is not None:
            allow(runner, plan.arena, 0, [*mask, *range(259, 600), *([258] if end else [])])
        runner.launch(plan).result()
        tokens += writer.sampled(plan)
        if tokens[-1] == 258:
            return tokenizer.decode(tokens[:-1])
        plan = writer.plan([(0, [-1], position)], table, masks=[0] * (mask is not None), biases=biases)
    return tokenizer.decode(tokens) + "..."


def test_text_that_is_held_keeps_to_its_passage_and_looks_for_its_end() -> None:
    free = answer_text(None, False)
    assert free.endswith("...")
    # What may end where it stands, and has all words, is as if it were free.
    assert answer_text(b" ", True) == free
    # A string of JSON: words, until it is long enough to be closed.
    words = answer_text(b' "', False)
    assert words == free[: 32 * 4] + '"' * 68 + "..."
    assert answer_text(b' "', False, end_after=5).count('"') > 90
    # An end that is banned does not come.
    assert answer_text(None, False, [(0, 258, -math.inf)], end_after=5).endswith("...")
    assert not answer_text(None, False, end_after=5).endswith("...")


def test_a_fake_engine_writes_what_it_is_held_to_and_ends() -> None:
    properties = {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2}}
    schema = {"type": "object", "properties": properties, "required": ["name", "tags"], "additionalProperties": False}
    held: list[dict[str, Any]] = [
        {"json": schema},
        {"json_object": True},
        {"regex": "[a-z]{3,9}@[0-9]+"},
        {"choice": ["yes", "no"]},
    ]
    params = [SamplingParams(structured_outputs=one, max_tokens=300, ignore_eos=False) for one in held]
    llm = LLM("fake", load_format="fake")
    try:
        outputs = llm.generate(["Write."] * len(held), params, use_tqdm=False)
    finally:
        llm.close()
    texts = [output.outputs[0].text for output in outputs]
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * len(held)
    answer = json.loads(texts[0])
    assert len(answer["name"]) > 20
    assert len(answer["tags"]) >= 2
    assert isinstance(json.loads(texts[1]), dict)
    assert re.fullmatch("[a-z]{3,9}@[0-9]+", texts[2])
    assert texts[3] in ("yes", "no")


def test_it_loads_no_torch() -> None:
    code = "import sys, octavo.runner.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
