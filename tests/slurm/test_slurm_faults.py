"""Seeded faults on a real Slurm: slurmctld killed at any time, agents that forget everything, orders that cross.

A hold is asked for again until it is granted or used up, as the agent does it. Whatever happens, no card is in two
holds, no program runs twice, and in the end nothing is left.
"""

from __future__ import annotations

import random
import subprocess
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest

from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest, RankNeed, RankStart
from isthmus.core.errors import UnavailableError
from tests.slurm.samples import adapter_of
from tests.slurm.slurm_cluster import SlurmCluster

PROGRAM = ("sh", "-c", 'echo started >> "$1/starts"; while :; do sleep 0.05; done', "worker")
NUM_WHOLE, NUM_SHORT = 1000, 12


class FaultyRun:
    """Holds and workers of one run of random steps; `steps` is its story."""

    def __init__(self, slurm: SlurmCluster, folder: Path, seed: int) -> None:
        self.slurm, self.folder, self.rng = slurm, folder, random.Random(seed)
        self.adapter = adapter_of(slurm, folder / "state", PROGRAM)
        self.wanted: dict[str, HoldRequest] = {}
        self.workers: dict[Path, str] = {}
        self.steps: list[str] = []
        self.num_faults = 0

    def step(self) -> None:
        """Do one thing at random; what the scheduler does not answer is done again later."""
        act = self.rng.choice(
            (self.ask, self.ask, self.ask, self.release, self.start, self.start, self.forget, self.kill)
        )
        self.steps.append(act.__name__)
        try:
            act()
            self.look()
        except UnavailableError as error:
            self.steps.append(str(error))

    def ask(self) -> None:
        if len(self.wanted) < 3:
            need = RankNeed(node_group="h20", num_cards=self.rng.choice((1, 2)))
            request = HoldRequest(
                id=uuid.UUID(int=self.rng.getrandbits(128)).hex, job="f", attempt=1, ranks=(need,), lease_s=60
            )
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
            if hold.state == "granted":
                folder = self.folder / f"worker-{request.id}"
                folder.mkdir(exist_ok=True)
                self.workers[folder] = request.id
                self.adapter.start(RankStart(folder=folder, cards=hold.cards[0], hold=request.id))

    def forget(self) -> None:
        self.adapter = adapter_of(self.slurm, self.folder / "state", PROGRAM)

    def kill(self) -> None:
        self.num_faults += 1
        self.slurm.kill_controller()
        if self.rng.random() < 0.3:
            self.adapter.poll(self.folder)
        self.slurm.start_controller()
        self.slurm.wait_answer()

    def look(self) -> None:
        """Check what must hold at any time."""
        cards = Counter(card for hold in self.adapter.observe().holds for rank in hold.cards for card in rank)
        assert all(num == 1 for num in cards.values()), f"cards in two holds: {cards}, {self.steps}"
        for folder in self.workers:
            starts = folder / "starts"
            assert not starts.exists() or len(starts.read_text().splitlines()) == 1, f"started twice: {self.steps}"

    def end(self) -> None:
        """Give everything up; nothing may be left."""
        deadline_s = time.monotonic() + 60
        for folder in self.workers:
            self.adapter.stop(folder, force=True)
        while True:
            try:
                for hold_id in [*self.wanted, *(hold.id for hold in self.adapter.observe().holds)]:
                    self.adapter.release(hold_id)
                running = [one for one in self.workers if self.adapter.poll(one).state != "exited"]
                if not running and not self.slurm.live_jobs():
                    return
            except (UnavailableError, subprocess.SubprocessError) as error:
                self.steps.append(str(error))
            left = [str(one) for one in self.workers if self.adapter.poll(one).state != "exited"]
            assert time.monotonic() < deadline_s, f"left behind: {left}, {self.steps}"
            time.sleep(0.1)


@pytest.mark.slow
def test_no_fault_doubles_or_leaves_anything(whole: bool, beta: SlurmCluster, tmp_path: Path) -> None:
    """Random steps with kills of slurmctld between them; every run ends with an empty cluster."""
    beta.wait_empty()
    num_steps = num_runs = 0
    while num_steps < (NUM_WHOLE if whole else NUM_SHORT):
        folder = tmp_path / str(num_runs)
        folder.mkdir()
        run = FaultyRun(beta, folder, seed=num_runs)
        for _ in range(12):
            run.step()
        run.end()
        num_steps, num_runs = num_steps + 12, num_runs + 1
