"""`RunningAgent`: an agent's service on a Slurm cluster, driven by a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.agent.containers.worker_containers import WorkerContainers
from isthmus.agent.service.agent_service import AgentService
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.process.boot_clock import boot_time_s
from tests.slurm.samples import adapter_of, cluster_of
from tests.slurm.slurm_cluster import SlurmCluster

LOOP = ("sh", "-c", 'echo "$ISTHMUS_CARDS" >> "$1/cards"; while :; do sleep 0.2; done', "worker")


class RunningAgent:
    """The agent of cluster `east`; `restart` is a new life of it."""

    def __init__(
        self, slurm: SlurmCluster, state: Path, program: Sequence[str] = LOOP, policy: OwnerPolicy | None = None
    ) -> None:
        self._slurm, self._state, self._program = slurm, state, tuple(program)
        self._policy = policy or OwnerPolicy()
        self.restart()

    def restart(self) -> None:
        """Be another process with the same state folder."""
        rights, rules = self._policy.workers, self._policy.workers.containers
        self.service = AgentService(
            cluster=cluster_of(self._slurm).model_copy(update={"name": "east"}),
            adapter=adapter_of(self._slurm, self._state, self._program),
            state=self._state,
            clock=boot_time_s,
            policy=self._policy,
            containers=WorkerContainers(rules, rights, self._state, self._program, in_step=True) if rules else None,
        )

    def until(self, what: str, happened: Callable[[], object], *parts: PartOrder, timeout_s: float = 40.0) -> None:
        """Tick, and repeat the server's orders, until something has happened."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.service.tick()
            if parts:
                self.service.apply_orders(AgentOrders(parts=parts))
            if happened():
                return
            assert time.monotonic() < deadline_s, f"{what}: {self.states}"
            time.sleep(0.05)

    @property
    def states(self) -> dict[str, str]:
        """State and detail of each part."""
        return {f"{part.job}/{part.attempt}": f"{part.state} {part.detail}" for part in self.service.observed_parts()}

    def state(self, job: str = "a", attempt: int = 1) -> str:
        """Return the state of a part, "" if there is none."""
        found = [part.state for part in self.service.observed_parts() if (part.job, part.attempt) == (job, attempt)]
        return found[0] if found else ""

    def num_jobs(self) -> int:
        """Return how many jobs Slurm lists."""
        return len(self._slurm.run("squeue", "-h", "-o", "%A").split())
