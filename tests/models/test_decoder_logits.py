"""Logits of every family against transformers, on every path a token can take to the cache."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from decoder_driver import DecoderDriver
from tiny_models import CASES, TinyModel, as_bfloat16, logits_of, random_tokens

BACKENDS = ["reference", "cpu"]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float32 rounding through a few layers of logits around ten."""
    assert expected.std() > 0.5, "the oracle's logits say nothing"
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=3e-4)


def mixed_run(driver: DecoderDriver, first: list[int], second: list[int], third: list[int]) -> list[torch.Tensor]:
    """Three sequences through chunks, mixed steps, a prefix hit of 32 tokens and single decodes.

    Returns:
        logits of every token computed; of the third those after its shared prefix.
    """
    parts: list[list[torch.Tensor]] = [[], [], []]

    def step(*work: tuple[int, list[int]]) -> None:
        for (slot, _), logits in zip(work, driver.step(list(work)), strict=True):
            parts[slot].append(logits)

    step((0, first[:21]))
    step((0, first[21:22]), (1, second[:5]))
    step((0, first[22:23]), (1, second[5:6]))
    step((1, second[6:7]), (0, first[23:70]))
    driver.share(0, 2, 2)
    step((1, second[7:8]), (0, first[70:71]), (2, third[32:50]))
    for index in range(4):
        step((2, third[50 + index : 51 + index]), (1, second[8 + index : 9 + index]))
    step((1, second[12:]), (2, third[54:]), (0, first[71:]))
    return [torch.cat(logits) for logits in parts]


def three_sequences() -> tuple[list[int], list[int], list[int]]:
    first = random_tokens(75, seed=1)
    return first, random_tokens(19, seed=2), first[:32] + random_tokens(30, seed=3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, backend: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(case)
    # The oracle takes the short factors of longrope while a sequence is short, and so does an engine of short ones.
    num_positions = 64 if case == "rope-longrope" else 512
    driver = DecoderDriver(model.decoder(), model.weights, backend=backend, num_positions=num_positions)
    tokens = random_tokens(64, seed=5)
    assert_close(driver.alone(0, tokens), model.expected(tokens))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case", ["llama", "llama-biases", "rope-llama3", "mistral-window", "qwen3", "gemma2", "gemma3"]
)
def test_chunks_decodes_and_prefix_hits_equal_transformers(
    case: str, backend: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model(case)
    driver = DecoderDriver(model.decoder(), model.weights, backend=backend)
    sequences = three_sequences()
    logits = mixed_run(driver, *sequences)
    assert_close(logits[0], model.expected(sequences[0]))
    assert_close(logits[1], model.expected(sequences[1]))
    assert_close(logits[2], model.expected(sequences[2])[32:])


def test_prompts_longer_than_a_slice_of_the_mlp(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama-biases")
    tokens = random_tokens(250, seed=9)
    whole = DecoderDriver(model.decoder(), model.weights).alone(0, tokens)
    assert_close(whole, model.expected(tokens))
    driver = DecoderDriver(model.decoder(), model.weights)
    parts = [driver.alone(0, tokens[start : start + 90]) for start in range(0, 250, 90)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("case", ["rope-longrope", "rope-dynamic"])
def test_length_dependent_rotary_goes_by_the_longest_sequence(
    case: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model(case)
    length = 600 if case == "rope-dynamic" else 100
    tokens = random_tokens(length, seed=6)
    driver = DecoderDriver(model.decoder(), model.weights, num_positions=length, backend="reference")
    parts = [driver.alone(0, tokens[start : start + 200]) for start in range(0, length, 200)]
    assert_close(torch.cat(parts), model.expected(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "llama-biases", "mistral-window", "qwen3", "gemma2", "gemma3"])
def test_bits_do_not_depend_on_the_batch_or_the_chunks(
    case: str, dtype: torch.dtype, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model(case)
    sequences = three_sequences()
    mixed = mixed_run(DecoderDriver(model.decoder(), model.weights, dtype=dtype), *sequences)
    alone = DecoderDriver(model.decoder(), model.weights, dtype=dtype)
    for slot, tokens in enumerate(sequences):
        expected = alone.alone(slot, tokens)[-mixed[slot].shape[0] :]
        assert torch.equal(mixed[slot], expected)


@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_bfloat16_errs_no_more_than_transformers(case: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(case)
    tokens = random_tokens(64, seed=8)
    theirs = as_bfloat16(model.oracle)
    exact = logits_of(copy.deepcopy(theirs).float(), tokens)
    ours = DecoderDriver(model.decoder(), model.weights, dtype=torch.bfloat16).alone(0, tokens)
    error, allowed = ours - exact, logits_of(theirs, tokens) - exact
    assert error.pow(2).mean() < 1.25 * allowed.pow(2).mean()
