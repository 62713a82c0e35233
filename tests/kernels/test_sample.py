"""Sampling on the CPU against its reference, transformers' processors and the distributions themselves."""

import math
from dataclasses import dataclass, field

import pytest
import reference_kernels as reference
import torch
from kernel_calls import ISAS, instruction_set, threads
from octavo import _core
from octavo.kernels.token_counts import PROMPT_BIT
from sample_rows import SETTINGS, Row, normal
from torch import Tensor


@dataclass
class Result:
    ids: list[int]
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    logits: Tensor = field(repr=False)


def sample(logits: Tensor, rows: list[Row], max_logprobs: int = 0) -> Result:
    """Rows in the order of the logits, their slots in the opposite one; the logits in wider memory."""
    count, vocab_size = logits.shape
    padded = torch.full((count, vocab_size + 5), math.inf)
    padded[:, :vocab_size] = logits
    slots = torch.arange(count - 1, -1, -1, dtype=torch.int32)
    params = torch.tensor([row.words() for row in reversed(rows)], dtype=torch.int32)
    counts = torch.zeros(count, vocab_size, dtype=torch.int32)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if row.counts is not None:
            counts[slot] = row.counts
    positions = torch.tensor([row.position for row in rows], dtype=torch.int32)
    ids = torch.full((count,), -7, dtype=torch.int32)
    logprobs = torch.full((count,), math.nan)
    top_ids = torch.full((count, max_logprobs), -7, dtype=torch.int32)
    top_logprobs = torch.full((count, max_logprobs), math.nan)
    _core.cpu_sample(
        padded.data_ptr(),
        count,
        vocab_size,
        padded.stride(0),
        params.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        counts.data_ptr(),
        vocab_size,
        ids.data_ptr(),
        logprobs.data_ptr(),
        top_ids.data_ptr(),
        top_logprobs.data_ptr(),
        max_logprobs,
    )
    assert padded[:, vocab_size:].isinf().all()
    return Result(ids.tolist(), logprobs, top_ids, top_logprobs, padded[:, :vocab_size])


BITS_OF_ZERO = [1952477164, 3482490877, 3666666670, 560149595]
BITS_OF_SEED = [676100695, 326661283, 428827614, 847824366]


def test_the_noise_is_fixed_for_good() -> None:
    """These bits may never change: a seed's answer depends on them, on every device."""
    tokens = torch.tensor([0, 1, 2, 151_935])
    assert reference.noise_bits(0, 0, 0, tokens).tolist() == BITS_OF_ZERO
    seed = 0x0123_4567_89AB_CDEF
    assert reference.noise_bits(seed, 3, 1000, tokens).tolist() == BITS_OF_SEED


def test_the_noise_is_uniform_and_its_words_all_count() -> None:
    tokens = torch.arange(200_000)
    drawn = reference.noise_bits(5, 1, 7, tokens)
    uniform = (drawn.double() + 0.5) / 2**32
    histogram = torch.histc(uniform.float(), 100, 0, 1)
    assert ((histogram - 2000) ** 2 / 2000).sum() < 160
    for other in ((6, 1, 7), (5 + (1 << 40), 1, 7), (5, 2, 7), (5, 1, 8)):
        another = (reference.noise_bits(*other, tokens).double() + 0.5) / 2**32
        correlation = torch.corrcoef(torch.stack((uniform, another)))[0, 1]
        assert abs(float(correlation)) < 0.01


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", [1, 5, 16, 255, 256, 257, 4096, 49_152, 49_155])
def test_greedy_takes_the_lowest_of_the_likeliest(isa: str, vocab_size: int) -> None:
    logits = normal(12, vocab_size, vocab_size).round()
    with instruction_set(isa):
        assert sample(logits, [Row(temperature=0)] * 12).ids == logits.argmax(-1).tolist()


def test_not_a_number_and_infinity() -> None:
    nan, inf = math.nan, math.inf
    cases = [
        ([nan, nan, nan], 0),
        ([nan, 1.0, 2.0], 2),
        ([2.0, nan, 2.0], 0),
        ([-inf, -inf, -inf], 0),
        ([nan, -inf, -inf], 1),
        ([1.0, inf, inf], 1),
        ([-inf, -5.0, nan], 1),
    ]
    for values, expected in cases:
        logits = torch.tensor([values])
        for row in (Row(temperature=0), Row(seed=1), Row(top_k=2, seed=2), Row(top_p=0.9, seed=3)):
            if row.temperature > 0 and values == [nan, 1.0, 2.0]:
                continue
            if row.temperature > 0 and values == [2.0, nan, 2.0]:
                assert sample(logits, [row]).ids[0] in (0, 2)
                continue
            assert sample(logits, [row]).ids == [expected], (values, row)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", [7, 1000, 49_152])
def test_equals_the_reference(isa: str, vocab_size: int) -> None:
    rows = [
        Row(**{**vars(row), "seed": 77 + (draw << 33), "sample_index": draw, "position": 11 * draw})
        for row in SETTINGS
        for draw in range(2)
    ]
    logits = normal(len(rows), vocab_size, 3)
    # Ties, bans and a little of everything else.
    logits[::2] = logits[::2].round()
    logits[:, ::5] = -math.inf
    expected = [row.reference(x) for row, x in zip(rows, logits, strict=True)]
    with instruction_set(isa):
        assert sample(logits, rows).ids == expected


def test_a_row_alone_or_among_others_on_any_number_of_threads() -> None:
    rows = [Row(**{**vars(row), "seed": 9, "position": 40}) for row in SETTINGS]
    logits = normal(len(rows), 49_152, 5)
    together = sample(logits, rows).ids
    for count in (1, 2, 5):
        with threads(count):
            assert sample(logits, rows).ids == together
            assert [sample(x[None], [row]).ids[0] for x, row in zip(logits, rows, strict=True)] == together


@pytest.mark.parametrize("row", [Row(), Row(temperature=0.6), Row(top_k=7), Row(top_p=0.8), Row(min_p=0.1)], ids=str)
def test_draws_follow_the_distribution(row: Row) -> None:
    """Chi-square of 10,000 draws at as many places against torch's softmax of what may be drawn."""
    draws, vocab_size = 10_000, 40
    logits = normal(1, vocab_size, 8, 1.5)[0]
    ids = reference.allowed(logits, row.temperature, row.top_k, row.top_p, row.min_p)
    expected = torch.zeros(vocab_size, dtype=torch.float64)
    expected[ids] = torch.softmax(logits[ids].double() / row.temperature, -1)
    rows = [Row(**{**vars(row), "seed": 1234, "position": i}) for i in range(draws)]
    drawn = torch.tensor(sample(logits.repeat(draws, 1), rows).ids).bincount(minlength=vocab_size)
    assert (drawn[expected == 0] == 0).all()
    # Rare tokens together, so that each cell is well filled.
    common = expected * draws >= 10
    observed = torch.cat((drawn[common], drawn[~common].sum()[None])).double()
    wanted = torch.cat((expected[common], expected[~common].sum()[None])) * draws
    cells = wanted > 0
    chi_square = ((observed - wanted)[cells] ** 2 / wanted[cells]).sum()
    freedom = int(cells.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


@pytest.mark.parametrize("row", [Row(top_k=20), Row(top_p=0.9), Row(min_p=0.03), Row(top_k=9, top_p=0.7)], ids=str)
def test_what_may_be_drawn_is_what_transformers_leaves(row: Row) -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = normal(1, 3000, 21)
    warped = logits
    if row.top_k:
        warped = TopKLogitsWarper(row.top_k)(None, warped)
    if row.top_p < 1:
        warped = TopPLogitsWarper(row.top_p)(None, warped)
    if row.min_p:
        warped = MinPLogitsWarper(row.min_p)(None, warped)
    ids = reference.allowed(logits[0], 1.0, row.top_k, row.top_p, row.min_p)
    assert sorted(ids.tolist()) == torch.nonzero(warped[0] > -math.inf).flatten().tolist()


def test_penalties_are_those_of_transformers_and_openai() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    vocab_size = 1000
    logits = normal(2, vocab_size, 31)
    prompt, output = torch.tensor([3, 4, 5, 5, 999]), torch.tensor([5, 7, 7, 7, 0])
    counts = output.bincount(minlength=vocab_size)
    seen = counts.clone()
    seen[prompt] |= PROMPT_BIT
    history = torch.cat((prompt, output))[None]
    repeated = RepetitionPenaltyLogitsProcessor(1.3)(history, logits[:1].clone())[0]
    rows = [
        Row(temperature=0, repetition=1.3, counts=seen.int()),
        Row(temperature=0, presence=0.5, frequency=0.25, counts=seen.int()),
    ]
    changed = sample(logits, rows).logits
    torch.testing.assert_close(changed[0], repeated)
    torch.testing.assert_close(changed[1], logits[1] - 0.25 * counts - 0.5 * (counts > 0))


def test_log_probabilities_are_of_the_raw_logits() -> None:
    vocab_size = 5000
    logits = normal(4, vocab_size, 41)
    logits[3] = logits[3].round()
    counts = torch.zeros(vocab_size, dtype=torch.int32)
    counts[logits[1].argmax()] = 3
    rows = [
        Row(seed=1, logprobs=3),
        Row(temperature=0, frequency=50.0, counts=counts, logprobs=5),
        Row(seed=2),
        Row(temperature=0, logprobs=0),
    ]
    result = sample(logits, rows, max_logprobs=5)
    expected = torch.stack([reference.logprobs(x) for x in logits])
    for i in (0, 1, 3):
        assert abs(float(result.logprobs[i]) - float(expected[i, result.ids[i]])) < 1e-5
    assert result.ids[1] != int(logits[1].argmax())
    assert result.logprobs[2].isnan()
    for i, count in ((0, 3), (1, 5)):
        order = reference.ranked(logits[i])[:count]
        assert result.top_ids[i, :count].tolist() == order.tolist()
        torch.testing.assert_close(result.top_logprobs[i, :count].double(), expected[i, order], atol=1e-5, rtol=0)
    assert (result.top_ids[0, 3:] == -7).all()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        _core.cpu_sample(0, 1, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="logits is null"):
        _core.cpu_sample(0, 1, 5, 5, 4, 4, 4, 0, 0, 4, 4, 4, 4, 0)
