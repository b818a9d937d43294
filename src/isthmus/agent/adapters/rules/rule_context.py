"""`RuleContext`: what a rule of the conformance kit works with; `ContractError`."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from isthmus.agent.adapters.scheduler_adapter import (
    Hold,
    HoldRequest,
    RankNeed,
    RankStart,
    SchedulerAdapter,
    SchedulerLook,
    WorkerStatus,
)

MakeAdapter = Callable[[Sequence[str]], SchedulerAdapter]
"""Factory: takes a worker command (the folder is appended) and returns a new adapter of the same site."""

RECORD_START = 'echo started >> "$1/starts"; '
LOOP_FOREVER = "while :; do sleep 0.1; done"
LEASE_S = 60.0
"""Lease of holds that no rule lets expire."""
_POLL_S = 0.02


class ContractError(Exception):
    """An adapter violates the contract of `SchedulerAdapter`; the message is the violated rule."""


class SchedulerFaults(Protocol):
    """How a test breaks the scheduler behind an adapter, for the rules of faults."""

    def kill(self) -> None:
        """End the scheduler at once, as SIGKILL does."""

    def restart(self) -> None:
        """Start it again after `kill`, from what it had saved; return when it answers."""


def require_rule(holds: bool, rule: str) -> None:
    """Raise `ContractError(rule)` unless `holds`."""
    if not holds:
        raise ContractError(rule)


class RuleContext:
    """Context of one rule: the adapter factory, one worker folder, holds that end with the rule, and waits."""

    def __init__(
        self, make: MakeAdapter, folder: Path, timeout_s: float, faults: SchedulerFaults | None = None
    ) -> None:
        self._make, self.folder, self.timeout_s, self._faults = make, folder, timeout_s, faults
        self._requests: list[HoldRequest] = []

    @property
    def faults(self) -> SchedulerFaults:
        """How to break the scheduler; only for the rules of faults."""
        if self._faults is None:
            raise ContractError("rules of faults need a scheduler that can be broken")
        return self._faults

    def adapter(self, program: str = "exit 0") -> SchedulerAdapter:
        """Return a new adapter whose workers record their start, then run `program`."""
        return self._make(("sh", "-c", RECORD_START + program, "stand-in"))

    def subfolder(self, name: str) -> Path:
        """Return a new worker folder beside the first."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        return folder

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true; raise `ContractError` with `what` on timeout."""
        deadline = time.monotonic() + self.timeout_s
        while not condition():
            require_rule(time.monotonic() < deadline, f"{what}, within {self.timeout_s:g} s")
            time.sleep(_POLL_S)

    def poll(self, adapter: SchedulerAdapter, folder: Path | None = None) -> WorkerStatus:
        """Return a worker's status after one look at the scheduler."""
        adapter.observe()
        return adapter.poll(folder or self.folder)

    def wait_exited(self, adapter: SchedulerAdapter, folder: Path | None = None) -> WorkerStatus:
        """Wait until the worker has exited; return its status."""
        what = "a worker whose program ended is reported as exited"
        self.wait(what, lambda: self.poll(adapter, folder).state == "exited")
        return adapter.poll(folder or self.folder)

    def wait_started(self, folder: Path | None = None) -> None:
        """Wait until the program has recorded its start."""
        self.wait("a started worker runs its program", lambda: self.num_starts_of(folder or self.folder) == 1)

    def wait_for(self, name: str, folder: Path | None = None) -> None:
        """Wait until the program has written the file `name`."""
        self.wait(f"the program has written '{name}'", ((folder or self.folder) / name).exists)

    @property
    def num_starts(self) -> int:
        """Number of times the program was started."""
        return self.num_starts_of(self.folder)

    def num_starts_of(self, folder: Path) -> int:
        """Return how often the program of `folder` was started."""
        file = folder / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def request(self, num_ranks: int = 1, *, num_cards: int = 1, lease_s: float = LEASE_S) -> HoldRequest:
        """Return a request with a new id for ranks of the first node group; it is released when the rule ends."""
        group = next(iter(self.adapter().observe().cards()))
        need = RankNeed(node_group=group, num_cards=num_cards)
        request = HoldRequest(
            id=uuid.uuid4().hex, job="kit", attempt=1, ranks=(need,) * num_ranks, lease_s=lease_s
        )  # fmt: skip
        self._requests.append(request)
        return request

    def granted(self, adapter: SchedulerAdapter, request: HoldRequest) -> Hold:
        """Hold until the request is granted; return the hold."""
        self.wait("free cards are granted", lambda: adapter.hold(request).state == "granted")
        return adapter.hold(request)

    def rank(self, adapter: SchedulerAdapter, folder: Path | None = None, command: Sequence[str] = ()) -> RankStart:
        """Return the start of a worker on one card, which is held where the scheduler holds cards."""
        where = folder or self.folder
        if adapter.capabilities.holds != "scheduler":
            cards = next(iter(adapter.observe().cards().values()))[:1]
            return RankStart(folder=where, cards=cards, command=tuple(command))
        request = self.request()
        (cards,) = self.granted(adapter, request).cards
        adapter.commit(request)
        return RankStart(folder=where, cards=cards, command=tuple(command), hold=request.id)

    def start(self, adapter: SchedulerAdapter, folder: Path | None = None, command: Sequence[str] = ()) -> RankStart:
        """Start a worker on one card; return what was started."""
        rank = self.rank(adapter, folder, command)
        adapter.start(rank)
        return rank

    def num_free(self, observed: SchedulerLook) -> int:
        """Return how many cards neither a hold of this agent nor a job of others has."""
        taken = {card for hold in observed.holds for cards in hold.cards for card in cards}
        taken |= {card for job in observed.foreign for card in job.cards}
        return len({card for cards in observed.cards().values() for card in cards} - taken)

    def close(self) -> None:
        """Release the holds of the rule."""
        for request in self._requests:
            self.adapter().release(request.id)


def is_running(pid: int) -> bool:
    """Return whether process `pid` runs; zombies do not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
