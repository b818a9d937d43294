"""Seeded faults on a real API server: nothing of a hold or a worker is lost, doubled, half there or left behind."""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest

from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest, RankNeed, RankStart
from isthmus.core.errors import UnavailableError
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.clusters import RealCluster

PROGRAM = ("sh", "-c", 'echo started >> "$1/starts"; while :; do sleep 0.1; done', "worker")
NUM_WHOLE, NUM_SHORT = 200, 4
STEPS = 12


class FaultyRun:
    """Holds and workers of one run of random steps; `steps` is its story."""

    def __init__(self, cluster: RealCluster, folder: Path, seed: int) -> None:
        self.cluster, self.folder, self.rng = cluster, folder, random.Random(seed)
        self.adapter = cluster.adapter(PROGRAM)
        self.wanted: dict[str, HoldRequest] = {}
        self.workers: dict[Path, str] = {}
        self.steps: list[str] = []
        self.num_kills = 0

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
                self.workers[folder] = request.id
                self.adapter.start(RankStart(folder=folder, cards=cards, hold=request.id))

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
        assert all(num == 1 for num in cards.values()), f"cards in two holds: {cards}, {self.steps}"
        for hold in holds:
            known = self.wanted.get(hold.id)
            if hold.state == "granted" and known is not None:
                assert [len(rank) for rank in hold.cards] == [need.num_cards for need in known.ranks], self.steps
        for folder in self.workers:
            starts = folder / "starts"
            assert not starts.exists() or len(starts.read_text().splitlines()) <= 1, f"started twice: {self.steps}"

    def end(self) -> None:
        """Give everything up; nothing may be left."""
        deadline_s = time.monotonic() + 90
        for folder in self.workers:
            self.adapter.stop(folder, force=True)
        while True:
            try:
                for hold_id in [*self.wanted, *(hold.id for hold in self.adapter.observe().holds)]:
                    self.adapter.release(hold_id)
                running = [one for one in self.workers if self.adapter.poll(one).state != "exited"]
                if not running and not self.cluster.left():
                    return
            except UnavailableError as error:
                self.steps.append(str(error))
            assert time.monotonic() < deadline_s, f"left behind: {self.cluster.left()}, {self.steps}"
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_fault_doubles_or_leaves_anything(whole: bool, api_server: ApiServer, tmp_path: Path) -> None:
    """Random steps, lost replies among them and a kill in each run; every run ends with an empty namespace."""
    num_faults = num_runs = 0
    while num_faults < (NUM_WHOLE if whole else NUM_SHORT):
        cluster = RealCluster(tmp_path / str(num_runs), api_server, seed=num_runs, share_lost=0.15)
        try:
            run = FaultyRun(cluster, tmp_path / str(num_runs), seed=num_runs)
            for number in range(STEPS):
                run.step("kill" if number == STEPS // 2 else "")
            cluster.replies.stop()
            run.end()
        finally:
            cluster.end()
        num_faults, num_runs = num_faults + run.num_kills + cluster.replies.num_lost, num_runs + 1
