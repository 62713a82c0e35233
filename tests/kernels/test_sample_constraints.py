"""Masks and biases on the CPU, against what they mean token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference_kernels as reference
import torch
from constrained_rows import Constraints, mask_of, random_constraints
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import ISAS, instruction_set, threads
from octavo import _core
from sample_rows import Row, normal
from torch import Tensor


def sample(
    logits: Tensor, rows: list[Row], held: Constraints, first: int = 0, spare_words: int = 0
) -> tuple[list[int], Tensor, Tensor]:
    """Tokens, log probabilities and changed logits of a step's rows from `first` on."""
    count, vocab_size = logits.shape
    changed = torch.full((count, vocab_size + 3), math.inf)
    changed[:, :vocab_size] = logits
    params = torch.tensor([row.words() for row in rows], dtype=torch.int32)
    slots = torch.arange(count, dtype=torch.int32)
    positions = torch.tensor([row.position for row in rows], dtype=torch.int32)
    counts = torch.stack([torch.zeros(vocab_size) if row.counts is None else row.counts for row in rows]).int()
    ids, logprobs = torch.full((count,), -7, dtype=torch.int32), torch.full((count,), math.nan)
    masks = torch.full((len(held.masks), -(-vocab_size // 32) + spare_words), -1, dtype=torch.int32)
    for words, row in zip(masks, held.masks.values(), strict=True):
        words[: len(row)] = row
    given_masks = (torch.tensor(list(held.masks), dtype=torch.int32), masks)
    given_biases = [
        torch.tensor([bias[i] for bias in held.biases], dtype=torch.float32 if i == 2 else torch.int32)
        for i in range(3)
    ]
    _core.cpu_sample(
        changed.data_ptr(),
        count,
        vocab_size,
        changed.stride(0),
        params.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        counts.data_ptr(),
        vocab_size,
        ids.data_ptr(),
        logprobs.data_ptr(),
        0,
        0,
        0,
        first_logit=first,
        num_masks=len(held.masks),
        mask_logits=given_masks[0].data_ptr(),
        masks=given_masks[1].data_ptr(),
        mask_words=masks.shape[1],
        num_biases=len(held.biases),
        bias_logits=given_biases[0].data_ptr(),
        bias_tokens=given_biases[1].data_ptr(),
        bias_values=given_biases[2].data_ptr(),
    )
    assert changed[:, vocab_size:].isinf().all()
    return ids.tolist(), logprobs, changed[:, :vocab_size]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 9),
    vocab_size=st.sampled_from([1, 31, 32, 33, 255, 257, 1000, 4099, 20_000]),
    isa=st.sampled_from(ISAS),
    data=st.data(),
)
def test_rows_are_held_to_what_they_may_choose_of(seed: int, rows: int, vocab_size: int, isa: str, data: Any) -> None:
    """Also where a call has but a slice of the step's rows, on any instruction set."""
    held = random_constraints(np.random.default_rng(seed), rows, vocab_size)
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - first))
    logits = normal(count, vocab_size, seed % 1000)
    logits[:, ::7], logits[:, 3::11] = math.nan, math.inf
    settings = [
        Row(seed=seed + row, temperature=(0.0, 0.8)[row % 2], top_k=(0, 5)[row % 3 == 0]) for row in range(count)
    ]
    expected = held.naive(logits, first)
    with instruction_set(isa):
        ids, _, changed = sample(logits, settings, held, first, spare_words=seed % 3)
        free, _, _ = sample(expected, settings, Constraints())
    assert torch.equal(changed.nan_to_num(7e7), expected.nan_to_num(7e7))
    assert ids == free
    local = {row - first: words for row, words in held.masks.items() if first <= row < first + count}
    biases = [(row - first, token, value) for row, token, value in held.biases if first <= row < first + count]
    assert torch.equal(reference.constrain(logits, local, biases).nan_to_num(7e7), expected.nan_to_num(7e7))


def test_what_is_sampled_is_allowed_on_any_number_of_threads() -> None:
    vocab_size, allowed = 49_155, [[5], [49_154], [7, 256, 30_000], list(range(0, 49_155, 31))]
    held = Constraints({row: mask_of(tokens, vocab_size) for row, tokens in enumerate(allowed)})
    logits = normal(5, vocab_size, 2)
    seen = set()
    for seed in range(30):
        rows = [Row(seed=seed, temperature=5.0)] * 4 + [Row(temperature=0)]
        with threads(1 + seed % 3):
            ids, _, _ = sample(logits, rows, held)
        assert all(token in tokens for token, tokens in zip(ids, allowed, strict=False))
        assert ids[4] == int(logits[4].argmax())
        seen.add(tuple(ids))
    assert len(seen) > 10


def test_log_probabilities_are_of_what_is_left_before_penalties() -> None:
    vocab_size = 3000
    logits = normal(3, vocab_size, 5)
    tokens = logits[0].topk(40).indices.tolist()[7:]
    counts = torch.zeros(vocab_size, dtype=torch.int32)
    counts[tokens[0]] = 3
    held = Constraints({0: mask_of(tokens, vocab_size)}, [(1, 17, 60.0), (0, tokens[3], 1.5)])
    rows = [
        Row(temperature=0, frequency=20.0, counts=counts, logprobs=0),
        Row(temperature=0, frequency=1.0, counts=counts, logprobs=0),
        Row(temperature=0, logprobs=0),
    ]
    ids, logprobs, _ = sample(logits, rows, held)
    expected = torch.log_softmax(held.naive(logits).double(), -1)
    assert ids[0] in tokens[1:]
    assert ids[1] == 17
    for row, token in enumerate(ids):
        assert float(logprobs[row]) == pytest.approx(float(expected[row, token]), abs=1e-5)


def test_a_row_that_is_left_nothing_gets_the_lowest_token() -> None:
    logits = normal(2, 500, 1)
    held = Constraints({0: mask_of([], 500), 1: mask_of([], 500)}, [(0, 400, 100.0)])
    assert sample(logits, [Row(temperature=0), Row(seed=3)], held)[0] == [0, 0]


def test_a_bias_on_a_banned_token_leaves_it_banned() -> None:
    logits = torch.zeros(2, 40)
    logits[1, 3] = math.inf
    held = Constraints({0: mask_of([1, 2], 40)}, [(0, 30, 100.0), (0, 1, -math.inf), (1, 3, -math.inf)])
    ids, _, changed = sample(logits, [Row(temperature=0)] * 2, held)
    assert ids == [2, 0]
    assert (changed[0] > -math.inf).nonzero().flatten().tolist() == [2]


def test_bad_constraints_are_refused() -> None:
    word = torch.zeros(8, dtype=torch.int32)
    at = word.data_ptr()
    call = (at, 1, 40, 40, at, at, at, 0, 0, at, at, 0, 0, 0)
    with pytest.raises(ValueError, match="mask_words"):
        _core.cpu_sample(*call, num_masks=1, mask_logits=at, masks=at, mask_words=1)
    with pytest.raises(ValueError, match="is null"):
        _core.cpu_sample(*call, num_masks=1, mask_logits=at, mask_words=2)
    for token in (40, -1):
        word[4] = token
        with pytest.raises(ValueError, match="not in the vocabulary"):
            _core.cpu_sample(*call, num_biases=1, bias_logits=at, bias_tokens=at + 16, bias_values=at)
