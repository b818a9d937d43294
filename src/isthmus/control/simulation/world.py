"""`PoolWorld`: a coordinator, the sites of several owners and their users on one virtual clock.

The scenario determines where a job may run:

    alone   only in its owner's queue
    pool    only in the pool's queue
    home    in its owner's queue and, while it waits, as a sibling in the pool's queue too: the first to start
            runs and the other is cancelled (like sibling jobs of federated Slurm clusters)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from isthmus.control.algorithms.global_order import Objective
from isthmus.control.coordinator.coordinator import Rules
from isthmus.control.simulation.agent_process import AgentProcess
from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.faults.fault_rates import Faults
from isthmus.control.simulation.home_queues import Home
from isthmus.control.simulation.outcome import JobFate, PoolOutcome, Waits, waits_by_owner
from isthmus.control.simulation.run_progress import Progress, Runs
from isthmus.control.simulation.simulated_server import EventLog, QueueRules, SimulatedServer
from isthmus.control.simulation.traces.trace import TraceJob
from isthmus.control.simulation.traces.trace_jobs import TracePlanner, submission_of
from isthmus.control.state.events import Event, JobCancelled, JobSubmitted
from isthmus.core.errors import ConflictError, NotFoundError, UnavailableError
from isthmus.core.job import Placement
from isthmus.core.messages.agent_messages import Protection
from isthmus.core.policy import OwnerPolicy
from isthmus.core.pool import Cluster, Pool
from isthmus.sim.kernel import Kernel, Steps
from isthmus.site import PartKey

Scenario = Literal["alone", "home", "pool"]
_SLICES = 400
_USER = "user"


class PoolWorld:
    """Simulates the jobs of a trace in a pool. Owners of the trace must own clusters of the pool.

    `policies` is keyed by cluster; `placement` returns a job's constraints in the pool. `log` and `check` are
    those of `SimulatedServer`; `processes` is called with (site, part, started) for each start and end.
    """

    def __init__(
        self,
        pool: Pool,
        jobs: Sequence[TraceJob],
        *,
        scenario: Scenario = "pool",
        objective: Objective = "arrival",
        rules: Rules | None = None,
        delays: Delays | None = None,
        faults: Faults | None = None,
        policies: Mapping[str, OwnerPolicy] | None = None,
        placement: Callable[[TraceJob], Placement] = lambda _: Placement(),
        log: EventLog | None = None,
        processes: Callable[[str, PartKey, bool], None] = lambda *_: None,
        check: Callable[[SimulatedServer, float], None] | None = None,
    ) -> None:
        self.kernel, self.scenario, self.objective = Kernel(), scenario, objective
        self.delays, self.faults = delays or Delays(), faults or Faults()
        self.faults.clock = lambda: self.kernel.now
        self.num_chips = sum(group.chips for one in pool.clusters for group in one.node_groups)
        self._placement = placement
        self.fates = {job.name: JobFate(job) for job in jobs}
        self.failures = 0
        self._hit: set[str] = set()
        self.acknowledged: set[str] = set()
        self.server = SimulatedServer(
            self.kernel,
            TracePlanner(jobs, pool),
            queue=QueueRules(links=pool.links, objective=objective),
            rules=rules,
            planning_s=self.delays.planning_s,
            log=log,
            faults=self.faults,
            observe=self._changed,
            check=check,
        )
        self.runs = self._new_runs(jobs)
        self.home = Home(self)
        self.agents = {
            one.name: self._new_agent(one, (policies or {}).get(one.name), processes) for one in pool.clusters
        }
        self._open = {job.name for job in jobs if self._fits(job)}
        self._ended_s = 0.0
        self._cpu_share = 1.0
        self.kernel.start(self._arrivals(jobs))
        self.kernel.start(self._ticks())

    def _new_runs(self, jobs: Sequence[TraceJob]) -> Runs:
        runs = Runs(
            self.kernel,
            self.delays,
            end=self._part_ends,
            save=self._part_saved,
            computes=self._computes,
            broke=self._broke,
        )
        runs.progress = {job.name: Progress(job.run_s) for job in jobs}
        return runs

    def _new_agent(
        self, cluster: Cluster, policy: OwnerPolicy | None, processes: Callable[[str, PartKey, bool], None]
    ) -> AgentProcess:
        return AgentProcess(
            self.kernel,
            cluster,
            self.server,
            self.runs,
            self.delays,
            self.faults,
            self.home.local_changed,
            policy=policy or OwnerPolicy(),
            processes=processes,
            joined=self.scenario != "alone",
        )

    def run(self, go_on: Callable[[float, int], bool] | None = None, until_s: float | None = None) -> None:
        """Run until all jobs that fit have ended, until `until_s`, or until `go_on(now_s, done)` is false."""
        last_s = max((fate.job.submit_s for fate in self.fates.values()), default=0.0)
        slice_s = max(10.0, last_s / _SLICES)
        began = time.perf_counter(), time.process_time()
        try:
            self._run(slice_s, go_on, until_s)
        finally:
            spent_s = max(1e-9, time.perf_counter() - began[0])
            self._cpu_share = min(1.0, (time.process_time() - began[1]) / spent_s)

    def _run(self, slice_s: float, go_on: Callable[[float, int], bool] | None, until_s: float | None) -> None:
        while self._open and (until_s is None or self.kernel.now < until_s):
            self.kernel.run(self.kernel.now + slice_s)
            if go_on is not None and not go_on(self.kernel.now, len(self.fates) - len(self._open)):
                return

    def outcome(self) -> PoolOutcome:
        """Return the outcome so far."""
        fates = list(self.fates.values())
        ended_s = self._ended_s if not self._open else self.kernel.now
        done = sum(fate.job.chips * fate.job.run_s for fate in fates if fate.ended_s is not None)
        return PoolOutcome(
            scenario=self.scenario,
            objective="" if self.scenario == "alone" else self.objective,
            pool=Waits.of("all", fates),
            owners=waits_by_owner(fates, lambda job: self.home.place_of(job) is not None),
            utilisation=done / (self.num_chips * ended_s) if ended_s else 0.0,
            ended_s=ended_s,
            preemptions=sum(fate.stopped for fate in fates) - self.failures,
            failures=self.failures,
            too_large=sum(not self._fits(fate.job) for fate in fates),
            events=sum(self.server.counts.values()),
            cpu_s=self.server.deciding_s * self._cpu_share,
            planning_cpu_s=self.server.planning_s * self._cpu_share,
            whole=not self._open,
        )

    @property
    def has_siblings(self) -> bool:
        """Whether a job that waits in its owner's queue is queued in the pool too."""
        return self.scenario == "home"

    def submit(self, job: TraceJob) -> None:
        """Submit a job to the pool on behalf of its user; retry until the server acknowledges it."""
        self._tell(
            lambda now_s: JobSubmitted(
                now_s=now_s, job_id=job.name, user=_USER, submission=submission_of(job, self._placement(job))
            ),
            lambda: self.acknowledged.add(job.name),
        )

    def cancel(self, job: str) -> None:
        """Cancel a job of the pool on behalf of its user."""
        self._tell(lambda now_s: JobCancelled(now_s=now_s, job_id=job), lambda: None)

    def fail(self, site: str, key: PartKey) -> None:
        """Fail a part of a site because of a node failure."""
        self._hit.add(key[0])
        self.agents[site].fail(key)

    def started(self, job: str, *, away: bool) -> None:
        """Record that a job trains; `away` is true if the pool runs it."""
        fate = self.fates[job]
        fate.away = away
        if fate.started_s is None:
            fate.started_s = self.kernel.now

    def ended(self, job: str) -> None:
        """Record that a job has ended."""
        if job in self._open:
            self._open.remove(job)
            self.fates[job].ended_s = self._ended_s = self.kernel.now

    def _fits(self, job: TraceJob) -> bool:
        """Tell whether the job is small enough to run in this scenario."""
        if self.scenario == "alone":
            return self.home.place_of(job) is not None
        return job.chips <= self.num_chips

    def _arrivals(self, jobs: Iterable[TraceJob]) -> Steps:
        for job in jobs:
            if job.submit_s > self.kernel.now:
                yield job.submit_s
            if job.name not in self._open:
                continue
            if self.scenario == "pool" or self.home.place_of(job) is None:
                self.submit(job)
            else:
                self.home.arrive(job)

    def _ticks(self) -> Steps:
        while self.scenario != "alone":
            yield self.kernel.now + self.delays.tick_s
            self.server.tick(name for name, agent in self.agents.items() if agent.reachable)

    def _tell(self, event: Callable[[float], Event], done: Callable[[], object]) -> None:
        def attempt(_: object) -> None:
            try:
                self.server.tell(event)
            except UnavailableError:
                self.kernel.call(self.kernel.now + self.delays.retry_s, attempt)
                return
            except (ConflictError, NotFoundError):
                return
            done()

        self.kernel.call(self.kernel.now + self.delays.network_s, attempt)

    def _changed(self, job_id: str) -> None:
        """Schedule a report of each site of a changed job, since its orders may have changed."""
        record = self.server.coordinator.state.jobs.get(job_id)
        if record is None:
            return
        for _, cluster in record.parts:
            self.agents[cluster].poke(self.delays.poll_s)
        if record.state == "succeeded":
            self.ended(job_id)

    def _part_ends(self, site: str, job: str, attempt: int, status: int) -> None:
        self.agents[site].part_ended((job, attempt), status)

    def _part_saved(self, site: str, job: str, attempt: int, checkpoint: Protection) -> None:
        self.agents[site].part_saved((job, attempt), checkpoint)

    def _computes(self, job: str) -> None:
        self.started(job, away=True)
        self.home.taken(job)

    def _broke(self, job: str) -> None:
        if job in self._open:
            self.fates[job].stopped += 1
            self.failures += job in self._hit
        self._hit.discard(job)
        self.home.given_back(job)
