"""`HomeQueues`: jobs in their owners' own queues, and their siblings in the pool's queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.pool_outcome import JobOutcome
from isthmus.control.simulation.simulated_agent import SimulatedAgent
from isthmus.control.simulation.simulated_runs import SimulatedRuns
from isthmus.control.simulation.traces.job_trace import TraceJob
from isthmus.control.simulation.traces.trace_pools import OWNER_LEVELS
from isthmus.sim import Kernel
from isthmus.site import LocalJob

OWNER_LEVEL = OWNER_LEVELS[-1]
SIBLING_DELAY_S = 30.0
"""How long a job waits in its owner's queue before a sibling is submitted to the pool."""


@dataclass(slots=True, eq=False)
class _HomeJob:
    """A job in its owner's own queue."""

    site: str
    # Node group.
    group: str
    # Position in the queue that it had before it left it.
    position: int = 0
    # Number of times it has started here, and when it did last; None while it does not run here.
    run_number: int = 0
    started_s: float | None = None
    # A sibling was submitted to the pool.
    has_sibling: bool = False


class PoolContext(Protocol):
    """What `HomeQueues` uses of `PoolSimulation`."""

    kernel: Kernel
    delays: Delays
    runs: SimulatedRuns
    job_outcomes: dict[str, JobOutcome]
    num_node_failures: int

    @property
    def agents(self) -> Mapping[str, SimulatedAgent]:
        """The sites' agents, by cluster."""

    @property
    def has_siblings(self) -> bool:
        """Whether a job that waits in its owner's queue is queued in the pool too."""

    def submit(self, job: TraceJob) -> None:
        """Submit a job to the pool on behalf of its user."""

    def cancel(self, job: str) -> None:
        """Cancel a job of the pool on behalf of its user."""

    def record_start(self, job: str) -> None:
        """Record that a job trains."""

    def record_end(self, job: str) -> None:
        """Record that a job has ended."""


class HomeQueues:
    """The owners' own queues in a pool."""

    def __init__(self, pool: PoolContext) -> None:
        self._pool = pool
        self._jobs: dict[str, _HomeJob] = {}

    def find_node_group(self, job: TraceJob) -> tuple[str, str] | None:
        """Return the owner's site and node group with the least demand of those that fit a job, if any."""
        found: list[tuple[float, str, str]] = []
        for name, agent in self._pool.agents.items():
            cluster = agent.cluster
            if cluster.owner != job.owner:
                continue
            for group in cluster.node_groups:
                if group.num_chips >= job.chips and job.chip in ("", group.chip):
                    asked = sum(part.wanted.get(group.name, 0) for part in agent.parts.values())
                    found.append((asked / group.num_chips, name, group.name))
        return min(found)[1:] if found else None

    def enqueue(self, job: TraceJob) -> None:
        """Queue a job at its owner's site, and in the pool too if it does not start within `SIBLING_DELAY_S`."""
        place = self.find_node_group(job)
        if place is None:
            return
        self._jobs[job.name] = _HomeJob(*place)
        self._submit(job)
        if self._pool.has_siblings:
            self._pool.kernel.call_at(self._pool.kernel.now_s + SIBLING_DELAY_S, self._submit_sibling, job)

    def on_local_job(self, site: str, name: str, status: int | None) -> None:
        """Handle the start (None), the preemption (-1) or the end (exit status) of a local job."""
        world, home_job = self._pool, self._jobs.get(name)
        if home_job is None:
            return
        progress = world.runs.job_progress[name]
        if status is None:
            home_job.run_number, home_job.started_s = home_job.run_number + 1, world.kernel.now_s
            world.record_start(name)
            left_s = progress.total_s - progress.saved_s
            world.kernel.call_at(world.kernel.now_s + left_s, self._finish, (name, home_job.run_number))
            if home_job.has_sibling:
                world.cancel(name)
        elif home_job.started_s is not None and status != 0:
            every_s = world.delays.checkpoint_interval_s if status > 0 else 1.0
            progress.saved_s += (world.kernel.now_s - home_job.started_s) // every_s * every_s
            home_job.started_s = None
            world.job_outcomes[name].num_interruptions += 1
            if status == 1:
                world.num_node_failures += 1
                world.kernel.call_at(world.kernel.now_s, self._submit_again, name)
        if status == 0:
            world.record_end(name)
            world.kernel.call_at(world.kernel.now_s, lambda _: world.agents[site].withdraw_local_job(name))

    def on_pool_start(self, name: str) -> None:
        """Remove a job from its owner's queue, since its sibling in the pool trains."""
        home_job = self._jobs.get(name)
        part = self._pool.agents[home_job.site].parts.get((name, 0)) if home_job else None
        if home_job is not None and part is not None:
            home_job.position = part.place
            self._pool.agents[home_job.site].withdraw_local_job(name)

    def on_pool_stop(self, name: str) -> None:
        """Queue a job at its old position in its owner's queue, since its sibling in the pool has stopped."""
        home_job = self._jobs.get(name)
        if home_job is not None and home_job.started_s is None:
            self._submit(self._pool.job_outcomes[name].job)
            part = self._pool.agents[home_job.site].parts.get((name, 0))
            if part is not None and home_job.position:
                part.place = home_job.position

    def _submit_again(self, name: str) -> None:
        """Queue a job whose node failed at its old position."""
        home_job = self._jobs[name]
        agent = self._pool.agents[home_job.site]
        home_job.position = agent.parts[name, 0].place
        agent.withdraw_local_job(name)
        self.on_pool_stop(name)

    def _submit(self, job: TraceJob) -> None:
        home_job = self._jobs[job.name]
        agent = self._pool.agents[home_job.site]
        levels = agent.cluster.priorities.levels
        level = OWNER_LEVEL if OWNER_LEVEL in levels else levels[0]
        agent.submit_local_job(
            LocalJob(name=job.name, command=(), node_group=home_job.group, chips=job.chips, level=level)
        )

    def _submit_sibling(self, job: TraceJob) -> None:
        home_job = self._jobs[job.name]
        if home_job.started_s is None and self._pool.job_outcomes[job.name].ended_s is None:
            home_job.has_sibling = True
            self._pool.submit(job)

    def _finish(self, ended: tuple[str, int]) -> None:
        name, run = ended
        home_job = self._jobs[name]
        if home_job.run_number == run and home_job.started_s is not None:
            self._pool.agents[home_job.site].end_part((name, 0), 0)
