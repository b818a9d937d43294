"""`PoolSimulation`: a coordinator, the sites of several owners and their users on one virtual clock.

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
from isthmus.control.coordinator.coordinator import CoordinatorConfig
from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.faults.fault_injector import FaultInjector
from isthmus.control.simulation.home_queues import HomeQueues
from isthmus.control.simulation.pool_outcome import JobOutcome, PoolOutcome, WaitStatistics, waits_by_owner
from isthmus.control.simulation.simulated_agent import SimulatedAgent
from isthmus.control.simulation.simulated_runs import SimulatedProgress, SimulatedRuns
from isthmus.control.simulation.simulated_server import DurableLog, QueueConfig, SimulatedServer
from isthmus.control.simulation.traces.job_trace import TraceJob
from isthmus.control.simulation.traces.trace_planner import TracePlanner, trace_submission
from isthmus.control.state.events import Event, JobCancelled, JobSubmitted
from isthmus.control.state.update_indexes import is_checking
from isthmus.core.errors import ConflictError, NotFoundError, UnavailableError
from isthmus.core.job import PlacementConstraints
from isthmus.core.messages.agent_messages import VerifiedCheckpoint
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Cluster, Pool
from isthmus.sim import Kernel, ProcessGenerator
from isthmus.site import PartKey

Scenario = Literal["alone", "home", "pool"]
_NUM_SLICES = 400
_USER = "user"


class PoolSimulation:
    """Simulates the jobs of a trace in a pool. Owners of the trace must own clusters of the pool.

    `policies` is keyed by cluster; `placement` returns a job's constraints in the pool. `log` and `check_invariants`
    are those of `SimulatedServer`; `on_process` is called with (site, part, started) for each start and end.
    """

    def __init__(
        self,
        pool: Pool,
        jobs: Sequence[TraceJob],
        *,
        scenario: Scenario = "pool",
        objective: Objective = "arrival",
        rules: CoordinatorConfig | None = None,
        delays: Delays | None = None,
        faults: FaultInjector | None = None,
        policies: Mapping[str, OwnerPolicy] | None = None,
        placement: Callable[[TraceJob], PlacementConstraints] = lambda _: PlacementConstraints(),
        log: DurableLog | None = None,
        on_process: Callable[[str, PartKey, bool], None] = lambda *_: None,
        check_invariants: Callable[[SimulatedServer, float], None] | None = None,
    ) -> None:
        self.kernel, self.scenario, self.objective = Kernel(), scenario, objective
        self.delays, self.faults = delays or Delays(), faults or FaultInjector()
        self.faults.clock = lambda: self.kernel.now_s
        self.num_chips = sum(group.num_chips for one in pool.clusters for group in one.node_groups)
        self._placement = placement
        self.job_outcomes = {job.name: JobOutcome(job) for job in jobs}
        self.num_node_failures = 0
        self._hit_by_failure: set[str] = set()
        self.acknowledged: set[str] = set()
        self.server = SimulatedServer(
            self.kernel,
            TracePlanner(jobs, pool),
            queue_config=QueueConfig(links=pool.links, objective=objective),
            rules=rules,
            planning_delay_s=self.delays.planning_s,
            log=log,
            faults=self.faults,
            on_job_changed=self._on_job_changed,
            check_invariants=check_invariants,
            run_lease_s=rules.run_lease_s if rules and self.delays.has_heartbeat else 0.0,
        )
        self.runs = self._new_runs(jobs)
        self.home_queues = HomeQueues(self)
        self.agents = {
            one.name: self._new_agent(one, (policies or {}).get(one.name), on_process) for one in pool.clusters
        }
        self._unfinished = {job.name for job in jobs if self._fits(job)}
        self._ended_s = 0.0
        self._cpu_share = 1.0
        self.kernel.start(self._arrivals(jobs))
        self.kernel.start(self._server_ticks())

    def _new_runs(self, jobs: Sequence[TraceJob]) -> SimulatedRuns:
        runs = SimulatedRuns(
            self.kernel,
            self.delays,
            on_part_end=self._on_part_ended,
            on_checkpoint=self._on_checkpoint,
            on_start=self._on_run_started,
            on_interrupt=self._on_run_stopped,
        )
        runs.job_progress = {job.name: SimulatedProgress(job.run_s) for job in jobs}
        return runs

    def _new_agent(
        self, cluster: Cluster, policy: OwnerPolicy | None, on_process: Callable[[str, PartKey, bool], None]
    ) -> SimulatedAgent:
        return SimulatedAgent(
            self.kernel,
            cluster,
            self.server,
            self.runs,
            self.delays,
            self.faults,
            self.home_queues.on_local_job,
            policy=policy or OwnerPolicy(),
            on_process=on_process,
            joined=self.scenario != "alone",
        )

    def run(self, should_continue: Callable[[float, int], bool] | None = None, until_s: float | None = None) -> None:
        """Run until all jobs that fit have ended, until `until_s`, or until `should_continue(now_s, done)` is false."""
        last_s = max((fate.job.submit_s for fate in self.job_outcomes.values()), default=0.0)
        slice_s = max(10.0, last_s / _NUM_SLICES)
        began = time.perf_counter(), time.process_time()
        try:
            self._run_slices(slice_s, should_continue, until_s)
        finally:
            spent_s = max(1e-9, time.perf_counter() - began[0])
            self._cpu_share = min(1.0, (time.process_time() - began[1]) / spent_s)

    def _run_slices(
        self, slice_s: float, should_continue: Callable[[float, int], bool] | None, until_s: float | None
    ) -> None:
        while self._unfinished and (until_s is None or self.kernel.now_s < until_s):
            self.kernel.run(self.kernel.now_s + slice_s)
            if should_continue is not None and not should_continue(
                self.kernel.now_s, len(self.job_outcomes) - len(self._unfinished)
            ):
                return

    def outcome(self) -> PoolOutcome:
        """Return the outcome so far."""
        fates = list(self.job_outcomes.values())
        ended_s = self._ended_s if not self._unfinished else self.kernel.now_s
        done = sum(fate.job.chips * fate.job.run_s for fate in fates if fate.ended_s is not None)
        return PoolOutcome(
            scenario=self.scenario,
            objective="" if self.scenario == "alone" else self.objective,
            pool=WaitStatistics.from_outcomes("all", fates),
            owners=waits_by_owner(fates, lambda job: self.home_queues.find_node_group(job) is not None),
            utilisation=done / (self.num_chips * ended_s) if ended_s else 0.0,
            ended_s=ended_s,
            preemptions=sum(fate.num_interruptions - fate.num_moves for fate in fates) - self.num_node_failures,
            moves=sum(fate.num_moves for fate in fates),
            most_lost_by_move_s=max((fate.most_lost_by_move_s for fate in fates), default=0.0),
            failures=self.num_node_failures,
            too_large=sum(not self._fits(fate.job) for fate in fates),
            events=sum(self.server.event_counts.values()),
            cpu_s=self.server.decision_wall_s * self._cpu_share,
            planning_cpu_s=self.server.planning_wall_s * self._cpu_share,
            whole=not self._unfinished,
        )

    @property
    def has_siblings(self) -> bool:
        """Whether a job that waits in its owner's queue is queued in the pool too."""
        return self.scenario == "home"

    def submit(self, job: TraceJob) -> None:
        """Submit a job to the pool on behalf of its user; retry until the server acknowledges it."""
        self._send_user_event(
            lambda now_s: JobSubmitted(
                now_s=now_s,
                job_id=job.name,
                user=_USER,
                submission=trace_submission(job, self._placement(job)),
            ),
            lambda: self.acknowledged.add(job.name),
        )

    def cancel(self, job: str) -> None:
        """Cancel a job of the pool on behalf of its user."""
        self._send_user_event(lambda now_s: JobCancelled(now_s=now_s, job_id=job), lambda: None)

    def fail_part(self, site: str, key: PartKey) -> None:
        """Fail a part of a site because of a node failure."""
        self._hit_by_failure.add(key[0])
        self.agents[site].fail_part(key)

    def record_start(self, job: str) -> None:
        """Record that a job trains."""
        fate = self.job_outcomes[job]
        if fate.started_s is None:
            fate.started_s = self.kernel.now_s

    def record_end(self, job: str) -> None:
        """Record that a job has ended."""
        if job in self._unfinished:
            self._unfinished.remove(job)
            self.job_outcomes[job].ended_s = self._ended_s = self.kernel.now_s

    def _fits(self, job: TraceJob) -> bool:
        """Tell whether the job is small enough to run in this scenario."""
        if self.scenario == "alone":
            return self.home_queues.find_node_group(job) is not None
        return job.chips <= self.num_chips

    def _arrivals(self, jobs: Iterable[TraceJob]) -> ProcessGenerator:
        for job in jobs:
            if job.submit_s > self.kernel.now_s:
                yield job.submit_s
            if job.name not in self._unfinished:
                continue
            if self.scenario == "pool" or self.home_queues.find_node_group(job) is None:
                self.submit(job)
            else:
                self.home_queues.enqueue(job)

    def _server_ticks(self) -> ProcessGenerator:
        while self.scenario != "alone":
            yield self.kernel.now_s + self.delays.tick_interval_s
            self.server.tick(name for name, agent in self.agents.items() if agent.reachable)

    def _send_user_event(self, event: Callable[[float], Event], done: Callable[[], object]) -> None:
        def attempt(_: object) -> None:
            try:
                self.server.submit_event(event)
            except UnavailableError:
                self.kernel.call_at(self.kernel.now_s + self.delays.retry_delay_s, attempt)
                return
            except (ConflictError, NotFoundError):
                return
            done()

        self.kernel.call_at(self.kernel.now_s + self.delays.network_s, attempt)

    def _on_job_changed(self, job_id: str) -> None:
        """Schedule a report of each site of a changed job, since its orders may have changed."""
        record = self.server.coordinator.state.jobs.get(job_id)
        if record is None:
            return
        checking = record.preflight.sites if is_checking(record) and record.preflight else ()
        for cluster in (*(cluster for _, cluster in record.parts), *checking):
            self.agents[cluster].schedule_report(self.delays.poll_interval_s)
        if record.state == "succeeded":
            self.record_end(job_id)

    def _on_part_ended(self, site: str, job: str, attempt: int, status: int) -> None:
        self.agents[site].end_part((job, attempt), status)

    def _on_checkpoint(self, site: str, job: str, attempt: int, checkpoint: VerifiedCheckpoint) -> None:
        self.agents[site].record_checkpoint((job, attempt), checkpoint)

    def _on_run_started(self, job: str) -> None:
        self.record_start(job)
        self.home_queues.on_pool_start(job)

    def _on_run_stopped(self, job: str, lost_s: float) -> None:
        if job in self._unfinished:
            fate = self.job_outcomes[job]
            fate.num_interruptions += 1
            self.num_node_failures += job in self._hit_by_failure
            if job in self.server.coordinator.state.moved and job not in self._hit_by_failure:
                fate.num_moves += 1
                fate.most_lost_by_move_s = max(fate.most_lost_by_move_s, lost_s)
        self._hit_by_failure.discard(job)
        self.home_queues.on_pool_stop(job)
