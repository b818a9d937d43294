"""`Home`: jobs in their owners' own queues, and their siblings in the pool's queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from isthmus.control.simulation.agent_process import AgentProcess
from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.outcome import JobFate
from isthmus.control.simulation.run_progress import Runs
from isthmus.control.simulation.traces.trace import TraceJob
from isthmus.control.simulation.traces.trace_pools import OWN_LEVELS
from isthmus.sim.kernel import Kernel
from isthmus.site import LocalJob

OWN = OWN_LEVELS[-1]
PATIENCE_S = 30.0
"""How long a job waits in its owner's queue before a sibling is submitted to the pool."""


@dataclass(slots=True, eq=False)
class _AtHome:
    """A job in its owner's own queue."""

    site: str
    # Node group.
    group: str
    # Position in the queue that it had before it left it.
    place: int = 0
    # Number of times it has started here, and when it did last; None while it does not run here.
    run: int = 0
    since_s: float | None = None
    # A sibling was submitted to the pool.
    sibling: bool = False


class World(Protocol):
    """What `Home` uses of `PoolWorld`."""

    kernel: Kernel
    delays: Delays
    runs: Runs
    fates: dict[str, JobFate]
    failures: int

    @property
    def agents(self) -> Mapping[str, AgentProcess]:
        """The sites' agents, by cluster."""

    @property
    def has_siblings(self) -> bool:
        """Whether a job that waits in its owner's queue is queued in the pool too."""

    def submit(self, job: TraceJob) -> None:
        """Submit a job to the pool on behalf of its user."""

    def cancel(self, job: str) -> None:
        """Cancel a job of the pool on behalf of its user."""

    def started(self, job: str, *, away: bool) -> None:
        """Record that a job trains."""

    def ended(self, job: str) -> None:
        """Record that a job has ended."""


class Home:
    """The owners' own queues in a pool."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._jobs: dict[str, _AtHome] = {}

    def place_of(self, job: TraceJob) -> tuple[str, str] | None:
        """Return the owner's site and node group with the least demand of those that fit a job, if any."""
        found: list[tuple[float, str, str]] = []
        for name, agent in self._world.agents.items():
            cluster = agent.cluster
            if cluster.owner != job.owner:
                continue
            for group in cluster.node_groups:
                if group.chips >= job.chips and job.chip in ("", group.chip):
                    asked = sum(part.wanted.get(group.name, 0) for part in agent.parts.values())
                    found.append((asked / group.chips, name, group.name))
        return min(found)[1:] if found else None

    def arrive(self, job: TraceJob) -> None:
        """Queue a job at its owner's site, and in the pool too if it does not start within `PATIENCE_S`."""
        place = self.place_of(job)
        if place is None:
            return
        self._jobs[job.name] = _AtHome(*place)
        self._submit(job)
        if self._world.has_siblings:
            self._world.kernel.call(self._world.kernel.now + PATIENCE_S, self._lose_patience, job)

    def local_changed(self, site: str, name: str, status: int | None) -> None:
        """Handle the start (None), the preemption (-1) or the end (exit status) of a local job."""
        world, home_job = self._world, self._jobs.get(name)
        if home_job is None:
            return
        progress = world.runs.progress[name]
        if status is None:
            home_job.run, home_job.since_s = home_job.run + 1, world.kernel.now
            world.started(name, away=False)
            left_s = progress.needs_s - progress.saved_s
            world.kernel.call(world.kernel.now + left_s, self._finish, (name, home_job.run))
            if home_job.sibling:
                world.cancel(name)
        elif home_job.since_s is not None and status != 0:
            every_s = world.delays.checkpoint_every_s if status > 0 else 1.0
            progress.saved_s += (world.kernel.now - home_job.since_s) // every_s * every_s
            home_job.since_s = None
            world.fates[name].stopped += 1
            if status == 1:
                world.failures += 1
                world.kernel.call(world.kernel.now, self._submit_again, name)
        if status == 0:
            world.ended(name)
            world.kernel.call(world.kernel.now, lambda _: world.agents[site].withdraw(name))

    def taken(self, name: str) -> None:
        """Remove a job from its owner's queue, since its sibling in the pool trains."""
        home_job = self._jobs.get(name)
        part = self._world.agents[home_job.site].parts.get((name, 0)) if home_job else None
        if home_job is not None and part is not None:
            home_job.place = part.place
            self._world.agents[home_job.site].withdraw(name)

    def given_back(self, name: str) -> None:
        """Queue a job at its old position in its owner's queue, since its sibling in the pool has stopped."""
        home_job = self._jobs.get(name)
        if home_job is not None and home_job.since_s is None:
            self._submit(self._world.fates[name].job)
            part = self._world.agents[home_job.site].parts.get((name, 0))
            if part is not None and home_job.place:
                part.place = home_job.place

    def _submit_again(self, name: str) -> None:
        """Queue a job whose node failed at its old position."""
        home_job = self._jobs[name]
        agent = self._world.agents[home_job.site]
        home_job.place = agent.parts[name, 0].place
        agent.withdraw(name)
        self.given_back(name)

    def _submit(self, job: TraceJob) -> None:
        home_job = self._jobs[job.name]
        agent = self._world.agents[home_job.site]
        levels = agent.cluster.priorities.levels
        level = OWN if OWN in levels else levels[0]
        agent.submit(
            LocalJob(name=job.name, command=(), node_group=home_job.group, chips=job.chips, level=level)
        )

    def _lose_patience(self, job: TraceJob) -> None:
        home_job = self._jobs[job.name]
        if home_job.since_s is None and self._world.fates[job.name].ended_s is None:
            home_job.sibling = True
            self._world.submit(job)

    def _finish(self, ended: tuple[str, int]) -> None:
        name, run = ended
        home_job = self._jobs[name]
        if home_job.run == run and home_job.since_s is not None:
            self._world.agents[home_job.site].part_ended((name, 0), 0)
