"""`FaultyHolds`: a run of random steps on a real scheduler with seeded faults, and the rules that hold all the time.

A hold is asked for again until it is granted or used up, as the agent does it. Whatever happens, no card is in two
holds, a hold has all its cards or none, no program runs twice, and in the end nothing is left.
"""

from __future__ import annotations

import random
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest, RankNeed, RankStart, SchedulerAdapter
from isthmus.core.errors import UnavailableError

PROGRAM = ("sh", "-c", 'echo started >> "$1/starts"; while :; do sleep 0.2; done', "worker")
"""Notes each of its starts, and goes on until it is stopped."""


class FaultyHolds(ABC):
    """Holds and workers of one run; `steps` is its story, `problems` what broke a rule."""

    NEEDS: tuple[tuple[int, int], ...]
    """Cards of a rank and number of ranks, of which each request draws one."""

    SETTLE_S: float
    ERRORS: tuple[type[Exception], ...]
    """What the scheduler may answer with while the run waits."""

    num_faults: int

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.wanted: dict[str, HoldRequest] = {}
        self.workers: dict[Path, RankStart] = {}
        self.steps: list[str] = []
        self.problems: Counter[str] = Counter()
        self.longest_hold_s = 0.0
        self.adapter = self.new_adapter()

    @abstractmethod
    def run(self, num_steps: int) -> None:
        """Do `num_steps` things, then give everything up."""

    @abstractmethod
    def new_adapter(self) -> SchedulerAdapter:
        """Return the adapter of an agent that knows nothing."""

    @abstractmethod
    def acts(self) -> tuple[Callable[[], None], ...]:
        """Return what a step draws from."""

    @abstractmethod
    def left(self) -> object:
        """Return what the scheduler still has, falsy if nothing."""

    def step(self, act: Callable[[], None] | None = None) -> bool:
        """Do `act`, or one thing at random; what the scheduler does not answer is done again later.

        Return whether it answered.
        """
        act = act or self.rng.choice(self.acts())
        self.steps.append(act.__name__)
        try:
            act()
            self.look()
        except UnavailableError as error:
            self.steps.append(str(error))
            return False
        return True

    def ask(self) -> None:
        if len(self.wanted) < 3:
            request = self.new_request()
            self.wanted[request.id] = request
        for request in list(self.wanted.values()):
            if self.answer(request).state == "ended":
                del self.wanted[request.id]

    def new_request(self) -> HoldRequest:
        num_cards, num_ranks = self.rng.choice(self.NEEDS)
        ranks = (RankNeed(node_group="h20", num_cards=num_cards),) * num_ranks
        name = uuid.UUID(int=self.rng.getrandbits(128)).hex
        return HoldRequest(id=name, job="f", attempt=1, ranks=ranks, lease_s=60)

    def answer(self, request: HoldRequest) -> Hold:
        return self.rng.choice((self.adapter.hold, self.adapter.commit))(request)

    def release(self) -> None:
        if self.wanted:
            self.adapter.release(self.wanted.pop(self.rng.choice(sorted(self.wanted))).id)

    def start(self) -> None:
        """Start every rank of every granted hold."""
        for request in list(self.wanted.values()):
            hold = self.adapter.hold(request)
            for number, cards in enumerate(hold.cards):
                folder = self.folder / f"worker-{request.id}-{number}"
                folder.mkdir(exist_ok=True)
                self.workers[folder] = RankStart(folder=folder, cards=cards, hold=request.id)
                self.adapter.start(self.workers[folder])

    def forget(self) -> None:
        """Be a new agent process."""
        self.adapter = self.new_adapter()

    def look(self) -> None:
        """Check what must hold at any time."""
        holds = self.adapter.observe().holds
        cards = Counter(card for hold in holds for rank in hold.cards for card in rank)
        self.problems["a card in two holds"] += any(num > 1 for num in cards.values())
        for hold in holds:
            known = self.wanted.get(hold.id)
            if hold.state == "granted" and known is not None:
                whole = [len(rank) for rank in hold.cards] == [need.num_cards for need in known.ranks]
                self.problems["a hold of some of its cards"] += not whole
        for folder in self.workers:
            starts = folder / "starts"
            self.problems["started twice"] += starts.exists() and len(starts.read_text().splitlines()) > 1

    def settle(self) -> None:
        """Without further faults: every hold is whole or used up, every worker of a held one runs once."""
        if not self.wait(self.is_settled):
            self.problems["lost or half-started"] += 1
        self.look()

    def is_settled(self) -> bool:
        for request in list(self.wanted.values()):
            hold = self.adapter.hold(request)
            if hold.state == "ended":
                del self.wanted[request.id]
            elif hold.state == "waiting" and not self.adapter.observe().holds:
                return False
        held = {hold.id for hold in self.adapter.observe().holds}
        for hold_id in held - self.wanted.keys():
            self.adapter.release(hold_id)
        live = [one for one in self.workers.values() if one.hold in held and one.hold in self.wanted]
        live = [one for one in live if self.may_start(one)]
        for start in live:
            self.adapter.start(start)
        ended = [one for one in self.workers.values() if one.hold not in self.wanted]
        return all((one.folder / "starts").exists() for one in live) and all(
            self.adapter.poll(one.folder).state != "running" for one in ended
        )

    def may_start(self, worker: RankStart) -> bool:
        """Return whether a worker of a hold that lasts is to run."""
        return True

    def end(self) -> None:
        """Give everything up; measure until nothing is left, which may take no hold longer than its lease."""
        begun_s = time.monotonic()
        if not self.wait(self.is_empty):
            self.problems[f"left behind: {self.left()}"] += 1
        self.longest_hold_s = time.monotonic() - begun_s

    def is_empty(self) -> bool:
        for folder in self.workers:
            self.adapter.stop(folder, force=True)
        for hold_id in [*self.wanted, *(hold.id for hold in self.adapter.observe().holds)]:
            self.adapter.release(hold_id)
        running = [one for one in self.workers if self.adapter.poll(one).state == "running"]
        return not running and not self.left()

    def wait(self, happened: Callable[[], bool]) -> bool:
        """Wait until something happened, with errors of the scheduler on the way; return whether it did in time."""
        deadline_s = time.monotonic() + self.SETTLE_S
        while time.monotonic() < deadline_s:
            try:
                if happened():
                    return True
            except self.ERRORS as error:
                self.steps.append(str(error))
            time.sleep(0.1)
        return False
