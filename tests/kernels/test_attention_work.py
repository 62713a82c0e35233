"""The lists that `plan_attention` makes, against lists made by loops."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from octavo.kernels.attention import CHUNK, AttentionShape
from octavo.kernels.attention_decode_tables import decode_config
from octavo.kernels.attention_plan import plan_attention
from octavo.kernels.attention_work import AttentionWork, decode_launch, device_limits, split_rows, work_bytes
from octavo.kernels.linear_tables import skinny_tile, slab_tile

SIZE = 16


def shape(num_heads: int = 8) -> AttentionShape:
    return AttentionShape(num_heads, 2, 64, SIZE, 0.125)


class Lists:
    """What is to be in the lists of rows (slot, keys, queries) and groups (rows, shared blocks)."""

    def __init__(
        self, rows: list[tuple[int, int, int]], decode: int, groups: list[tuple[list[int], int]], work: AttentionWork
    ) -> None:
        full: list[list[int]] = []
        rest: list[list[int]] = []
        by_row: list[list[int]] = []
        self.row_partials: list[int] = []
        self.split_rows = 0
        whole: list[list[int]] = []
        before = 0
        programs = work.processors * decode_launch(work, len(rows)).programs
        shared = {row: blocks * SIZE // CHUNK for members, blocks in groups for row in members}
        for row, (slot, length, _) in enumerate(rows[:decode]):
            visible = max(0, length - work.window) if work.window else 0
            chunks = range(self.first_chunk(length, work), -(-length // CHUNK))
            enough = before * work.decode_parts >= 3 * programs
            before += len(chunks)
            if work.on_hopper and decode > 32 and not (groups and work.members) and enough:
                self.row_partials.append(0)
                whole.append([row, slot, visible, length, -1, length - 1])
                continue
            self.split_rows = row + 1
            partial = len(chunks) > 1
            self.row_partials.append(len(chunks) if partial else 0)
            for i, chunk in enumerate(chunks):
                if i >= shared.get(row, 0):
                    begin, end = max(visible, chunk * CHUNK), min(length, chunk * CHUNK + CHUNK)
                    place = row * work.chunks + i if partial else -1
                    item = [row, slot, begin, end, place, length - 1]
                    (rest if i == len(chunks) - 1 else full).append(item)
                    by_row.append(item)
        # Last chunks are apart from the others where rows are few; whether before or after is for speed alone.
        self.decode = [rest + full, full + rest] if decode <= 32 else [whole + by_row]
        self.groups: list[list[int]] = []
        first = 0
        for members, blocks in groups:
            for chunk in range(blocks * SIZE // CHUNK):
                for skipped in range(0, len(members), work.members):
                    count = min(work.members, len(members) - skipped)
                    self.groups.append([first + skipped, count, rows[members[0]][0], chunk])
            first += len(members)
        prompts = []
        token = decode
        for row, (slot, length, queries) in list(enumerate(rows))[decode:]:
            for done in range(0, queries, work.queries):
                position = length - queries + done
                prompt = [slot, token + done, position, min(work.queries, queries - done)]
                prompts.append((-position, row, prompt))
            token += queries
        self.prompt = [item for *_, item in sorted(prompts)]

    @staticmethod
    def first_chunk(length: int, work: AttentionWork) -> int:
        return max(0, length - work.window) // CHUNK if work.window else 0


def plan(
    rows: list[tuple[int, int, int]],
    decode: int,
    groups: list[tuple[list[int], int]],
    work: AttentionWork,
    device: torch.device,
    *,
    padding: int = 0,
    mixed: bool = False,
) -> None:
    def array(values: list[int], size: int) -> torch.Tensor:
        return torch.tensor(values + [1 << 29] * (size - len(values)), dtype=torch.int32, device=device)

    size = len(rows) + padding
    counts = array([sum(row[2] for row in rows), len(rows), decode, 0, 0, 0, 0, 0, len(groups)], 16)
    start, members, starts = [0], [], [0]
    for _, _, queries in rows:
        start.append(start[-1] + queries)
    for group, _ in groups:
        members += group
        starts.append(len(members))
    plan_attention(
        counts,
        array([row[0] for row in rows], size),
        array(start, size + 1),
        array([row[1] for row in rows], size),
        array(members, size),
        array(starts, size + 1),
        array([blocks for _, blocks in groups], size),
        work,
        rows=size,
        grouped=bool(groups),
        mixed=mixed,
    )


def check(
    rows: list[tuple[int, int, int]], decode: int, groups: list[tuple[list[int], int]], work: AttentionWork
) -> None:
    expected = Lists(rows, decode, groups, work)
    totals = [len(expected.decode[0]), len(expected.groups), len(expected.prompt), decode]
    assert work.totals.tolist() == totals
    assert work.decode_items[: totals[0], :6].tolist() in expected.decode
    assert work.group_items[: totals[1], :4].tolist() == expected.groups
    assert work.prompt_items[: totals[2]].tolist() == expected.prompt
    assert work.row_partials[:decode].tolist() == expected.row_partials
    assert split_rows(work, len(rows), grouped=bool(groups)) >= expected.split_rows
    members = [row for group, _ in groups for row in group]
    if groups:
        assert work.member_rows[: len(members)].tolist() == members


@pytest.mark.parametrize("window", [0, 1, 100, 256, 257, 1000])
def test_decode_rows(device: torch.device, window: int) -> None:
    rows = [(9 - i, length, 1) for i, length in enumerate([1, 255, 256, 257, 512, 1111, 3000])]
    work = AttentionWork(16, 3000, 64, shape(), window, device)
    plan(rows, len(rows), [], work, device, padding=2)
    check(rows, len(rows), [], work)


@pytest.mark.parametrize("seed", range(6))
def test_any_step(device: torch.device, seed: int) -> None:
    choose = random.Random(seed)
    decode, prompts = choose.choice([(0, 3), (5, 0), (9, 4), (20, 2)])
    slots = choose.sample(range(40), decode + prompts)
    rows = [(slots[i], choose.randint(1, 2500), 1) for i in range(decode)]
    # With equal places of prompts among them, for the order of equals.
    rows += [
        (slot, queries + choose.choice([0, 0, 16, 700]), queries)
        for slot, queries in ((slot, choose.choice([2, 32, 64, 100, 700])) for slot in slots[decode:])
    ]
    groups = []
    members = choose.sample(range(decode), decode // 2 * 2)
    while len(members) > 2 and choose.random() < 0.9:
        size = choose.randint(2, len(members))
        group, members = sorted(members[:size]), members[size:]
        groups.append((group, choose.randint(0, (min(rows[row][1] for row in group) - 1) // SIZE)))
    work = AttentionWork(24, 3200, 4096, shape(choose.choice([2, 8, 32])), 0, device)
    plan(rows, decode, groups, work, device, padding=choose.randint(0, 2), mixed=prompts > 0)
    check(rows, decode, groups, work)


def test_many_rows(device: torch.device) -> None:
    rows = [(row, 1 + 61 * row, 1) for row in range(40)]
    work = AttentionWork(48, 3000, 64, shape(), 0, device)
    plan(rows, len(rows), [], work, device)
    check(rows, len(rows), [], work)


@pytest.mark.parametrize("window", [0, 700])
def test_many_rows_on_hopper_are_items_whole_but_for_the_first(device: torch.device, window: int) -> None:
    rows = [(row, 1 + 61 * row, 1) for row in reversed(range(60))]
    work = AttentionWork(64, 4000, 64, shape(), window, device, on_hopper=True)
    work.processors = 8
    plan(rows, len(rows), [], work, device)
    check(rows, len(rows), [], work)
    partials = work.row_partials[: len(rows)].tolist()
    assert not any(partials[-40:])
    assert partials[0]
    # The merge does not look at rows that cannot have partials.
    assert split_rows(work, len(rows), grouped=False) == 32
    if not window:
        assert split_rows(work, len(rows), grouped=True) == len(rows)
        plan(rows, len(rows), [([0, 59], 0)], work, device)
        check(rows, len(rows), [([0, 59], 0)], work)


def test_many_rows_may_be_split(device: torch.device) -> None:
    """Short rows first, so that as many as can be are split."""
    rows = [(row, 200 if row < 39 else 700, 1) for row in range(120)]
    work = AttentionWork(128, 1000, 64, AttentionShape(3, 3, 64, SIZE, 0.125), 0, device, on_hopper=True)
    work.processors = 20
    plan(rows, len(rows), [], work, device)
    check(rows, len(rows), [], work)
    assert split_rows(work, len(rows), grouped=False) == 40


@pytest.mark.parametrize("count", [1, 20, 32, 33])
def test_few_rows_on_hopper_are_items_by_chunk(device: torch.device, count: int) -> None:
    choose = random.Random(count)
    rows = [(row, choose.randint(1, 2900), 1) for row in range(count)]
    work = AttentionWork(48, 3000, 64, shape(), 0, device, on_hopper=True)
    work.processors = 2
    plan(rows, count, [], work, device)
    check(rows, count, [], work)
    assert (work.totals[0] < sum(-(-length // CHUNK) for _, length, _ in rows)).item() is (count > 32)


def test_last_chunks_come_first_where_programs_have_no_gap_for_them(device: torch.device) -> None:
    """Two heads share an item: full chunks that come out even, then ones that leave most programs idle at the end."""
    work = AttentionWork(2, 6000, 64, shape(), 0, device)
    work.processors = 8
    chunks = work.processors * decode_config(work.capability, work.shape, 2).programs // 2
    for full, first in ((chunks, True), (chunks + 1, False), (2 * chunks - 1, True)):
        rows = [(row, (full + row) // 2 * CHUNK + 1, 1) for row in range(2)]
        plan(rows, 2, [], work, device)
        assert (work.decode_items[0, 3] - work.decode_items[0, 2] == 1).item() is first


def test_lists_of_the_last_step_are_gone(device: torch.device) -> None:
    work = AttentionWork(8, 1000, 64, shape(), 0, device)
    rows = [(0, 900, 1), (1, 800, 1), (2, 64, 30)]
    plan(rows, 2, [([0, 1], 48)], work, device, mixed=True)
    assert all(work.totals.tolist())
    plan(rows[:1], 1, [], work, device)
    assert work.totals.tolist() == [4, 0, 0, 1]


@pytest.mark.parametrize("window", [0, 100, 4096])
def test_bytes_are_known_before(device: torch.device, window: int) -> None:
    arguments = (16, 1000, 64, shape(), window)
    work = AttentionWork(*arguments, device)
    assert work_bytes(*arguments) == work.num_bytes
    assert work.num_bytes > work.values.nbytes + work.stats.nbytes


@pytest.mark.parametrize(("window", "chunks"), [(1, 1), (2, 2), (257, 2), (258, 3), (10**6, 4)])
def test_a_window_needs_room_for_few_chunks(device: torch.device, window: int, chunks: int) -> None:
    assert len(AttentionWork(1, 1000, 64, shape(), window, device).values) == chunks


@pytest.mark.parametrize(
    ("version", "shared_bytes", "limits"),
    [((9, 0), 227 << 10, 90), ((10, 0), 227 << 10, 100), ((12, 0), 99 << 10, 89), ((8, 6), 99 << 10, 86)],
)
def test_gpus_are_launched_on_as_their_shared_memory_allows(
    version: tuple[int, int], shared_bytes: int, limits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(
        major=version[0], minor=version[1], multi_processor_count=7, shared_memory_per_block_optin=shared_bytes
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_limits(torch.device("meta")) == (limits, 7)
    assert skinny_tile((12, 0), 4096, 1024, 8, gated=False) is None
    assert slab_tile((12, 0), 4096, 1024, 8, gated=False) is None
