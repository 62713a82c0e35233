"""Masks and biases by the Triton kernel, against what they mean token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_kernels as reference
import torch
from constrained_rows import Constraints, mask_of, random_constraints
from octavo.kernels import sample_constrain
from sample_rows import normal
from torch import Tensor

PADDING = 2


def constrained(logits: Tensor, held: Constraints, device: torch.device) -> Tensor:
    """What the kernel makes of rows of logits, with rows of padding behind them that stay as they are."""
    count, vocab_size = logits.shape
    changed = torch.cat((logits, torch.full((PADDING, vocab_size), 7.25))).to(device)
    held.apply(changed, count)
    assert (changed[count:] == 7.25).all()
    return changed[:count].cpu()


def same(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.nan_to_num(7e7), expected.nan_to_num(7e7))


@pytest.mark.parametrize("programs", [1, 3, 264])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1003, 4096, 4128, 8300])
def test_rows_are_held_to_what_they_may_choose_of(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, vocab_size: int, programs: int
) -> None:
    """However the work falls to programs: fewer than parts of masks, or more."""
    monkeypatch.setattr(sample_constrain, "_PROGRAMS", programs)
    for seed in range(4):
        held = random_constraints(np.random.default_rng([seed, vocab_size]), 7, vocab_size)
        logits = normal(7, vocab_size, seed)
        logits[:, ::7], logits[:, 3::11] = math.nan, math.inf
        expected = held.naive(logits)
        assert same(constrained(logits, held, device), expected)
        assert same(reference.constrain(logits, held.masks, held.biases), expected)


def test_nothing_changes_without_any(device: torch.device) -> None:
    logits = normal(3, 700, 1)
    assert torch.equal(constrained(logits, Constraints(), device), logits)


def test_where_mask_and_bias_meet_a_token_stays_refused(device: torch.device) -> None:
    vocab_size = 900
    allowed = list(range(0, vocab_size, 3))
    tokens = range(vocab_size)
    for value in (100.0, -math.inf):
        held = Constraints({0: mask_of(allowed, vocab_size)}, [(0, token, value) for token in tokens])
        got = constrained(torch.zeros(1, vocab_size), held, device)
        assert got[0].tolist() == [value if token in set(allowed) else -math.inf for token in tokens]


def test_more_biases_than_programs_take_at_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_constrain, "_PROGRAMS", 2)
    rng = np.random.default_rng(5)
    logits = normal(3, 1500, 5)
    biases = [
        (row, token, float(np.float32(rng.uniform(-9, 9))))
        for row in (2, 0)
        for token in rng.permutation(1500).tolist()
    ]
    held = Constraints(biases=biases)
    assert torch.equal(constrained(logits, held, device), held.naive(logits))


@pytest.mark.gpu
def test_many_rows_of_a_large_vocabulary_in_one_graph(device: torch.device) -> None:
    """One graph for all numbers of masks and biases and all arenas, which the host fills between replays."""
    rows, vocab_size = 256, 151_936
    logits = torch.randn(rows, vocab_size, device=device)
    static, counts = torch.empty_like(logits), torch.zeros(16, dtype=torch.int32, device=device)
    turn = torch.zeros(1, dtype=torch.int32, device=device)
    masks = torch.zeros((3, rows, vocab_size // 32), dtype=torch.int32, pin_memory=True)
    mask_logits = torch.randperm(rows, dtype=torch.int32, device=device)
    bias_logits = torch.arange(1024, dtype=torch.int32, device=device) % rows
    bias_tokens = torch.arange(1024, dtype=torch.int32, device=device) * 148
    bias_values = torch.full((1024,), 2.5, device=device).view(torch.int32)

    def call() -> None:
        sample_constrain.constrain(
            static, counts, turn, mask_logits, masks, bias_logits, bias_tokens, bias_values, rows=rows
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step, (num_masks, num_biases) in enumerate(((256, 1024), (0, 0), (3, 0), (0, 7), (200, 300))):
        turn.fill_(step % 3)
        counts[3], counts[7], counts[12] = rows, num_biases, num_masks
        masks[step % 3].random_(-(2**31), 2**31 - 1)
        masks[step % 3, :, ::2] = 0
        static.copy_(logits)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected = logits.clone()
        expected[bias_logits[:num_biases].long(), bias_tokens[:num_biases].long()] += 2.5
        bits = masks[step % 3, :num_masks].to(device)[:, :, None] >> torch.arange(32, device=device) & 1
        for place, row in enumerate(mask_logits[:num_masks].tolist()):
            expected[row, bits[place].flatten() == 0] = -math.inf
        assert torch.equal(static, expected)
