"""`FaultyRun`: random steps on a real Slurm with seeded faults.

Faults: replies of commands that are lost or never sent, replies that come too late, slurmctld killed and started again,
agents that forget everything, releases at any step of what is asked for, committed or started.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import SchedulerAdapter
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.core.errors import UnavailableError
from tests.agent.faulty_holds import PROGRAM, FaultyHolds
from tests.slurm.samples import adapter_of
from tests.slurm.slurm_cluster import SlurmCluster

LOSSES, LATE_S = 0.1, 0.05


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


class FaultyRun(FaultyHolds):
    """One run on a Slurm cluster.

    Runs of one Slurm share the agent's state folder beside `folder`: a slurmctld that was killed before it saved its
    state shows what earlier runs have released.
    """

    NEEDS = ((1, 1), (1, 2), (2, 1), (2, 2))
    SETTLE_S = 60.0
    ERRORS = (UnavailableError, subprocess.SubprocessError)

    def __init__(self, slurm: SlurmCluster, folder: Path, seed: int) -> None:
        self.slurm, self.num_faults = slurm, 0
        self._lost: list[str] | None = []
        super().__init__(folder, seed)

    def run(self, num_steps: int) -> None:
        """Do `num_steps` things at random, then see that all settles, and give everything up."""
        for _ in range(num_steps):
            self.step()
        self._lost = None
        self.slurm.wait_answer()
        self.slurm.wait_registered()
        self.adapter = self.new_adapter()
        self.settle()
        self.end()

    def acts(self) -> tuple[Callable[[], None], ...]:
        return self.ask, self.ask, self.ask, self.start, self.start, self.release, self.cross, self.forget, self.kill

    def step(self, act: Callable[[], None] | None = None) -> bool:
        answered = super().step(act)
        if self._lost:
            self.num_faults += len(self._lost)
            self._lost.clear()
        return answered

    def release(self) -> None:
        self.num_faults += 1
        super().release()

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

    def forget(self) -> None:
        """Be a new agent process; now and then one whose commands come too late."""
        self.num_faults += 1
        self.adapter = self.new_adapter(timeout_s=self.rng.choice((5.0, 5.0, 5.0, LATE_S)))

    def new_adapter(self, timeout_s: float = 5.0) -> SchedulerAdapter:
        """Return an agent's adapter; its commands are lossy while there are faults."""
        state, config = self.folder.parent / "state", str(self.slurm.conf)
        if self._lost is None:
            return adapter_of(self.slurm, state, PROGRAM)
        commands = LossyCommands(config=config, timeout_s=timeout_s, rng=self.rng, lost=self._lost)
        return adapter_of(self.slurm, state, PROGRAM, commands)

    def kill(self) -> None:
        self.num_faults += 1
        self.slurm.kill_controller()
        self.slurm.start_controller()
        if self.rng.random() < 0.7:
            self.slurm.wait_answer()

    def left(self) -> object:
        return self.slurm.live_jobs()

    def wait(self, happened: Callable[[], bool]) -> bool:
        def happened_now() -> bool:
            self.slurm.revive_controller()
            return happened()

        return super().wait(happened_now)
