"""The runner's own work around the decoder, on hand-written plans: deltas, samples, biases, penalties, copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_kernels as reference
import torch
import transformers
from octavo.config import EngineConfig
from octavo.kernels.token_counts import PROMPT_BIT
from octavo.layers.decoder import Decoder
from octavo.loading.resolve import resolve_model
from octavo.runner.runner import ModelRunner
from octavo.runner.runner_builder import build_runner
from plan_writer import MAX_NUM_SEQS, MAX_TOKENS, PlanWriter, params

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28]
TABLES = {0: [4, 9], 1: [2, 7], 2: [5, 1], 5: [3, 6]}


@pytest.fixture(scope="module")
def oracle() -> Any:
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
        eos_token_id=[7, 8],
    )
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(path)
    return path


def make_runner(folder: Path) -> tuple[ModelRunner, PlanWriter]:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        num_blocks=12,
        max_model_len=64,
    )
    runner, _ = build_runner(config, resolve_model(config.model))
    writer = PlanWriter()
    runner.attach(writer)  # type: ignore[arg-type]
    return runner, writer


@pytest.fixture
def engine(folder: Path) -> tuple[ModelRunner, PlanWriter]:
    return make_runner(folder)


def logits_of(oracle: Any, tokens: list[int]) -> torch.Tensor:
    """float32 [vocab_size] after the last token."""
    with torch.inference_mode():
        return oracle(torch.tensor([tokens])).logits[0, -1]


def blocks_of(*slots: int) -> list[tuple[int, int, int]]:
    return [(slot, index, block) for slot in slots for index, block in enumerate(TABLES[slot])]


def prefill(writer: PlanWriter, slot: int, values: list[int], prompt: list[int] = PROMPT, **more: Any) -> Any:
    return writer.plan([(slot, prompt, 0)], TABLES, new_params={slot: values}, new_blocks=blocks_of(slot), **more)


def test_model_info(folder: Path) -> None:
    runner, _ = make_runner(folder)
    info = runner.info
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("LlamaForCausalLM", 101, 64)
    assert (info.num_blocks, info.block_size, info.dtype, info.device) == (12, 16, "float32", "cpu")
    assert info.eos_token_ids == (7, 8)
    assert info.kv_bytes == 12 * 16 * 2 * 2 * 64 * 4


def test_decode_rows_take_tokens_the_core_has_not_seen(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    runner, writer = engine
    first = prefill(writer, 5, params())
    runner.launch(first).result()
    second = writer.plan([(5, [-1], 18)], TABLES)
    runner.launch(second).result()
    third = writer.plan([(5, [-1], 19)], TABLES)
    runner.launch(third).result()
    tokens = list(PROMPT)
    for plan in (first, second, third):
        expected = int(logits_of(oracle, tokens).argmax())
        assert writer.sampled(plan) == [expected]
        tokens.append(expected)


def test_mixed_step_keeps_rows_apart(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    runner, writer = engine
    runner.launch(prefill(writer, 1, params())).result()
    token = int(logits_of(oracle, PROMPT).argmax())
    other = PROMPT[::-1]
    plan = writer.plan(
        [(1, [-1], 18), (2, other, 0), (0, other[:5], 0)],
        TABLES,
        logits=[(0, 1), (1, 2)],
        new_params={2: params()},
        new_blocks=blocks_of(2, 0),
    )
    runner.launch(plan).result()
    expected = [logits_of(oracle, tokens).argmax().item() for tokens in ([*PROMPT, token], other)]
    assert writer.sampled(plan) == expected


def test_several_samples_of_one_row_differ_by_their_index(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    runner, writer = engine
    settings = {"temperature": 3.0, "seed": (5 << 32) + 9}
    plan = writer.plan(
        [(0, PROMPT, 0)],
        TABLES,
        logits=[(0, 0), (0, 1), (0, 2)],
        new_params={slot: params(**settings, sample_index=slot) for slot in range(3)},  # type: ignore[arg-type]
        new_blocks=blocks_of(0),
    )
    runner.launch(plan).result()
    logits = logits_of(oracle, PROMPT)
    expected = [
        reference.sample(logits, **settings, sample_index=index, position=len(PROMPT))  # type: ignore[arg-type]
        for index in range(3)
    ]
    assert writer.sampled(plan) == expected
    assert len(set(expected)) > 1


def test_banned_tokens_are_never_sampled(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    runner, writer = engine
    order = logits_of(oracle, PROMPT).argsort(descending=True).tolist()
    other_order = logits_of(oracle, PROMPT[:9]).argsort(descending=True).tolist()
    plan = writer.plan(
        [(0, PROMPT, 0), (1, PROMPT[:9], 0)],
        TABLES,
        new_params={0: params(), 1: params()},
        new_blocks=blocks_of(0, 1),
        bans=[(1, other_order[0]), (0, order[0]), (0, order[1])],
    )
    runner.launch(plan).result()
    assert writer.sampled(plan) == [order[2], other_order[1]]


def test_biases_are_added_to_single_logits(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    runner, writer = engine
    logits = logits_of(oracle, PROMPT).clone()
    first, second, third = logits.argsort(descending=True)[:3].tolist()
    gap = float(logits[first] - logits[third])
    plan = writer.plan(
        [(0, PROMPT, 0), (1, PROMPT[:9], 0)],
        TABLES,
        new_params={0: params(logprobs=1), 1: params()},
        new_blocks=blocks_of(0, 1),
        biases=[(0, second, -1.0), (0, third, gap + 0.5)],
    )
    result = runner.launch(plan).result()
    assert writer.sampled(plan) == [third, int(logits_of(oracle, PROMPT[:9]).argmax())]
    assert result.logprobs is not None
    logits[second] -= 1.0
    logits[third] += gap + 0.5
    assert abs(float(result.logprobs[0]) - float(logits.log_softmax(-1)[third])) < 1e-4


def mask_of(tokens: list[int]) -> np.ndarray[Any, Any]:
    """int32 words of a mask that allows some of 101 tokens."""
    bits = np.zeros(128, dtype=np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_masked_rows_sample_what_their_masks_allow(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    """In every arena, and with a bias on top."""
    runner, writer = engine
    assert [masks.shape for masks in runner.masks] == [(MAX_NUM_SEQS, 4)] * 3
    prompts = {slot: PROMPT[: 6 + slot] for slot in (0, 1, 2, 5)}
    logits = {slot: logits_of(oracle, prompt) for slot, prompt in prompts.items()}
    for turn in range(4):
        order = {slot: values.argsort(descending=True).tolist() for slot, values in logits.items()}
        plan = writer.plan(
            [(slot, prompt, 0) for slot, prompt in prompts.items()],
            TABLES,
            new_params={slot: params() for slot in prompts},
            new_blocks=blocks_of(*prompts),
            masks=[3, 0, 1],
            biases=[(1, order[1][60], 100.0), (1, order[1][0], 100.0)],
        )
        runner.masks[plan.arena][:] = -1
        runner.masks[plan.arena][0] = mask_of(order[5][10 + turn :])
        runner.masks[plan.arena][1] = mask_of([100])
        runner.masks[plan.arena][2] = mask_of(order[1][50:])
        runner.launch(plan).result()
        assert writer.sampled(plan) == [100, order[1][60], order[2][0], order[5][10 + turn]]


def test_log_probabilities(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    runner, writer = engine
    plan = writer.plan(
        [(0, PROMPT, 0), (1, PROMPT[:9], 0), (2, PROMPT[:4], 0)],
        TABLES,
        new_params={0: params(logprobs=3), 1: params(), 2: params(logprobs=1)},
        new_blocks=blocks_of(0, 1, 2),
    )
    result = runner.launch(plan).result()
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    assert result.top_ids.shape == result.top_logprobs.shape == (3, 3)
    for row, prompt, count in ((0, PROMPT, 3), (2, PROMPT[:4], 1)):
        expected, ids = logits_of(oracle, prompt).log_softmax(-1).topk(count)
        assert result.top_ids[row, :count].tolist() == ids.tolist()
        np.testing.assert_allclose(result.top_logprobs[row, :count], expected.numpy(), atol=2e-4)
        np.testing.assert_allclose(result.logprobs[row], expected[0].item(), atol=2e-4)


def test_no_log_probabilities_unless_a_row_asks(engine: tuple[ModelRunner, PlanWriter]) -> None:
    runner, writer = engine
    result = runner.launch(prefill(writer, 0, params())).result()
    assert result.num_logits == 1
    assert result.logprobs is None


def test_penalties_count_prompt_and_output(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    runner, writer = engine
    settings = {"repetition": 1.4, "presence": 0.7, "frequency": 0.9}
    tokens, known = list(PROMPT), len(PROMPT)
    # A sequence that was preempted comes back with output of its own: two tokens of it are not prompt.
    tokens += [11, 11]
    writer.histories[2] = list(tokens)
    plan = prefill(writer, 2, params(**settings, prompt_length=known), tokens)
    for _ in range(4):
        runner.launch(plan).result()
        counts = torch.zeros(101, dtype=torch.int32)
        for token in tokens[known:]:
            counts[token] += 1
        counts[list(set(tokens[:known]))] |= PROMPT_BIT
        penalized = reference.apply_penalties(logits_of(oracle, tokens), counts, *settings.values())
        assert writer.sampled(plan) == [int(penalized.argmax())]
        tokens.append(int(penalized.argmax()))
        plan = writer.plan([(2, [-1], len(tokens) - 1)], TABLES)


def test_a_slot_forgets_the_counts_of_its_last_sequence(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    runner, writer = engine
    writer.histories[0] = list(PROMPT)
    settings = {"repetition": 50.0, "prompt_length": len(PROMPT)}
    runner.launch(prefill(writer, 0, params(**settings))).result()  # type: ignore[arg-type]
    other = PROMPT[5:12]
    writer.histories[0] = other
    settings["prompt_length"] = len(other)
    plan = prefill(writer, 0, params(**settings), other)  # type: ignore[arg-type]
    runner.launch(plan).result()
    counts = torch.zeros(101, dtype=torch.int32)
    counts[other] = PROMPT_BIT
    penalized = reference.apply_penalties(logits_of(oracle, other), counts, 50.0, 0.0, 0.0)
    assert writer.sampled(plan) == [int(penalized.argmax())]


def test_copied_blocks_hold_the_same_keys_and_values(engine: tuple[ModelRunner, PlanWriter], oracle: Any) -> None:
    runner, writer = engine
    runner.launch(prefill(writer, 0, params())).result()
    # Slot 1 shares the first block of slot 0 and copies its second, partly filled one.
    tables = {0: TABLES[0], 1: [TABLES[0][0], 8]}
    plan = writer.plan(
        [(0, [50], 18), (1, [60], 18)],
        tables,
        new_params={1: params()},
        new_blocks=[(1, 0, TABLES[0][0]), (1, 1, 8)],
        copies=[(TABLES[0][1], 8)],
    )
    runner.launch(plan).result()
    expected = [logits_of(oracle, [*PROMPT, token]).argmax().item() for token in (50, 60)]
    assert writer.sampled(plan) == expected


@pytest.mark.parametrize("head_rows", [1, 2, 4])
def test_logits_in_slices_are_the_same(head_rows: int, folder: Path) -> None:
    def run(limit: Callable[[Decoder], int]) -> tuple[list[int], list[float]]:
        runner, writer = make_runner(folder)
        runner._decoder.head_rows = limit(runner._decoder)
        slots = [0, 1, 2, 5]
        new_params = {slot: params(temperature=1.0, seed=slot, logprobs=0) for slot in slots}
        plan = writer.plan(
            [(slot, PROMPT[: 3 + slot], 0) for slot in slots],
            TABLES,
            new_params=new_params,
            new_blocks=blocks_of(*slots),
            bans=[(3, 0), (0, 5)],
            biases=[(2, 7, 3.5), (1, 40, 2.0)],
            masks=[3, 1],
        )
        runner.masks[plan.arena][0] = mask_of([0, 33, 64])
        runner.masks[plan.arena][1] = mask_of(list(range(0, 101, 9)))
        result = runner.launch(plan).result()
        assert result.logprobs is not None
        return writer.sampled(plan), result.logprobs.tolist()

    assert run(lambda _: head_rows) == run(lambda decoder: decoder.head_rows)
