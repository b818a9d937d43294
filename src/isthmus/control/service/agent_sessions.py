"""`AgentSessions`: applies the reports of site agents and answers them with orders."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from pydantic import ValidationError

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.agent_takeover import AgentTakeover
from isthmus.control.service.change_feed import ChangeFeed
from isthmus.control.service.coordinator_actor import ActorRequest, CoordinatorActor
from isthmus.control.service.dry_run_checks import DryRunChecks
from isthmus.control.service.progress_tracker import ProgressTracker
from isthmus.control.state.events import AgentReported, Event, LogRestored, SiteChecked
from isthmus.control.store.leader_election import LeaderElection
from isthmus.control.store.store_interface import Store
from isthmus.core.errors import InputError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport
from isthmus.core.pool import Cluster, Pool

FENCE_INTERVAL_S = 60.0
"""Shortest time between two rises of the epoch that the reports of one cluster cause."""


class AgentSessions:
    """The server's side of agent sync. `pool_file` is the operator's pool, `clock` returns seconds.

    Answers to the checks of `dry_runs` go there, others to the coordinator. Metrics and logs go to the `store` and are
    announced to `changes` and `progress`; `leader_election` records which clusters have reported.
    """

    def __init__(
        self,
        actor: CoordinatorActor,
        store: Store,
        pool_file: Pool | None,
        clock: Callable[[], float],
        changes: ChangeFeed,
        progress: ProgressTracker,
        leader_election: LeaderElection,
        dry_runs: DryRunChecks,
    ) -> None:
        self._actor, self._store, self._pool_file, self._clock = actor, store, pool_file, clock
        self._changes, self._progress, self._leader_election = changes, progress, leader_election
        self._dry_runs = dry_runs
        self._fence_at_s: dict[str, float] = {}
        self._ordered_jobs: set[tuple[str, str]] = set()
        self._takeover_lock = threading.Lock()
        self._takeover = AgentTakeover(actor.query(Coordinator.agent_incarnations))

    def on_remote_report(self, event: AgentReported) -> None:
        """Record the agent incarnation of a report that another server applied."""
        with self._takeover_lock:
            self._takeover.record_takeover(event.cluster.name, event.incarnation)

    def owner_of(self, cluster: str) -> str | None:
        """Return the owner of `cluster` by the operator's file, else as its first agent named it."""
        if self._pool_file is not None:
            for known in self._pool_file.clusters:
                if known.name == cluster:
                    return known.owner
        return self._actor.query(lambda coordinator: _joined_owner(coordinator, cluster))

    def sync(self, report: AgentReport) -> AgentOrders:
        """Apply an agent's report and return its orders.

        Metrics and logs are stored first, so a job that has succeeded has all its output. Raises `InputError`
        for an unknown chip or owner, `ConflictError` for an agent that was replaced, and `UnavailableError`
        for the first report of an agent that takes over.
        """
        name = report.cluster.name
        check_cluster(report.cluster, self._pool_file)
        with self._takeover_lock:
            self._takeover.check(name, report.incarnation)
        self._store_output(report)
        now_s = self._clock()

        def answer(coordinator: Coordinator) -> AgentOrders:
            coordinator.record_report(name, now_s, report)
            checks = (*coordinator.preflight_orders(name), *self._dry_runs.orders(name))
            return AgentOrders(
                fence=coordinator.epoch,
                parts=coordinator.orders(name),
                queue=coordinator.site_queue(name),
                preflights=checks,
                opens_listener=coordinator.opens_listener(name),
                peers_to_check=coordinator.peers_to_check(name),
            )

        requests = [*self._fence_requests(report, now_s), *self._check_requests(report, now_s)]
        *_, reply = self._actor.execute([*requests, _report_request(report, now_s, answer)])
        orders: AgentOrders = reply.value()
        self._leader_election.record_report(name)
        self._ordered_jobs.update((part.job, name) for part in orders.parts)
        return orders

    def _fence_requests(self, report: AgentReport, now_s: float) -> list[ActorRequest]:
        """Return a request that raises the epoch if the agent has obeyed a later one, at most one per interval."""
        cluster = report.cluster.name
        if not report.fence or now_s - self._fence_at_s.get(cluster, -math.inf) < FENCE_INTERVAL_S:
            return []

        def propose(coordinator: Coordinator) -> Event | None:
            if report.fence <= coordinator.epoch:
                return None
            self._fence_at_s[cluster] = now_s
            return LogRestored(now_s=now_s, fence=report.fence, cluster=cluster)

        return [ActorRequest(lambda _: None, propose)]

    def _check_requests(self, report: AgentReport, now_s: float) -> list[ActorRequest]:
        """Return a request for each of the site's answers to checks, except those of dry runs."""
        cluster = report.cluster.name
        answers = [found for found in report.preflights if not self._dry_runs.add_answer(cluster, found)]
        return [
            ActorRequest(
                lambda _: None,
                lambda _, found=found: SiteChecked(now_s=now_s, cluster=cluster, answer=found),  # type: ignore[misc]
            )
            for found in answers
        ]

    def _store_output(self, report: AgentReport) -> None:
        """Store metrics and logs of jobs that have or had a part at the cluster.

        Output of other jobs and of deleted jobs is dropped.
        """
        named = {line.job for line in report.metrics} | {chunk.job for chunk in report.logs}
        if not named:
            return
        cluster = report.cluster.name

        def run_there(coordinator: Coordinator) -> set[str]:
            jobs = [job for job_id in named if (job := coordinator.state.jobs.get(job_id)) is not None]
            planned = {job.id for job in jobs if job.plan and cluster in job.plan.clusters}
            return planned | {job.id for job in jobs if (job.id, cluster) in self._ordered_jobs}

        accepted_jobs = self._actor.query(run_there)
        if accepted_jobs:
            metrics = [line for line in report.metrics if line.job in accepted_jobs]
            self._store.append_metrics(metrics)
            self._progress.record_metrics(metrics)
            self._store.append_logs([chunk for chunk in report.logs if chunk.job in accepted_jobs])
        for job_id in accepted_jobs:
            self._changes.record_output(job_id)


def _report_request(report: AgentReport, now_s: float, answer: Callable[[Coordinator], AgentOrders]) -> ActorRequest:
    return ActorRequest(answer, lambda _: AgentReported.from_report(report, now_s))


def _joined_owner(coordinator: Coordinator, cluster: str) -> str | None:
    """Return the owner that the cluster's agent has named, None if the cluster has not joined."""
    record = coordinator.state.clusters.get(cluster)
    return record.cluster.owner if record else None


def check_cluster(cluster: Cluster, pool_file: Pool | None) -> None:
    """Raise `InputError` if an agent's cluster names a chip or an owner that the pool does not define."""
    try:
        Pool(
            clusters=(cluster,),
            chips=pool_file.chips if pool_file else (),
            owners=pool_file.owners if pool_file else (),
        )
    except ValidationError as error:
        raise InputError(
            f"cluster '{cluster.name}' does not fit the pool: {error.errors()[0]['msg']}",
            hint="fix the cluster's file, or add the chip or owner to the server's pool file",
        ) from error
