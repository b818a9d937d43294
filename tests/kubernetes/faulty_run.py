"""`FaultyRun`: random steps on a real API server with seeded faults.

Faults: replies that are lost after what they answer was done, the API server killed, with and without a compaction of
its log, agents that forget everything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from isthmus.agent.adapters.scheduler_adapter import RankStart, SchedulerAdapter
from isthmus.core.errors import UnavailableError
from tests.agent.faulty_holds import PROGRAM, FaultyHolds
from tests.kubernetes.clusters import RealCluster


class FaultyRun(FaultyHolds):
    """One run on the API server of a cluster."""

    NEEDS = ((1, 2), (2, 1), (4, 1))
    SETTLE_S = 90.0
    ERRORS = (UnavailableError, httpx.HTTPError)

    def __init__(self, cluster: RealCluster, folder: Path, seed: int) -> None:
        self.cluster, self.num_kills = cluster, 0
        super().__init__(folder, seed)

    @property
    def num_faults(self) -> int:
        """How often the server was killed, and how many of its replies were lost."""
        return self.num_kills + self.cluster.replies.num_lost

    def run(self, num_steps: int) -> None:
        """Do `num_steps` things at random, with a kill among them, then give everything up without further faults."""
        for number in range(num_steps):
            self.step(self.kill if number == num_steps // 2 else None)
        self.cluster.replies.stop()
        self.settle()
        self.end()

    def acts(self) -> tuple[Callable[[], None], ...]:
        return self.ask, self.ask, self.release, self.start, self.start, self.forget

    def new_adapter(self) -> SchedulerAdapter:
        return self.cluster.adapter(PROGRAM)

    def kill(self) -> None:
        """End the API server in the middle of what goes on, and start it again; half the times with an empty log."""
        self.num_kills += 1
        self.cluster.kill()
        for folder in self.workers:
            self.adapter.poll(folder)
        if self.rng.random() < 0.5:
            self.cluster.server.compact()
        self.cluster.restart()

    def may_start(self, worker: RankStart) -> bool:
        """A pod that was deleted with its hold is not made again."""
        return self.adapter.poll(worker.folder).state != "exited"

    def left(self) -> object:
        return self.cluster.left()
