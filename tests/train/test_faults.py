"""Rules of faults: a rank that dies is replaced, a step is lost at most, the losses are as undisturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._fault_kinds import STEPS, Fault
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.train.liveness.heartbeat import Heartbeat, HeartbeatReading
from isthmus.train.liveness.stall import FROZEN_AFTER_S, detect_stall
from isthmus.train.liveness.straggler import NUM_CONSECUTIVE, StragglerDetector
from isthmus.train.liveness.worker_events import EventLog, read_events

SAMPLED = [6, 12, 33]
"""All killed, killed while a checkpoint is written, killed twice at the end."""

WHOLE = [*SAMPLED, 0, 8, 18]
"""And killed once at the end, a supervisor killed (as `tests/e2e/test_whole_way.py` does), twice as the ranks meet."""


@pytest.mark.slow
def test_faults_by_seed_end_with_the_undisturbed_losses(whole: bool) -> None:
    """A sample of `python -m benchmarks.faults`: each run ends with the same bits, or with the reason."""
    command = [sys.executable, "-m", "benchmarks.faults", "--only", *map(str, WHOLE if whole else SAMPLED), "--json"]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["met"], done.stderr


def reading(**changes: float) -> HeartbeatReading:
    """Return what a healthy rank in the midst of a step of 1 s says at the time 100 s."""
    values = {
        "incarnation": 0,
        "last_beat_s": 99.9,
        "step": 3,
        "busy_since_s": 99.5,
        "median_step_s": 1.0,
        "is_finished": False,
    }
    return HeartbeatReading(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "kind", "hopeless"),
    [
        ({}, None, False),
        ({"last_beat_s": 100 - FROZEN_AFTER_S - 0.1}, "frozen", False),
        ({"last_beat_s": 70, "step": -1}, "frozen", True),
        ({"busy_since_s": 94}, "stalled", False),
        ({"busy_since_s": 70}, "stalled", True),
        ({"busy_since_s": 94, "median_step_s": 2.0}, None, False),
        ({"busy_since_s": 10, "median_step_s": 0}, None, False),
        ({"busy_since_s": 10, "step": -1}, None, False),
    ],
)
def test_who_does_not_get_on_is_told_of_and_in_the_end_replaced(
    changes: dict[str, float], kind: str | None, hopeless: bool
) -> None:
    """No sign of life counts always; work in one step only beside what is usual, and never without it."""
    stall = detect_stall(reading(**changes), 100.0)
    assert (stall and stall.kind, bool(stall and stall.needs_restart)) == (kind, hopeless)


def test_a_pulse_says_what_the_rank_does() -> None:
    """A supervisor sees incarnation, step, who is waited for, and what is forgotten when a process begins."""
    pulse = Heartbeat()
    assert (pulse.read().incarnation, pulse.read().step, pulse.read().is_finished) == (-1, -1, False)
    pulse.set_incarnation(2)
    pulse.begin_step(7)
    began_s = pulse.read().busy_since_s
    pulse.beat(waiting=True)
    assert pulse.read().busy_since_s >= began_s
    assert (pulse.read().incarnation, pulse.read().step) == (2, 7)
    pulse.end_step()
    assert pulse.read().step == -1
    assert pulse.read().median_step_s > 0
    pulse.set_finished()
    pulse.start_process()
    assert (pulse.read().incarnation, pulse.read().median_step_s, pulse.read().is_finished) == (2, 0, True)


def test_a_slow_time_is_told_of_once_when_it_begins_and_ends() -> None:
    """Single slow steps are not reported; the plan's time counts until the rank has a history of its own."""
    pace = StragglerDetector(planned_s=1.0)
    assert [pace.add_step(1.0) for _ in range(10)] == [None] * 10
    assert pace.add_step(9.0) is None
    assert pace.add_step(1.0) is None
    told = [pace.add_step(2.0) for _ in range(8)]
    assert [bool(one) for one in told] == [place == NUM_CONSECUTIVE - 1 for place in range(8)]
    assert "2.0 times its median time" in str(told[NUM_CONSECUTIVE - 1])
    told = [pace.add_step(1.0) for _ in range(5)]
    assert [bool(one) for one in told] == [place == NUM_CONSECUTIVE - 1 for place in range(5)]
    early = StragglerDetector(planned_s=1.0)
    assert "the plan's time" in str([early.add_step(3.0) for _ in range(NUM_CONSECUTIVE)][-1])


def test_events_are_for_people_and_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line in the log, one object in the file; both name the rank."""
    folder = WorkerFolder(tmp_path)
    EventLog(folder, 2).record("cut", "no data from rank 1: silent", peer=1)
    assert capsys.readouterr().out == "rank 2 cut: no data from rank 1: silent\n"
    (event,) = read_events(folder)
    assert (event.rank, event.kind, event.peer, event.seconds) == (2, "cut", 1, None)


def test_faults_are_drawn_by_seed() -> None:
    """The same seed is the same fault, and 200 of them hit every rank, at every point, in every way."""
    faults = [Fault.of(seed) for seed in range(200)]
    assert faults == [Fault.of(seed) for seed in range(200)]
    assert {one.rank for one in faults} == {0, 1, 2}
    assert {one.point for one in faults} == {"start", "step", "checkpoint", "end"}
    assert len({one.kind for one in faults}) == 9
    assert all(0 <= one.step < STEPS for one in faults)
