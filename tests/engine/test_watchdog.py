"""What counts as a hang, look by look, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from octavo.engine.heartbeat import Heartbeat, Phase
from octavo.engine.watchdog import ProcessLook, RestartPolicy, Watchdog, look_at

POLICY = RestartPolicy(stall_s=4.0, step_limit_s=20.0, stopped_s=2.0)
TICK = POLICY.interval_s


class Looks:
    """Looks at a made-up process, one every interval."""

    def __init__(self) -> None:
        self.watchdog = Watchdog(POLICY)
        self.now = 100.0
        self.cpu_s = 7.0

    def look(
        self,
        seconds: float,
        state: str = "S",
        phase: Phase = Phase.LAUNCH,
        steps: int = 3,
        busy: float = 0.0,
        computes: bool = True,
    ) -> tuple[float, str] | None:
        """Looks for so long; when something was wrong, and what."""
        for count in range(round(seconds / TICK)):
            verdict = self.watchdog.look(self.now, ProcessLook(state, self.cpu_s), phase, steps, computes=computes)
            if verdict is not None:
                return count * TICK, verdict
            self.now += TICK
            self.cpu_s += busy * TICK
        return None


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.LOADING, Phase.STARTING, Phase.HELD])
def test_a_worker_that_has_nothing_to_do_may_do_nothing(phase: Phase) -> None:
    assert Looks().look(1000, phase=phase) is None


@pytest.mark.parametrize("phase", [Phase.RECEIVE, Phase.PLAN, Phase.LAUNCH, Phase.WAIT, Phase.COMMIT, Phase.SEND])
def test_a_step_that_stands_still_is_a_hang_in_any_part(phase: Phase) -> None:
    found = Looks().look(10, phase=phase)
    assert found is not None
    assert 4 <= found[0] <= 5
    assert f"step 4, {phase.name.lower()}" in found[1]


def test_computing_is_no_hang_on_a_cpu_and_no_excuse_on_a_gpu() -> None:
    looks = Looks()
    assert looks.look(18, busy=1.5) is None
    found = looks.look(10, busy=1.5)
    assert found is not None
    assert "more than 20 s for one step" in found[1]
    assert Looks().look(18, state="D") is None
    found = Looks().look(10, busy=1.0, computes=False)
    assert found is not None
    assert 4 <= found[0] <= 5


def test_each_step_and_each_phase_begins_anew() -> None:
    looks = Looks()
    for steps in range(20):
        assert looks.look(3, steps=steps) is None
        assert looks.look(3, steps=steps, phase=Phase.WAIT) is None
    # What was busy for a while and then stands still has its time from then on.
    assert looks.look(3.5, steps=20) is None
    assert looks.look(1, steps=20, busy=1.0) is None
    assert looks.look(3.5, steps=20) is None
    assert looks.look(1.5, steps=20) is not None


def test_a_stopped_process_is_found_whatever_it_does_and_a_traced_one_is_not() -> None:
    for phase in (Phase.IDLE, Phase.LOADING, Phase.LAUNCH):
        found = Looks().look(10, state="T", phase=phase)
        assert found is not None
        assert 2 <= found[0] <= 3
        assert "stopped by a signal" in found[1]
    looks = Looks()
    for _ in range(10):
        assert looks.look(1.5, state="T", phase=Phase.IDLE) is None
        assert looks.look(0.5, phase=Phase.IDLE) is None
    assert looks.look(60, state="t", phase=Phase.IDLE) is None


def test_time_in_which_nobody_looked_does_not_count() -> None:
    looks = Looks()
    assert looks.look(1) is None
    # The laptop's lid was closed, or this process was stopped too.
    looks.now += 3600
    assert looks.look(1) is None
    found = looks.look(10)
    assert found is not None
    assert found[0] >= 1
    assert looks.watchdog.look(looks.now, None, Phase.LAUNCH, 3, computes=True) is None


def test_a_look_at_a_process_says_what_the_kernel_knows() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        first = look_at(child.pid)
        time.sleep(0.5)
        second = look_at(child.pid)
        assert first is not None
        assert second is not None
        assert second.state == "R"
        assert second.cpu_s > first.cpu_s
        child.send_signal(19)
        deadline = time.monotonic() + 5
        while (look := look_at(child.pid)) is None or look.state != "T":
            assert time.monotonic() < deadline
    finally:
        child.kill()
        child.wait()
    assert look_at(child.pid) is None


def test_another_process_reads_the_heartbeat() -> None:
    heartbeat, descriptor = Heartbeat.create()
    code = (
        "import sys, time; from octavo.engine.heartbeat import Phase, Heartbeat\n"
        "heartbeat = Heartbeat(int(sys.argv[1]))\n"
        "heartbeat.enter(Phase.PLAN); time.sleep(0.05); heartbeat.enter(Phase.LAUNCH); heartbeat.count_step()"
    )
    try:
        subprocess.run([sys.executable, "-c", code, str(descriptor)], pass_fds=(descriptor,), check=True, timeout=30)
    finally:
        os.close(descriptor)
    assert (heartbeat.phase, heartbeat.steps) == (Phase.LAUNCH, 1)
    assert 0.05 <= heartbeat.seconds(Phase.PLAN) < 5
    heartbeat.close()
    heartbeat.close()
