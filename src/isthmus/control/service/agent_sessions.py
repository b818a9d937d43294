"""`SiteDesk`: what the agents of sites report and are told."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pydantic import ValidationError

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.actor import Actor
from isthmus.control.service.agent_takeover import Incumbents
from isthmus.control.service.change_feed import Changes
from isthmus.control.service.progress import Progress
from isthmus.control.state.events import AgentReported
from isthmus.control.store.leadership import Leadership
from isthmus.control.store.store import Store
from isthmus.core.errors import InputError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport
from isthmus.core.pool import Cluster, Pool


class SiteDesk:
    """One report at a time is taken in and answered. `file` is the operator's pool, `clock` gives seconds.

    Lines of metrics and logs go to the `store`; `changes` and `progress` are told of them, and `leadership`
    of who was heard.
    """

    def __init__(
        self,
        actor: Actor,
        store: Store,
        file: Pool | None,
        clock: Callable[[], float],
        changes: Changes,
        progress: Progress,
        leadership: Leadership,
    ) -> None:
        self._actor, self._store, self._file, self._clock = actor, store, file, clock
        self._changes, self._progress, self._leadership = changes, progress, leadership
        self._seen_at: set[tuple[str, str]] = set()
        self._incumbents_lock = threading.Lock()
        self._incumbents = Incumbents(actor.ask(Coordinator.incarnations))

    def heard_elsewhere(self, event: AgentReported) -> None:
        """Keep up with which process speaks for a site, by a report that another server took in."""
        with self._incumbents_lock:
            self._incumbents.note(event.cluster.name, event.incarnation)

    def owner_of(self, cluster: str) -> str | None:
        """Return the owner under whom the pool knows `cluster`: the operator's file, else its first agent."""
        if self._file is not None:
            for known in self._file.clusters:
                if known.name == cluster:
                    return known.owner
        return self._actor.ask(lambda coordinator: _first_owner(coordinator, cluster))

    def sync(self, report: AgentReport) -> AgentOrders:
        """Take an agent's report in and answer with its orders.

        Metrics and logs are on disk first, so that a job which has succeeded has all its lines. Raises
        `InputError` for a chip or owner nobody knows, `ConflictError` for an agent that was replaced, and
        `UnavailableError` for the first report of one that takes over.
        """
        name = report.cluster.name
        check_cluster(report.cluster, self._file)
        with self._incumbents_lock:
            self._incumbents.check(name, report.incarnation)
        self._store_lines(report)
        now_s = self._clock()

        def answer(coordinator: Coordinator) -> AgentOrders:
            coordinator.hear(name, now_s, report)
            parts, queue = coordinator.orders(name), coordinator.queue(name)
            return AgentOrders(fence=coordinator.epoch, parts=parts, queue=queue)

        orders = self._actor.take(lambda _: AgentReported.of(report, now_s), answer)
        self._leadership.hear(name)
        self._seen_at.update((part.job, name) for part in orders.parts)
        return orders

    def _store_lines(self, report: AgentReport) -> None:
        """Keep the lines of jobs that have or had a part at the cluster; those of others are dropped.

        So are those that still come of a job that has been deleted.
        """
        named = {line.job for line in report.metrics} | {chunk.job for chunk in report.logs}
        if not named:
            return
        cluster = report.cluster.name

        def run_there(coordinator: Coordinator) -> set[str]:
            jobs = [job for job_id in named if (job := coordinator.state.jobs.get(job_id)) is not None]
            planned = {job.id for job in jobs if job.plan and cluster in job.plan.clusters}
            return planned | {job.id for job in jobs if (job.id, cluster) in self._seen_at}

        ours = self._actor.ask(run_there)
        if ours:
            metrics = [line for line in report.metrics if line.job in ours]
            self._store.append_metrics(metrics)
            self._progress.note(metrics)
            self._store.append_logs([chunk for chunk in report.logs if chunk.job in ours])
        for job_id in ours:
            self._changes.note_lines(job_id)


def _first_owner(coordinator: Coordinator, cluster: str) -> str | None:
    """Return the owner that the agent of a cluster has named, None where none has joined."""
    record = coordinator.state.clusters.get(cluster)
    return record.cluster.owner if record else None


def check_cluster(cluster: Cluster, file: Pool | None) -> None:
    """Raise `InputError` where an agent's cluster has a chip or an owner that the pool does not know."""
    try:
        Pool(clusters=(cluster,), chips=file.chips if file else (), owners=file.owners if file else ())
    except ValidationError as error:
        raise InputError(
            f"cluster '{cluster.name}' does not fit the pool: {error.errors()[0]['msg']}",
            hint="mend the cluster's file, or add the chip or owner to the server's pool file",
        ) from error
