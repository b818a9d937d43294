"""Faults by seed: which fault hits which rank at which point of a run, and how the run must end."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks._fault_run import RANKS, FaultRun, below, run_of
from isthmus.core.errors import PeerError
from isthmus.core.job import Job

STEPS = 10

_KINDS = {
    "kill": 8, "segfault": 2, "kill two": 3, "kill all": 1, "kill again": 4, "stop": 2, "cut": 3, "hold": 2,
    "kill supervisor": 2,
}  # fmt: skip
"""What may happen, and how often beside the others."""

_POINTS = {"start": 2, "step": 8, "checkpoint": 3, "end": 3}
"""When: before the first step, in one, while a checkpoint is written, or while the model is."""


@dataclass(frozen=True)
class Fault:
    """`kind` hits `rank` (and `other`) `delay_s` after `point`, for `lasts_s` or again after that."""

    seed: int
    kind: str
    point: str
    step: int
    rank: int
    other: int
    delay_s: float
    lasts_s: float

    @classmethod
    def of(cls, seed: int) -> Fault:
        """Draw the fault of a seed."""
        chance = random.Random(seed)
        rank, other = chance.sample(range(RANKS), 2)
        return cls(
            seed=seed,
            kind=chance.choices(list(_KINDS), list(_KINDS.values()))[0],
            point=chance.choices(list(_POINTS), list(_POINTS.values()))[0],
            step=chance.randrange(STEPS - 1),
            rank=rank,
            other=other,
            delay_s=chance.uniform(0, 0.05),
            lasts_s=chance.uniform(0, 1.5),
        )

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.kind} at {self.point} {self.step}, rank {self.rank}"

    def strike(self, run: FaultRun) -> None:
        """Wait for the point, and do it."""
        self._wait(run)
        time.sleep(self.delay_s)
        strikes: dict[str, Callable[[], None]] = {
            "kill": lambda: self._signal(run, (self.rank,), signal.SIGKILL),
            "segfault": lambda: self._signal(run, (self.rank,), signal.SIGSEGV),
            "kill two": lambda: self._signal(run, (self.rank, self.other), signal.SIGKILL),
            "kill all": lambda: self._signal(run, range(RANKS), signal.SIGKILL),
            "kill again": lambda: self._again(run),
            "stop": lambda: self._stop(run),
            "cut": run.relay.cut,
            "hold": lambda: self._hold(run),
            "kill supervisor": lambda: os.kill(run.pids[self.rank], signal.SIGKILL),
        }
        with suppress(ProcessLookupError):
            strikes[self.kind]()

    def _wait(self, run: FaultRun) -> None:
        if self.point == "start":
            time.sleep(self.lasts_s / 3)
        elif self.point == "step":
            run.wait_for_step(self.step)
        elif self.point == "checkpoint":
            run.wait_for_step(self.step // 4 * 4 + 3 if self.step < 4 else 3)
        else:
            run.wait_for_step(STEPS - 1)

    def _again(self, run: FaultRun) -> None:
        """Kill, and kill the same or another while the ranks rendezvous again."""
        self._signal(run, (self.rank,), signal.SIGKILL)
        time.sleep(self.lasts_s / 2)
        self._signal(run, (self.other if self.seed % 2 else self.rank,), signal.SIGKILL)

    def _stop(self, run: FaultRun) -> None:
        pid = self._victim(run, self.rank)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * self.lasts_s)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _victim(self, run: FaultRun, rank: int) -> int | None:
        """Return a rank's process; under an odd seed that of its transport, where it has one."""
        carrier = run.carrier(rank) if self.seed % 2 else None
        return carrier or run.worker(rank)

    def _signal(self, run: FaultRun, ranks: Sequence[int], number: signal.Signals) -> None:
        for rank in ranks:
            pid = self._victim(run, rank)
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _hold(self, run: FaultRun) -> None:
        run.relay.flowing.clear()
        time.sleep(2 * self.lasts_s)
        run.relay.flowing.set()


def outcome(fault: Fault, job: Job, folder: Path, undisturbed: dict[int, float]) -> str:
    """Run `job` with the fault, and again where that ends it; return what is wrong, if anything."""
    own = below(job, folder)
    with run_of(folder, own) as run:
        fault.strike(run)
        statuses = run.end()
        first = run.losses()
        if statuses == [0] * RANKS:
            return "" if first == undisturbed else f"another loss curve: {run.story()}"
        wrong = _unclear(fault, run, statuses)
    if wrong:
        return wrong
    with run_of(folder, own, attempt=2) as second:
        statuses, losses = second.end(), first | second.losses()
        ended = statuses == [0] * RANKS and all(first.get(s, losses[s]) == losses[s] for s in losses)
        return "" if ended and losses == undisturbed else f"the next attempt: {second.story()}"


def _unclear(fault: Fault, run: FaultRun, statuses: list[int]) -> str:
    """Return what is wrong with how a run was ended: only without a supervisor, and with the reason."""
    if fault.kind != "kill supervisor":
        return f"it ended: {run.story()}"
    for rank, status in enumerate(statuses):
        said = run.log(rank).splitlines()[-1:]
        if (
            rank != fault.rank
            and status != 0
            and not (status == PeerError.exit_code and said and said[0].startswith("error: PeerError: "))
        ):
            return f"rank {rank} gives no reason: {run.story()}"
    return ""
