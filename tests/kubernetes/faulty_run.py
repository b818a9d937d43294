"""`FaultyRun`: a run of random steps on a real API server with seeded faults, and the rules that hold all the time.

Faults: replies that are lost after what they answer was done, the API server killed, with and without a compaction of
its log, agents that forget everything. A hold is asked for again until it is granted or used up, as the agent does it.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest, RankNeed, RankStart
from isthmus.core.errors import UnavailableError
from tests.kubernetes.clusters import RealCluster

PROGRAM = ("sh", "-c", 'echo started >> "$1/starts"; while :; do sleep 0.1; done', "worker")
SETTLE_S = 90.0


class FaultyRun:
    """Holds and workers of one run; `steps` is its story, `problems` what broke a rule."""

    def __init__(self, cluster: RealCluster, folder: Path, seed: int) -> None:
        self.cluster, self.folder, self.rng = cluster, folder, random.Random(seed)
        self.adapter = cluster.adapter(PROGRAM)
        self.wanted: dict[str, HoldRequest] = {}
        self.workers: dict[Path, RankStart] = {}
        self.steps: list[str] = []
        self.problems: Counter[str] = Counter()
        self.num_kills, self.longest_hold_s = 0, 0.0

    @property
    def num_faults(self) -> int:
        """How often the server was killed, and how many of its replies were lost."""
        return self.num_kills + self.cluster.replies.num_lost

    def run(self, num_steps: int) -> None:
        """Do `num_steps` things at random, with a kill among them, then give everything up without further faults."""
        for number in range(num_steps):
            self.step("kill" if number == num_steps // 2 else "")
        self.cluster.replies.stop()
        self.settle()
        self.end()

    def step(self, act_name: str = "") -> None:
        """Do one thing; what the server does not answer is done again later."""
        acts = (self.ask, self.ask, self.release, self.start, self.start, self.forget)
        act = getattr(self, act_name) if act_name else self.rng.choice(acts)
        self.steps.append(act.__name__)
        try:
            act()
            self.look()
        except UnavailableError as error:
            self.steps.append(str(error))

    def ask(self) -> None:
        if len(self.wanted) < 3:
            num_cards, num_ranks = self.rng.choice(((1, 2), (2, 1), (4, 1)))
            request = HoldRequest(
                id=uuid.UUID(int=self.rng.getrandbits(128)).hex, job="f", attempt=1, lease_s=60,
                ranks=(RankNeed(node_group="h20", num_cards=num_cards),) * num_ranks,
            )  # fmt: skip
            self.wanted[request.id] = request
        for request in list(self.wanted.values()):
            if self.answer(request).state == "ended":
                del self.wanted[request.id]

    def answer(self, request: HoldRequest) -> Hold:
        return self.rng.choice((self.adapter.hold, self.adapter.commit))(request)

    def release(self) -> None:
        if self.wanted:
            hold_id = self.rng.choice(sorted(self.wanted))
            self.adapter.release(hold_id)
            del self.wanted[hold_id]

    def start(self) -> None:
        for request in list(self.wanted.values()):
            hold = self.adapter.hold(request)
            for number, cards in enumerate(hold.cards):
                folder = self.folder / f"worker-{request.id}-{number}"
                folder.mkdir(exist_ok=True)
                self.workers[folder] = RankStart(folder=folder, cards=cards, hold=request.id)
                self.adapter.start(self.workers[folder])

    def forget(self) -> None:
        self.adapter = self.cluster.adapter(PROGRAM)

    def kill(self) -> None:
        """End the API server in the middle of what goes on, and start it again; half the times with an empty log."""
        self.num_kills += 1
        self.cluster.kill()
        for folder in self.workers:
            self.adapter.poll(folder)
        if self.rng.random() < 0.5:
            self.cluster.server.compact()
        self.cluster.restart()

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
        """Every hold that fits is granted or used up, and every worker of a granted one runs."""
        if not self.wait(self.is_settled):
            self.problems["lost or half-started"] += 1

    def is_settled(self) -> bool:
        self.look()
        for request in list(self.wanted.values()):
            hold = self.adapter.hold(request)
            if hold.state == "ended":
                del self.wanted[request.id]
            elif hold.state == "waiting" and not self.adapter.observe().holds:
                return False
        held = {hold.id: hold for hold in self.adapter.observe().holds}
        for hold_id in held.keys() - self.wanted.keys():
            self.adapter.release(hold_id)
        live = [one for one in self.workers.values() if one.hold in held and one.hold in self.wanted]
        live = [one for one in live if self.adapter.poll(one.folder).state != "exited"]
        for start in live:
            self.adapter.start(start)
        ended = [one for one in self.workers.values() if one.hold not in self.wanted]
        return all((one.folder / "starts").exists() for one in live) and all(
            self.adapter.poll(one.folder).state != "running" for one in ended
        )

    def end(self) -> None:
        """Give everything up; measure until nothing is left."""
        begun_s = time.monotonic()
        for folder in self.workers:
            self.adapter.stop(folder, force=True)
        if not self.wait(self.is_empty):
            self.problems[f"left behind: {self.cluster.left()}"] += 1
        self.longest_hold_s = time.monotonic() - begun_s

    def is_empty(self) -> bool:
        for hold_id in [*self.wanted, *(hold.id for hold in self.adapter.observe().holds)]:
            self.adapter.release(hold_id)
        running = [one for one in self.workers if self.adapter.poll(one).state == "running"]
        return not running and not self.cluster.left()

    def wait(self, happened: Callable[[], bool]) -> bool:
        """Wait until something happened; return whether it did in time."""
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            try:
                if happened():
                    return True
            except (UnavailableError, httpx.HTTPError) as error:
                self.steps.append(str(error))
            time.sleep(0.2)
        return False
