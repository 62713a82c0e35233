"""The admission queue without a server: order, fairness, capacity and counts for any order of events."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.errors import InvalidRequest
from octavo.server.access.identity import ANONYMOUS, PRIORITIES, Identity, cache_salt
from octavo.server.error_responses import ConcurrencyExceeded, QueueFull
from octavo.server.queueing.admission import ConcurrencyLimit
from octavo.server.queueing.admission_queue import AdmissionQueue
from octavo.server.queueing.priority import engine_priority, priority_class


def queue_of(capacity: int = 1, **limits: int) -> AdmissionQueue:
    known = {"max_unstarted": 1000, "unstarted_tokens": 1 << 30, "max_requests": 1 << 30, "max_tokens": 1 << 40}
    return AdmissionQueue(capacity, **{**known, **limits})


def join(queue: AdmissionQueue, tenant: str = "a", level: str = "normal", size: int = 10, expected: int = 10) -> Any:
    return queue.join(level, tenant, [size], 1, expected)[0]


def serve_order(queue: AdmissionQueue, tickets: list[Any], count: int) -> list[Any]:
    """Ends whoever is in the engine, again and again; who came in, in order."""
    order: list[Any] = []
    inside = [ticket for ticket in tickets if ticket.entered]
    while len(order) < count and inside:
        ticket = inside.pop(0)
        order.append(ticket)
        before = {id(other) for other in tickets if other.entered}
        queue.leave(ticket, ticket.cost)
        inside += [other for other in tickets if other.entered and id(other) not in before]
    return order


def test_first_come_first_served_within_a_tenant() -> None:
    queue = queue_of()
    tickets = [join(queue) for _ in range(50)]
    assert serve_order(queue, tickets, 50) == tickets


def test_a_flood_delays_only_its_tenant() -> None:
    queue = queue_of()
    flood = [join(queue, "flood", size=random.Random(number).randrange(1, 500)) for number in range(1000)]
    late = [join(queue, "late") for _ in range(10)]
    order = serve_order(queue, flood + late, 40)
    places = [order.index(ticket) for ticket in late]
    # The one that runs, then turn by turn; the flood's are longer, so it gets fewer turns.
    assert places == sorted(places)
    assert max(places) <= 20
    assert places[0] <= 2


@pytest.mark.parametrize("sizes", [(10, 10), (10, 1000), (500, 20)])
def test_tenants_share_by_tokens(sizes: tuple[int, int]) -> None:
    queue = queue_of()
    tickets = []
    for tenant, size in zip("ab", sizes, strict=True):
        tickets += [join(queue, tenant, size=size, expected=0) for _ in range(20_000 // size)]
    used: Counter[str] = Counter()
    for ticket in serve_order(queue, tickets, 10_000):
        used[ticket.tenant] += ticket.cost
        if min(used.values()) > 2000 and sum(used.values()) < 15_000:
            assert abs(used["a"] - used["b"]) <= 2 * max(sizes)


def test_used_tokens_are_settled_at_the_end() -> None:
    queue = queue_of()
    # Both promise the same; the one takes ten times as much.
    tickets = [join(queue, tenant, size=10, expected=90) for _ in range(300) for tenant in "ab"]
    taken: Counter[str] = Counter()
    inside = [ticket for ticket in tickets if ticket.entered]
    while inside and sum(taken.values()) < 20_000:
        ticket = inside.pop()
        used = 1000 if ticket.tenant == "a" else 100
        taken[ticket.tenant] += used
        before = [other for other in tickets if other.entered]
        queue.leave(ticket, used)
        inside += [other for other in tickets if other.entered and other not in before]
    assert 0.6 < taken["a"] / taken["b"] < 1.6


def test_classes_share_by_weight_and_none_starves() -> None:
    queue = queue_of()
    tickets = [join(queue, level, level) for _ in range(400) for level in ("low", "normal", "high")]
    order = [ticket.level for ticket in serve_order(queue, tickets, 210)][1:]
    share = Counter(order)
    assert share["high"] / share["normal"] == pytest.approx(4, rel=0.2)
    assert share["normal"] / share["low"] == pytest.approx(4, rel=0.35)
    # No long wait between two of the lowest.
    places = [place for place, level in enumerate(order) if level == "low"]
    assert max(after - before for before, after in itertools.pairwise(places)) <= 30


def test_an_urgent_request_goes_first() -> None:
    queue = queue_of()
    waiting = [join(queue, f"t{number % 7}", "low") for number in range(100)]
    waiting += [join(queue, f"t{number % 7}") for number in range(100)]
    urgent = join(queue, "vip", "high")
    order = serve_order(queue, [*waiting, urgent], 3)
    assert order[1] is urgent


def test_an_idle_tenant_gets_no_credit() -> None:
    queue = queue_of()
    busy = [join(queue, "busy") for _ in range(200)]
    serve_order(queue, busy, 150)
    fresh = [join(queue, "fresh") for _ in range(100)]
    order = serve_order(queue, [ticket for ticket in busy if not ticket.left] + fresh, 20)
    assert 8 <= sum(ticket.tenant == "fresh" for ticket in order) <= 12


def test_capacity_is_counted_in_completions() -> None:
    queue = queue_of(capacity=4)
    first = queue.join("normal", "a", [1], 3, 1)[0]
    wide = queue.join("normal", "a", [1], 2, 1)[0]
    narrow = queue.join("normal", "a", [1], 1, 1)[0]
    # The wide one keeps its place: what comes behind does not starve it.
    assert (first.entered, wide.entered, narrow.entered) == (True, False, False)
    queue.leave(first, 1)
    assert (wide.entered, narrow.entered) == (True, True)
    # One that is wider than all room comes in alone.
    huge = queue.join("normal", "a", [1], 9, 1)[0]
    queue.leave(wide, 1)
    assert not huge.entered
    queue.leave(narrow, 1)
    assert huge.entered


def test_few_unstarted_prompts_are_admitted() -> None:
    queue = queue_of(capacity=100, max_unstarted=4, unstarted_tokens=50)
    tickets = [join(queue, size=100) for _ in range(10)]
    assert sum(ticket.entered for ticket in tickets) == 4
    queue.started(tickets[0])
    assert sum(ticket.entered for ticket in tickets) == 5
    # Short prompts are let in by their tokens.
    queue = queue_of(capacity=100, max_unstarted=4, unstarted_tokens=50)
    tickets = [join(queue, size=5) for _ in range(20)]
    assert sum(ticket.entered for ticket in tickets) == 10


def test_limits_by_requests_and_by_tokens() -> None:
    queue = queue_of(max_requests=2, max_tokens=1000)
    tickets = [join(queue) for _ in range(3)]
    with pytest.raises(QueueFull, match="max_queue_requests 2"):
        join(queue)
    queue.leave(tickets[2], 0)
    with pytest.raises(QueueFull, match="max_queue_tokens 1000"):
        join(queue, size=990)
    join(queue, size=900)
    assert queue.stats()["rejected"] == 2
    # Who would never fit waits where nobody else does.
    queue = queue_of(max_requests=2, max_tokens=1000)
    running = join(queue)
    alone = queue.join("normal", "a", [5000, 1, 1], 1, 1)
    queue.leave(running, 0)
    assert alone[0].entered


def test_a_cancelled_ticket() -> None:
    queue = queue_of()
    tickets = [join(queue, tenant) for tenant in "abcabc"]
    for ticket in tickets[1:3]:
        queue.leave(ticket, 0)
        queue.leave(ticket, 0)
    assert queue.stats()["waiting"] == 3
    assert serve_order(queue, tickets, 4) == [tickets[0], tickets[4], tickets[5], tickets[3]]
    assert queue.stats() == {
        "waiting": 0,
        "waiting_tokens": 0,
        "waiting_by_class": {"high": 0, "normal": 0, "low": 0},
        "in_engine": 0,
        "in_engine_unstarted": 0,
        "rejected": 0,
        "timed_out": 0,
    }


Events = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "leave", "start"]),
        st.sampled_from(PRIORITIES),
        st.integers(0, 5),
        st.integers(1, 300),
        st.integers(1, 6),
        st.integers(0, 1000),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(Events, st.integers(1, 8), st.integers(1, 4))
def test_counts_hold_for_any_order_of_events(events: list[tuple[Any, ...]], capacity: int, unstarted: int) -> None:
    queue = queue_of(capacity, max_unstarted=unstarted, unstarted_tokens=100)
    live: list[Any] = []
    for what, level, tenant, size, answers, choice in events:
        if what == "join":
            live += queue.join(level, f"t{tenant}", [size] * (1 + choice % 3), answers, answers * 10)
        elif live and what == "leave":
            ticket = live.pop(choice % len(live))
            queue.leave(ticket, choice)
        elif live:
            ticket = live[choice % len(live)]
            if ticket.entered and not ticket.started:
                queue.started(ticket)
        inside = [ticket for ticket in live if ticket.entered]
        waiting = [ticket for ticket in live if not ticket.entered]
        stats = queue.stats()
        assert stats["waiting"] == len(waiting) == sum(stats["waiting_by_class"].values())
        assert stats["waiting_tokens"] == sum(ticket.cost for ticket in waiting)
        assert stats["in_engine"] == sum(ticket.answers for ticket in inside)
        assert stats["in_engine_unstarted"] == sum(not ticket.started for ticket in inside)
        # Never more than there is room for, but for one that is wider than all room; never empty while any wait.
        assert stats["in_engine"] <= capacity or len(inside) == 1
        assert inside or not waiting
        for name in PRIORITIES:
            for number in range(6):
                mine = [ticket for ticket in live if ticket.level == name and ticket.tenant == f"t{number}"]
                ordered = sorted(mine, key=lambda ticket: ticket.number)
                assert [ticket.entered for ticket in ordered] == sorted((t.entered for t in ordered), reverse=True)
    # All get their turn in the end.
    while live:
        entered = [ticket for ticket in live if ticket.entered]
        assert entered
        for ticket in entered:
            queue.leave(ticket, 1)
        live = [ticket for ticket in live if not ticket.left]
    assert queue.stats()["in_engine"] == queue.stats()["waiting"] == 0


def test_operations_stay_fast_with_many_waiting() -> None:
    def seconds(number: int) -> float:
        queue = queue_of(capacity=8)
        tickets = [join(queue, f"t{index % 500}", PRIORITIES[index % 3]) for index in range(number)]
        began = time.perf_counter()
        for _ in range(2000):
            # The longest that waits, one of the middle, and a new one.
            queue.leave(tickets.pop(), 0)
            queue.leave(tickets.pop(len(tickets) // 2), 0)
            running = next(ticket for ticket in tickets if ticket.entered)
            tickets.remove(running)
            queue.leave(running, 1)
            tickets += [join(queue, f"t{index}") for index in range(3)]
        return time.perf_counter() - began

    few = min(seconds(3_000) for _ in range(3))
    assert min(seconds(60_000) for _ in range(2)) < few * 5


# ---------------------------------------------------------------- what belongs to it


def test_concurrency_of_a_key() -> None:
    concurrency = ConcurrencyLimit()
    alice, bob = (Identity(name=name, tenant="t") for name in ("alice", "bob"))
    concurrency.enter(alice, 2)
    concurrency.enter(alice, 2)
    with pytest.raises(ConcurrencyExceeded, match="max_concurrency 2"):
        concurrency.enter(alice, 2)
    concurrency.enter(bob, 2)
    concurrency.leave(alice)
    concurrency.enter(alice, 2)
    for identity in (alice, alice, bob):
        concurrency.leave(identity)
    assert concurrency._running == {}


@pytest.mark.parametrize(
    ("best", "asked", "given"),
    [
        ("high", None, "normal"),
        ("high", "high", "high"),
        ("high", "LOW", "low"),
        ("high", -5, "high"),
        ("high", 5, "low"),
        ("high", "-1", "high"),
        ("high", "0", "normal"),
        ("normal", "high", "normal"),
        ("normal", -100, "normal"),
        ("low", "normal", "low"),
        ("low", 1, "low"),
    ],
)
def test_the_class_of_a_request(best: str, asked: str | int | None, given: str) -> None:
    identity = Identity(name="a", tenant="a", priority="normal", best_priority=best)
    assert priority_class(identity, asked, "priority") == given


def test_an_invalid_class() -> None:
    for asked in ("urgent", "1.5", "x" * 1000):
        with pytest.raises(InvalidRequest, match="X-Priority") as caught:
            priority_class(ANONYMOUS, asked, "X-Priority")
        assert len(str(caught.value)) < 200


def test_engine_priority_stays_within_the_class() -> None:
    assert engine_priority("high", -7) == -7
    assert engine_priority("high", 0) == -1
    assert engine_priority("normal", -7) == 0
    assert engine_priority("low", -7) == 1
    assert engine_priority("low", 9) == 9


def test_salts() -> None:
    alice, bob = (Identity(name=name, tenant="same") for name in ("alice", "bob"))
    salts = [cache_salt(identity, salt, shared=False) for identity in (alice, bob) for salt in ("", "x", "y")]
    assert len(set(salts)) == 6
    assert all(0 < len(salt) <= 128 for salt in salts)
    assert salts == [cache_salt(identity, salt, shared=False) for identity in (alice, bob) for salt in ("", "x", "y")]
    # No salt of one key makes it another's.
    assert cache_salt(alice, "", shared=False) not in {
        cache_salt(bob, salt, shared=False) for salt in ("alice", "alice\1")
    }
    assert cache_salt(alice, "x", shared=True) == "x" == cache_salt(ANONYMOUS, "x", shared=False)


def test_a_ticket_admitted_while_its_waiter_leaves() -> None:
    async def run() -> None:
        queue = queue_of()
        first, second, third = (join(queue) for _ in range(3))
        waiting = asyncio.ensure_future(queue.turn(second))
        await asyncio.sleep(0)
        queue.leave(first, 1)
        assert second.entered
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        queue.leave(second, 1)
        assert third.entered
        queue.leave(third, 1)
        assert queue.stats()["in_engine"] == 0

    asyncio.run(run())
