"""Sampling by the Triton kernels against the reference; rows alone and among others."""

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import reference_kernels as reference
import torch
import triton
import triton.language as tl
from constrained_rows import Constraints, random_constraints
from octavo.kernels.launch import launch
from octavo.kernels.noise import gumbel, gumbel_bound, noise_bits, noise_keys
from octavo.kernels.sample import SampleTiles, SampleWorkspace, sample, workspace_bytes
from octavo.kernels.token_counts import PROMPT_BIT
from sample_rows import SETTINGS, Row, normal
from torch import Tensor

# Small enough that a row of a thousand logits takes every path: several blocks, more candidates than are searched at
# once, more visited parts than a pass takes at a time.
TILES = SampleTiles(sub=32, subs=8, part=4, stages=2, visited=64, found=128)
MAX_LOGPROBS = 20
UNTOUCHED = -7


@dataclass
class Step:
    """What one call takes and gives. Two rows past the last are padding, NaN throughout."""

    logits: Tensor
    rows: list[Row]
    held: Constraints = field(default_factory=Constraints)
    tiles: SampleTiles = TILES
    penalties: bool = True
    ids: Tensor = field(init=False)

    def run(self, device: torch.device) -> "Step":
        count, vocab_size = self.logits.shape
        padded = count + 2

        def ints(values: list[int] | list[list[int]] | Tensor) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(device)

        self.logits = torch.cat((self.logits.to(device), torch.full((2, vocab_size), math.nan, device=device)))
        counts = [0] * 16
        counts[3] = count
        # Slots, and the tokens that logits come from, in another order than the rows; those of padding are far outside.
        self.slots = list(range(count - 1, -1, -1))
        sources = list(range(1, 3 * count, 3))
        positions = torch.full((3 * count,), -1000)
        positions[sources] = torch.tensor([row.position - 1 for row in self.rows])
        params = [row.words() for row in reversed(self.rows)]
        self.token_counts = torch.zeros(count, vocab_size, dtype=torch.int32)
        for slot, row in zip(self.slots, self.rows, strict=True):
            if row.counts is not None:
                self.token_counts[slot] = row.counts
        self.token_counts = self.token_counts.to(device)
        far = [1 << 24] * 2
        self.ids, self.last_token = ints([UNTOUCHED] * padded), ints([UNTOUCHED] * count)
        self.logprobs = torch.full((padded,), math.nan, device=device)
        self.top_ids = ints([[UNTOUCHED] * MAX_LOGPROBS] * padded)
        self.top_logprobs = torch.full((padded, MAX_LOGPROBS), math.nan, device=device)
        self.held.apply(self.logits, count)
        sample(
            self.logits,
            ints(counts),
            ints(sources + far),
            ints(self.slots + far),
            ints(positions),
            ints(params),
            self.token_counts if self.penalties else None,
            self.last_token,
            self.ids,
            self.logprobs,
            self.top_ids,
            self.top_logprobs,
            SampleWorkspace(padded, vocab_size, MAX_LOGPROBS, device, self.tiles),
            rows=padded,
        )
        return self


def check_padding(step: Step) -> None:
    assert step.ids[-2:].tolist() == [UNTOUCHED] * 2
    assert step.logits[-2:].isnan().all()
    assert step.logprobs[-2:].isnan().all()
    assert (step.top_ids[-2:] == UNTOUCHED).all()


def many(rows: list[Row], draws: int) -> list[Row]:
    """The rows at several places of several answers."""
    places = [{"seed": 77 + (i << 33), "sample_index": i, "position": 11 * i} for i in range(draws)]
    return [Row(**{**vars(row), **place}) for row in rows for place in places]


@pytest.mark.parametrize("vocab_size", [7, 1003])
def test_equals_the_reference(device: torch.device, vocab_size: int) -> None:
    rows = many([Row(temperature=0), Row(top_k=500, top_p=0.9, temperature=3.0), *SETTINGS], 1)
    logits = normal(len(rows), vocab_size, 3)
    # Ties, impossible tokens and NaN, and a little of everything else.
    logits[::2] = logits[::2].round()
    logits[:, ::5] = -math.inf
    logits[:, 3::50] = math.nan
    step = Step(logits.clone(), rows).run(device)
    assert step.ids[:-2].tolist() == [row.reference(x) for row, x in zip(rows, logits, strict=True)]
    assert [int(step.last_token[slot]) for slot in step.slots] == step.ids[:-2].tolist()
    assert torch.equal(step.logits[:-2].cpu().nan_to_num(1e9), logits.nan_to_num(1e9))
    check_padding(step)


def test_random_settings_equal_the_reference(device: torch.device) -> None:
    pick = random.Random(5)
    rows = [
        Row(
            temperature=pick.choice([1e-4, 0.3, 1.0, 2.0, 5.0]),
            top_k=pick.choice([0, 0, 1, 3, 20, 129, 300, 700, 10_000]),
            top_p=pick.choice([1.0, 1e-6, 0.3, 0.9, 0.99, 0.99999]),
            min_p=pick.choice([0.0, 0.0, 1e-6, 0.01, 0.3]),
            seed=pick.getrandbits(64),
            sample_index=pick.randrange(100),
            position=pick.randrange(100_000),
        )
        for _ in range(20)
    ]
    logits = torch.stack([normal(1, 700, i, pick.choice([0.0, 0.1, 1.0, 8.0]))[0] for i in range(len(rows))])
    step = Step(logits, rows).run(device)
    assert step.ids[:-2].tolist() == [row.reference(x) for row, x in zip(rows, logits, strict=True)]


def test_penalties_and_biases(device: torch.device) -> None:
    vocab_size = 500
    logits = normal(6, vocab_size, 9)
    counts = torch.zeros(vocab_size, dtype=torch.int32)
    counts[::3] += 2
    counts[::7] |= PROMPT_BIT
    likeliest = logits.argmax(-1).tolist()
    for row in (0, 1, 2):
        counts[likeliest[row]] = 5
    rows = [
        Row(temperature=0, repetition=1.7, counts=counts),
        Row(temperature=0, presence=1.5, frequency=0.75, counts=counts),
        Row(temperature=0.9, repetition=0.8, presence=-1.0, frequency=0.3, counts=counts, seed=4, logprobs=2),
        Row(top_p=0.7, top_k=100, repetition=1.2, frequency=1.1, counts=counts, seed=8),
        Row(temperature=0, logprobs=3),
        Row(seed=1),
    ]
    biases = [(4, likeliest[4], -math.inf), (4, 17, -math.inf), (4, 18, 2.5), (5, 3, -1.75)]
    biases += [(3, token, -math.inf) for token in range(0, 400, 2)]
    held = Constraints(biases=biases)
    step = Step(logits.clone(), rows, held).run(device)
    logits = held.naive(logits)
    assert torch.equal(step.logits[:-2].cpu(), logits)
    ids = step.ids[:-2].tolist()
    assert ids == [row.reference(x) for row, x in zip(rows, logits, strict=True)]
    assert ids[0] != likeliest[0]
    for row, slot in enumerate(step.slots):
        expected = torch.zeros_like(counts)
        if rows[row].counts is not None:
            expected = counts.clone()
            expected[ids[row]] += 1
        assert torch.equal(step.token_counts[slot].cpu(), expected)
    # Of the logits before penalties, after biases.
    for row in (2, 4):
        expected = reference.logprobs(logits[row])
        order = reference.ranked(logits[row])[: rows[row].logprobs]
        assert step.top_ids[row, : len(order)].tolist() == order.tolist()
        assert abs(float(step.logprobs[row]) - float(expected[ids[row]])) < 1e-5


def test_tokens_that_one_lane_works_on(device: torch.device) -> None:
    """Draws where all that may be drawn falls to one lane of a block, so that bounds seldom say which is best."""
    block, lanes = TILES.sub * TILES.subs, TILES.sub * TILES.part
    assert block == 2 * lanes
    rows = many([Row(temperature=0.7)], 30)
    logits = torch.full((30, 2 * block), -math.inf)
    pairs = [(lane, lane + lanes) for lane in (5, lanes - 1)]
    for i in range(30):
        logits[i, list(pairs[i % 2])] = torch.tensor([1.0, 1.0 + 0.01 * (i % 3)])
    step = Step(logits.clone(), rows).run(device)
    ids = step.ids[:-2].tolist()
    assert ids == [row.reference(x) for row, x in zip(rows, logits, strict=True)]
    assert set(ids) == {token for pair in pairs for token in pair}


def test_rows_that_are_held_to_few_tokens_or_many(device: torch.device) -> None:
    """Every way of drawing, over rows of which whole parts are impossible, and of which a bias leads."""
    vocab_size = 1003
    rows = many([Row(temperature=0), Row(top_k=500, top_p=0.9, temperature=3.0), *SETTINGS], 1)
    held = random_constraints(np.random.default_rng(8), len(rows), vocab_size)
    logits = normal(len(rows), vocab_size, 8)
    step = Step(logits.clone(), rows, held).run(device)
    logits = held.naive(logits)
    assert torch.equal(step.logits[:-2].cpu(), logits)
    assert step.ids[:-2].tolist() == [row.reference(x) for row, x in zip(rows, logits, strict=True)]
    check_padding(step)


@pytest.mark.parametrize("vocab_size", [5, 1003])
def test_log_probabilities(device: torch.device, vocab_size: int) -> None:
    logits = normal(6, vocab_size, 41)
    logits[3:] = logits[3:].round()
    logits[4, 2:] = -math.inf
    logits[5, ::4] = math.nan
    asked = [0, 1, -1, 5, 20, 20]
    rows = [Row(temperature=0, logprobs=n) for n in asked]
    step = Step(logits, rows, penalties=False).run(device)
    assert step.logprobs[2].isnan()
    for row, n in enumerate(asked):
        numbers = logits[row].where(~logits[row].isnan(), -math.inf)
        expected = reference.logprobs(numbers)
        if n >= 0:
            assert abs(float(step.logprobs[row]) - float(expected[step.ids[row]])) < 1e-5
        n = max(n, 0)
        order = reference.ranked(numbers)[:n]
        found = len(order)
        assert step.top_ids[row, :found].tolist() == order.tolist()
        torch.testing.assert_close(step.top_logprobs[row, :found].cpu().double(), expected[order], atol=1e-5, rtol=0)
        assert (step.top_ids[row, found:n] == -1).all()
        assert (step.top_logprobs[row, found:n] == -math.inf).all()
        assert (step.top_ids[row, n:] == UNTOUCHED).all()
        assert step.top_logprobs[row, n:].isnan().all()


def test_rows_without_anything_finite(device: torch.device) -> None:
    vocab_size = 300
    logits = torch.full((5, vocab_size), math.nan)
    logits[1:] = -math.inf
    logits[1, :270] = math.nan
    logits[3, [41, 280]] = math.inf
    logits[4, 299] = -5.0
    for row in (Row(temperature=0), Row(temperature=0.7), Row(top_k=3), Row(top_p=0.5), Row(min_p=0.1)):
        step = Step(logits, [row] * 5).run(device)
        assert step.ids[:-2].tolist() == [row.reference(x) for x in logits] == [0, 270, 0, 41, 299]


@pytest.mark.parametrize("row", [Row(top_k=300), Row(top_p=0.3), Row(top_k=400, top_p=0.5), Row(top_p=0.001)], ids=str)
def test_more_ties_than_are_searched_at_once(device: torch.device, row: Row) -> None:
    """Among equals the lower ids stay: draws at many places reach the last of them and none after it."""
    rows = many([row], 5)
    logits = torch.full((5, 700), 2.5)
    logits[:, ::9] = -1.0
    logits[:, 500] = 2.75
    step = Step(logits, rows).run(device)
    assert step.ids[:-2].tolist() == [row.reference(x) for row, x in zip(rows, logits, strict=True)]


def test_a_row_alone_or_among_others(device: torch.device) -> None:
    """The same bits, and log probabilities with them."""
    counts = (torch.arange(400) % 5 == 0).int()
    rows = [Row(**{**vars(row), "seed": 9, "position": 40, "logprobs": 4}) for row in SETTINGS]
    rows[2].counts, rows[2].repetition = counts, 1.4
    logits = normal(len(rows), 400, 5)
    together = Step(logits, rows).run(device)
    for i in (0, 2, 5, 8, 11):
        alone = Step(logits[i : i + 1], [rows[i]]).run(device)
        for name in ("ids", "logprobs", "top_ids", "top_logprobs"):
            one, among = getattr(alone, name)[0], getattr(together, name)[i]
            assert torch.equal(one.nan_to_num(9.0), among.nan_to_num(9.0)), name


@triton.jit
def noise_kernel(bits, noise, seed_low, seed_high, sample_index, position, NUMBER: tl.constexpr):
    tokens = tl.arange(0, NUMBER)
    first, second = noise_keys(seed_low, seed_high, sample_index, position)
    found = noise_bits(tokens, first, second)
    tl.store(bits + tokens, found.to(tl.int32, bitcast=True))
    tl.store(noise + tokens, gumbel(found))


@triton.jit
def gumbel_kernel(bits, noise, bound, NUMBER: tl.constexpr):
    place = tl.arange(0, NUMBER)
    found = tl.load(bits + place).to(tl.uint32, bitcast=True)
    tl.store(noise + place, gumbel(found))
    tl.store(bound + place, gumbel_bound(found))


def test_noise_has_the_bits_of_the_reference(device: torch.device) -> None:
    number = 4096
    bits = torch.zeros(number, dtype=torch.int32, device=device)
    noise = torch.zeros(number, device=device)
    seed = 0x9ABCDEF012345678
    low, high = (word - (1 << 32) if word >> 31 else word for word in (seed & 0xFFFFFFFF, seed >> 32))
    launch(noise_kernel, (1,), bits, noise, low, high, 3, 1000, NUMBER=number, num_warps=4, enable_fp_fusion=False)
    expected = reference.noise_bits(seed, 3, 1000, torch.arange(number))
    assert torch.equal(bits.cpu().long() & 0xFFFFFFFF, expected)
    torch.testing.assert_close(noise.cpu(), reference.gumbel(expected), atol=2e-6, rtol=0)


def test_noise_is_right_at_its_ends(device: torch.device) -> None:
    """Bits near all zeros and all ones, and each side of where the series begins; its bound is above it and near."""
    near = torch.arange(256)
    bits = torch.cat((near, 2**32 - 1 - near, 3 * 2**30 - 128 + near, (near << 24) + 12345))
    bits = torch.cat((bits, torch.randint(0, 1 << 32, (4096 - len(bits),), generator=torch.Generator().manual_seed(2))))
    signed = torch.where(bits >= 2**31, bits - 2**32, bits).int().to(device)
    noise, bound = torch.zeros(len(bits), device=device), torch.zeros(len(bits), device=device)
    launch(gumbel_kernel, (1,), signed, noise, bound, NUMBER=len(bits), num_warps=4, enable_fp_fusion=False)
    torch.testing.assert_close(noise.cpu(), reference.gumbel(bits), atol=2e-6, rtol=4e-7)
    assert (bound > noise + 5e-4).all()
    assert (bound - noise)[noise > 1.4].max() < 0.2


def test_the_workspace_is_as_large_as_it_says(device: torch.device) -> None:
    for tiles in (TILES, SampleTiles()):
        workspace = SampleWorkspace(3, 5000, MAX_LOGPROBS, device, tiles)
        assert workspace.num_bytes == workspace_bytes(3, 5000, tiles)


@pytest.mark.gpu
def test_a_large_vocabulary_in_one_graph(device: torch.device) -> None:
    """One graph for all rows and counts: replayed after the logits and the number of rows changed."""
    vocab_size = 151_936
    rows = many([Row(temperature=0), Row(top_k=500, top_p=0.9, temperature=3.0), *SETTINGS], 1)
    logits = normal(len(rows), vocab_size, 3)
    expected = [row.reference(x) for row, x in zip(rows, logits, strict=True)]
    step = Step(logits.clone(), rows, tiles=SampleTiles()).run(device)
    assert step.ids[:-2].tolist() == expected
    check_padding(step)
    size = len(rows)
    static = torch.zeros(size, vocab_size, device=device)
    counts = torch.zeros(16, dtype=torch.int32, device=device)
    order = torch.arange(size, dtype=torch.int32, device=device)
    params = torch.tensor([row.words() for row in rows], dtype=torch.int32, device=device)
    positions = torch.tensor([row.position - 1 for row in rows], dtype=torch.int32, device=device)
    ids, last = torch.full_like(order, UNTOUCHED), torch.zeros_like(order)
    logprobs, top_logprobs = torch.zeros(size, device=device), torch.zeros(size, MAX_LOGPROBS, device=device)
    top_ids = torch.zeros(size, MAX_LOGPROBS, dtype=torch.int32, device=device)
    workspace = SampleWorkspace(size, vocab_size, MAX_LOGPROBS, device)

    def call() -> None:
        sample(
            static, counts, order, order, positions, params, None, last,
            ids, logprobs, top_ids, top_logprobs, workspace, rows=size,
        )  # fmt: skip

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    static.copy_(logits)
    for number in (1, 5, size):
        ids.fill_(UNTOUCHED)
        counts[3] = number
        graph.replay()
        assert ids.tolist() == expected[:number] + [UNTOUCHED] * (size - number)
