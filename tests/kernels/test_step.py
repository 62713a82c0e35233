"""Taking plans in and giving samples out, against plain numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from octavo._core import NUM_ARENAS, PARAM_LEN
from octavo.kernels.step import DeviceState, PlanLayout, Samples
from octavo.kernels.step_plan import take_plan
from octavo.kernels.step_samples import publish
from octavo.kernels.token_counts import PROMPT_BIT, count_history

MAX_TOKENS, MAX_SEQS, STRIDE, VOCAB = 700, 40, 9, 1200
SIZES = {
    "counts": 16,
    "rows": MAX_SEQS,
    "query_start": MAX_SEQS + 1,
    "seq_lens": MAX_SEQS,
    "num_sampled": MAX_SEQS,
    "logits_rows": MAX_SEQS,
    "logits_slots": MAX_SEQS,
    "param_slots": MAX_SEQS,
    "param_values": MAX_SEQS * PARAM_LEN,
    "bias_logits": 600,
    "bias_tokens": 600,
    "bias_values": 600,
    "mask_logits": MAX_SEQS,
    "group_rows": MAX_SEQS,
    "group_starts": MAX_SEQS + 1,
    "group_blocks": MAX_SEQS,
    "table_slots": 900,
    "table_indices": 900,
    "table_blocks": 900,
    "token_ids": MAX_TOKENS,
    "positions": MAX_TOKENS,
    "slot_mapping": MAX_TOKENS,
}
GARBAGE = -123456


def make_layout(num_groups: int = 1) -> PlanLayout:
    arrays, offset = [], 0
    for name, size in (SIZES | {"slot_mapping": num_groups * MAX_TOKENS}).items():
        arrays.append((name, offset, size))
        offset += -(-size // 32) * 32
    return PlanLayout.of(arrays, offset)


class Step:
    """A plan of random contents, its counts as given."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        decode_rows: int,
        prompts: tuple[int, ...] = (),
        logits: int,
        updates: int = 0,
        params: int = 0,
        biases: int = 0,
        masks: int = 0,
        groups: tuple[int, ...] = (),
    ) -> None:
        lengths = [1] * decode_rows + list(prompts)
        num_tokens, num_rows = sum(lengths), len(lengths)
        self.tokens, self.rows, self.decode_rows, self.logits = num_tokens, num_rows, decode_rows, logits
        counts = [
            num_tokens,
            num_rows,
            decode_rows,
            logits,
            updates,
            0,
            params,
            biases,
            len(groups),
            99,
            9,
            5,
            masks,
            0,
            0,
            0,
        ]
        token_ids = rng.integers(0, VOCAB, num_tokens)
        token_ids[:decode_rows][rng.random(decode_rows) < 0.5] = -1
        places = rng.choice(MAX_SEQS * STRIDE, updates, replace=False)
        self.arrays: dict[str, Any] = {
            "counts": counts,
            "rows": rng.permutation(MAX_SEQS)[:num_rows],
            "query_start": np.cumsum([0, *lengths]),
            "seq_lens": rng.integers(1, 999, num_rows),
            "logits_rows": rng.integers(0, num_tokens, logits),
            "logits_slots": rng.permutation(MAX_SEQS)[:logits],
            "param_slots": rng.permutation(MAX_SEQS)[:params],
            "param_values": rng.integers(-(2**31), 2**31, params * PARAM_LEN),
            "bias_logits": rng.integers(0, 40, biases),
            "bias_tokens": rng.integers(0, VOCAB, biases),
            "bias_values": rng.integers(-(2**31), 2**31, biases),
            "mask_logits": rng.permutation(MAX_SEQS)[:masks],
            "group_rows": rng.permutation(decode_rows)[: sum(groups)],
            "group_starts": np.cumsum([0, *groups]) if groups else [],
            "group_blocks": rng.integers(1, 99, len(groups)),
            "table_slots": places // STRIDE,
            "table_indices": places % STRIDE,
            "table_blocks": rng.integers(1, 9999, updates),
            "token_ids": token_ids,
            "positions": rng.integers(0, 9999, num_tokens),
            "slot_mapping": rng.integers(0, 9999, num_tokens),
        }

    def write(self, layout: PlanLayout, arena: torch.Tensor) -> None:
        arena.fill_(GARBAGE)
        for name, values in self.arrays.items():
            layout.view(arena, name)[: len(values)] = torch.from_numpy(np.asarray(values, dtype=np.int32))


def steps() -> Iterator[tuple[Step, int]]:
    """(step, bound of its tokens)."""
    rng = np.random.default_rng(3)
    yield Step(rng, decode_rows=1, logits=1), 1
    yield Step(rng, decode_rows=0, prompts=(3, 590), logits=2, updates=300, params=3, biases=2), 640
    yield Step(rng, decode_rows=30, logits=30, updates=4), 32
    yield Step(rng, decode_rows=33, prompts=(600, 5), logits=40, params=40, biases=599, masks=40), 640
    yield Step(rng, decode_rows=24, logits=24, masks=3, groups=(2, 9, 3)), 24
    yield Step(rng, decode_rows=0, prompts=(1,), logits=8, params=8), 8


def pinned(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")


def test_a_plan_is_taken_in(device: torch.device) -> None:
    layout = make_layout()
    arenas = pinned((NUM_ARENAS, layout.length), device)
    state = DeviceState.empty(layout, MAX_SEQS, STRIDE, device)
    samples, ring = Samples.empty(MAX_SEQS, 3, device), Samples.empty(MAX_SEQS, 3, device, ring=True)
    state.last_token.copy_(torch.arange(MAX_SEQS, dtype=torch.int32) + 5000)
    tables = np.zeros((MAX_SEQS, STRIDE), dtype=np.int32)
    params = np.zeros((MAX_SEQS, PARAM_LEN), dtype=np.int32)
    for number, (step, tokens) in enumerate(steps(), start=1):
        assert state.turn.item() == number % NUM_ARENAS
        arena, rows = arenas[number % NUM_ARENAS], min(tokens, MAX_SEQS)
        step.write(layout, arena)
        state.plan.fill_(GARBAGE)
        take_plan(arenas, layout, state, tokens=tokens, rows=rows)
        publish(state, layout.view(state.plan, "counts"), layout.view(state.plan, "logits_slots"), samples, ring)
        given, taken = step.arrays, {name: layout.view(state.plan, name).tolist() for name in SIZES}

        def padded(values: Any, size: int, filler: int, name: str) -> None:
            values = [int(value) for value in values]
            assert taken[name][:size] == values + [filler] * (size - len(values)), name  # noqa: B023
            assert set(taken[name][size:]) <= {GARBAGE}, name  # noqa: B023

        token_ids = given["token_ids"].copy()
        for row in range(step.decode_rows):
            if token_ids[row] < 0:
                token_ids[row] = 5000 + given["rows"][row]
        assert taken["counts"] == given["counts"]
        padded(token_ids, tokens, 0, "token_ids")
        padded(given["positions"], tokens, 0, "positions")
        padded(given["slot_mapping"], tokens, -1, "slot_mapping")
        padded(given["rows"], rows, 0, "rows")
        padded(given["seq_lens"], rows, 0, "seq_lens")
        padded(given["query_start"], rows + 1, step.tokens, "query_start")
        padded(given["logits_rows"], rows, 0, "logits_rows")
        padded(given["logits_slots"], rows, 0, "logits_slots")
        for name in ("bias_logits", "bias_tokens", "bias_values", "mask_logits", "group_starts", "group_blocks"):
            padded(given[name], len(given[name]), 0, name)
        assert taken["group_rows"][: len(given["group_rows"])] == given["group_rows"].tolist()
        tables[given["table_slots"], given["table_indices"]] = given["table_blocks"]
        params[given["param_slots"]] = given["param_values"].reshape(-1, PARAM_LEN)
        np.testing.assert_array_equal(state.block_tables.cpu(), tables)
        np.testing.assert_array_equal(state.params.cpu(), params)
    assert state.last_token.tolist() == list(range(5000, 5000 + MAX_SEQS))


@pytest.mark.parametrize(("decode_rows", "prompt", "tokens"), [(3, 0, 8), (2, 520, 640)])
def test_every_cache_group_gets_its_slots_and_tables(
    device: torch.device, decode_rows: int, prompt: int, tokens: int
) -> None:
    num_groups, layout = 3, make_layout(3)
    arenas = pinned((NUM_ARENAS, layout.length), device)
    state = DeviceState.empty(layout, MAX_SEQS, STRIDE, device)
    rng = np.random.default_rng(4)
    step = Step(rng, decode_rows=decode_rows, prompts=(prompt,) if prompt else (), logits=decode_rows, updates=9)
    # Tables of a group follow those of the one before.
    step.arrays["table_slots"] = step.arrays["table_slots"] + MAX_SEQS * (np.arange(9) % num_groups)
    slots = rng.integers(0, 9999, (num_groups, step.tokens))
    step.arrays["slot_mapping"] = np.full((num_groups, MAX_TOKENS), GARBAGE)
    step.arrays["slot_mapping"][:, : step.tokens] = slots
    step.arrays["slot_mapping"] = step.arrays["slot_mapping"].reshape(-1)
    step.write(layout, arenas[1])
    state.plan.fill_(GARBAGE)
    take_plan(arenas, layout, state, tokens=tokens, rows=min(tokens, MAX_SEQS))
    taken = layout.view(state.plan, "slot_mapping").view(num_groups, MAX_TOKENS).cpu().numpy()
    np.testing.assert_array_equal(taken[:, : step.tokens], slots)
    assert (taken[:, step.tokens : tokens] == -1).all()
    assert (taken[:, tokens:] == GARBAGE).all()
    tables = np.zeros((num_groups * MAX_SEQS, STRIDE), dtype=np.int32)
    tables[step.arrays["table_slots"], step.arrays["table_indices"]] = step.arrays["table_blocks"]
    np.testing.assert_array_equal(state.block_tables.cpu(), tables)


@pytest.mark.parametrize("num_logits", [1, 64, 100])
def test_samples_are_published_in_turn(device: torch.device, num_logits: int) -> None:
    slots, width = 128, 5
    arrays = [("counts", 0, 16), ("logits_slots", 32, slots), ("token_ids", 160, 1), ("slot_mapping", 192, 1)]
    layout = PlanLayout.of(arrays, 224)
    state = DeviceState.empty(layout, slots, 1, device)
    samples, ring = Samples.empty(slots, width, device), Samples.empty(slots, width, device, ring=True)
    counts, order = layout.view(state.plan, "counts"), layout.view(state.plan, "logits_slots")
    rng = np.random.default_rng(num_logits)
    for number in (1, 2, 3, 4):
        asks = rng.random(slots) < 0.3
        wanted = np.where(asks, rng.integers(0, width + 1, slots), 7)
        params = np.full((slots, PARAM_LEN), -1, dtype=np.int32)
        params[:, 10], params[:, 11] = np.where(asks, 3, 1), wanted
        order_now = rng.permutation(slots).astype(np.int32)
        state.params.copy_(torch.from_numpy(params))
        order.copy_(torch.from_numpy(order_now))
        counts[3] = num_logits
        samples.ids.copy_(torch.from_numpy(rng.integers(0, 999, slots, dtype=np.int32)))
        samples.logprobs.copy_(torch.from_numpy(rng.random(slots, dtype=np.float32)))
        samples.top_ids.copy_(torch.from_numpy(rng.integers(0, 999, (slots, width), dtype=np.int32)))
        samples.top_logprobs.copy_(torch.from_numpy(rng.random((slots, width), dtype=np.float32)))
        for tensor in (ring.ids, ring.logprobs, ring.top_ids, ring.top_logprobs):
            tensor.fill_(-9)
        publish(state, counts, order, samples, ring)
        turn = number % NUM_ARENAS
        assert state.turn.item() == (turn + 1) % NUM_ARENAS
        assert ring.ids[turn, :num_logits].tolist() == samples.ids[:num_logits].tolist()
        assert set(ring.ids[turn, num_logits:].tolist()) <= {-9}
        for row in range(num_logits):
            slot = order_now[row]
            count = wanted[slot] if asks[slot] else 0
            assert ring.logprobs[turn, row] == (samples.logprobs[row].cpu() if asks[slot] else -9)
            assert torch.equal(ring.top_ids[turn, row, :count], samples.top_ids[row, :count].cpu())
            assert torch.equal(ring.top_logprobs[turn, row, :count], samples.top_logprobs[row, :count].cpu())
            assert set(ring.top_ids[turn, row, count:].tolist()) <= {-9}
        for other in {0, 1, 2} - {turn}:
            assert set(ring.ids[other].tolist()) == {-9}
            assert set(ring.logprobs[other].tolist()) == {-9.0}


@pytest.mark.parametrize(("length", "prompt_length"), [(1, 1), (2500, 1700), (1100, 0), (30, 30)])
def test_a_history_is_counted(device: torch.device, length: int, prompt_length: int) -> None:
    rng = np.random.default_rng(length)
    tokens = rng.integers(0, VOCAB, length, dtype=np.int32)
    tokens[length // 2 :] %= 7
    counts = torch.full((3, VOCAB), 77, dtype=torch.int32, device=device)
    staged = pinned((length,), device)
    staged.copy_(torch.from_numpy(tokens))
    count_history(staged, counts, 1, prompt_length)
    expected = np.bincount(tokens[prompt_length:], minlength=VOCAB).astype(np.int32)
    expected[tokens[:prompt_length]] |= PROMPT_BIT
    np.testing.assert_array_equal(counts[1].cpu(), expected)
    assert counts[0].eq(77).all()
    assert counts[2].eq(77).all()
