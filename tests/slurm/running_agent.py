"""`RunningAgent`: an agent's service on a Slurm cluster, driven by a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus.agent.containers.worker_containers import WorkerContainers
from isthmus.agent.service.agent_service import AgentService
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.process.boot_clock import boot_time_s
from tests.agent.running_agent import LOOP, DrivenAgent
from tests.slurm.samples import adapter_of, cluster_of
from tests.slurm.slurm_cluster import SlurmCluster


class RunningAgent(DrivenAgent):
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

    def num_jobs(self) -> int:
        """Return how many jobs Slurm lists."""
        return len(self._slurm.run("squeue", "-h", "-o", "%A").split())
