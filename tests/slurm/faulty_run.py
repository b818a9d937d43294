"""`FaultyRun`: a run of random steps on a real Slurm with seeded faults, and the rules that hold all the time.

Faults: replies of commands that are lost or never sent, replies that come too late, slurmctld killed and started again,
agents that forget everything, releases at any step of what is asked for, committed or started. A hold is asked for
again until it is granted or used up, as the agent does it.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest, RankNeed, RankStart
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.core.errors import UnavailableError
from tests.slurm.samples import adapter_of
from tests.slurm.slurm_cluster import SlurmCluster

PROGRAM = ("sh", "-c", 'echo started >> "$1/starts"; while :; do sleep 0.2; done', "worker")
SETTLE_S, LOSSES = 60.0, 0.1
LATE_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyCommands(SlurmCommands):
    """Commands of which some are not sent, and some sent without an answer."""

    rng: random.Random
    lost: list[str]

    def run_fully(self, *command: str) -> tuple[str, str]:
        """Run the command, unless it is lost; return its answer, unless that is lost."""
        chance = self.rng.random()
        if chance < LOSSES:
            self.lost.append(command[0])
            if chance < LOSSES / 2:
                super().run_fully(*command)
            raise UnavailableError(f"the reply of {command[0]} is lost")
        return super().run_fully(*command)


class FaultyRun:
    """Holds and workers of one run; `steps` is its story, `problems` what broke a rule.

    Runs of one Slurm share the agent's state folder beside `folder`: a slurmctld that was killed before it saved its
    state shows what earlier runs have released.
    """

    def __init__(self, slurm: SlurmCluster, folder: Path, seed: int) -> None:
        self.slurm, self.folder, self.rng = slurm, folder, random.Random(seed)
        self.wanted: dict[str, HoldRequest] = {}
        self.workers: dict[Path, RankStart] = {}
        self.steps: list[str] = []
        self.problems: Counter[str] = Counter()
        self.num_faults, self.longest_hold_s = 0, 0.0
        self._lost: list[str] = []
        self.forget()
        self.num_faults = 0

    def run(self, num_steps: int) -> None:
        """Do `num_steps` things at random, then see that all settles, and give everything up."""
        for _ in range(num_steps):
            self.step()
        self.settle()
        self.end()

    def step(self) -> None:
        """Do one thing at random; what the scheduler does not answer is done again later."""
        acts = (self.ask, self.ask, self.ask, self.start, self.start, self.release, self.cross, self.forget, self.kill)
        act = self.rng.choice(acts)
        self.steps.append(act.__name__)
        try:
            act()
            self.look()
        except UnavailableError as error:
            self.steps.append(str(error))
        self.num_faults += len(self._lost)
        self._lost.clear()

    def ask(self) -> None:
        if len(self.wanted) < 3:
            request = self.new_request()
            self.wanted[request.id] = request
        for request in list(self.wanted.values()):
            if self.answer(request).state == "ended":
                del self.wanted[request.id]

    def new_request(self) -> HoldRequest:
        need = RankNeed(node_group="h20", num_cards=self.rng.choice((1, 2)))
        ranks = (need,) * self.rng.choice((1, 2))
        name = uuid.UUID(int=self.rng.getrandbits(128)).hex
        return HoldRequest(id=name, job="f", attempt=1, ranks=ranks, lease_s=60)

    def answer(self, request: HoldRequest) -> Hold:
        return self.rng.choice((self.adapter.hold, self.adapter.commit))(request)

    def release(self) -> None:
        self.num_faults += 1
        if self.wanted:
            self.adapter.release(self.wanted.pop(self.rng.choice(sorted(self.wanted))).id)

    def cross(self) -> None:
        """Release a hold while another agent asks for it."""
        self.num_faults += 1
        request = self.new_request()
        other = self.new_adapter()

        def ask() -> None:
            try:
                other.hold(request)
            except UnavailableError as error:
                self.steps.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(self.rng.random() * 0.3)
        try:
            self.adapter.release(request.id)
        finally:
            thread.join()
        if other.hold(request).state != "ended":
            self.problems["held after its release"] += 1

    def start(self) -> None:
        for request in list(self.wanted.values()):
            hold = self.adapter.hold(request)
            if hold.state == "granted":
                folder = self.folder / f"worker-{request.id}"
                folder.mkdir(exist_ok=True)
                self.workers[folder] = RankStart(folder=folder, cards=hold.cards[0], hold=request.id)
                self.adapter.start(self.workers[folder])

    def forget(self) -> None:
        """Be a new agent process; now and then one whose commands come too late."""
        self.num_faults += 1
        self.adapter = self.new_adapter(timeout_s=self.rng.choice((5.0, 5.0, 5.0, LATE_S)))

    def new_adapter(self, timeout_s: float = 5.0):
        commands = LossyCommands(config=str(self.slurm.conf), timeout_s=timeout_s, rng=self.rng, lost=self._lost)
        return adapter_of(self.slurm, self.folder.parent / "state", PROGRAM, commands)

    def kill(self) -> None:
        self.num_faults += 1
        self.slurm.kill_controller()
        self.slurm.start_controller()
        if self.rng.random() < 0.7:
            self.slurm.wait_answer()

    def look(self) -> None:
        """Check what must hold at any time."""
        cards = Counter(card for hold in self.adapter.observe().holds for rank in hold.cards for card in rank)
        self.problems["a card in two holds"] += any(num > 1 for num in cards.values())
        for folder in self.workers:
            starts = folder / "starts"
            self.problems["started twice"] += starts.exists() and len(starts.read_text().splitlines()) > 1

    def settle(self) -> None:
        """Without further faults: every hold is whole or used up, every worker of a held one runs once."""
        self.slurm.wait_answer()
        self.slurm.wait_registered()
        self.adapter = adapter_of(self.slurm, self.folder.parent / "state", PROGRAM)
        if not self.wait(self.is_settled):
            self.problems["lost or half-started"] += 1
        self.look()

    def is_settled(self) -> bool:
        for request in list(self.wanted.values()):
            hold = self.adapter.hold(request)
            if hold.state == "ended":
                del self.wanted[request.id]
            elif hold.state == "waiting" and len(self.adapter.observe().holds) == 0:
                return False
        held = {hold.id: hold for hold in self.adapter.observe().holds}
        for hold_id in held.keys() - self.wanted.keys():
            self.adapter.release(hold_id)
        for hold_id, request in self.wanted.items():
            if hold_id in held and held[hold_id].state == "granted":
                whole = [len(cards) for cards in held[hold_id].cards] == [rank.num_cards for rank in request.ranks]
                self.problems["a hold of some of its cards"] += not whole
        running = [start for start in self.workers.values() if start.hold in self.wanted and start.hold in held]
        for start in running:
            self.adapter.start(start)
        ended = [one for one in self.workers.values() if one.hold not in self.wanted]
        return all((one.folder / "starts").exists() for one in running) and all(
            self.adapter.poll(one.folder).state != "running" for one in ended
        )

    def end(self) -> None:
        """Give everything up; measure until nothing is left, which may take no hold longer than its lease."""
        begun_s = time.monotonic()
        for folder in self.workers:
            self.adapter.stop(folder, force=True)
        if not self.wait(self.is_empty):
            self.problems["left behind"] += 1
        self.longest_hold_s = time.monotonic() - begun_s

    def is_empty(self) -> bool:
        for hold_id in [*self.wanted, *(hold.id for hold in self.adapter.observe().holds)]:
            self.adapter.release(hold_id)
        running = [one for one in self.workers if self.adapter.poll(one).state == "running"]
        return not running and not self.slurm.live_jobs()

    def wait(self, happened) -> bool:
        """Wait until something happened, with errors of the scheduler on the way; return whether it did in time."""
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            self.slurm.revive_controller()
            try:
                if happened():
                    return True
            except (UnavailableError, subprocess.SubprocessError) as error:
                self.steps.append(str(error))
            time.sleep(0.1)
        return False
