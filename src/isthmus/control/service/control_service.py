"""`ControlService`: the control plane without its network side. It turns calls into events and queries.

The planner runs in the background and returns its result as an event. Metrics and logs bypass the actor.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from isthmus.control.algorithms.compaction_policy import CompactionPolicy
from isthmus.control.coordinator.admission import require_job, require_plan
from isthmus.control.coordinator.coordinator import Coordinator, CoordinatorConfig
from isthmus.control.placement import check_owner_name
from isthmus.control.queries.accepted_output import name_clusters
from isthmus.control.queries.catalogue.catalogue_versions import pin_versions
from isthmus.control.queries.dry_run import (
    DRY_RUN_JOB_ID,
    checking_sites,
    dry_run_requests,
    find_plans,
    query_dry_run,
)
from isthmus.control.queries.explain_wait import WaitQuery, answer_query, query_job, query_queue, query_queue_page
from isthmus.control.queries.history_page import history_page
from isthmus.control.queries.job_ranks import job_ranks
from isthmus.control.queries.monitoring.pool_figures import PoolFigures, pool_figures
from isthmus.control.queries.quotas import Quotas, limits_view
from isthmus.control.queries.usage_view import usage_view
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.access.catalogue_access import CatalogueAccess
from isthmus.control.service.access.console_sessions import ConsoleSessions
from isthmus.control.service.access.ledger_access import LedgerAccess
from isthmus.control.service.access.quota_access import QuotaAccess
from isthmus.control.service.access.site_admin import SiteAdmin
from isthmus.control.service.access.site_keys import SiteKeys
from isthmus.control.service.access.token_admin import TokenAdmin
from isthmus.control.service.access.token_gate import TokenGate
from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.service.agent_sessions import AgentSessions
from isthmus.control.service.auth import Caller
from isthmus.control.service.background_writes import BackgroundWriter
from isthmus.control.service.change_feed import Change, ChangeFeed
from isthmus.control.service.coordinator_actor import ActorRequest, AppliedEvent, CoordinatorActor
from isthmus.control.service.dry_run_checks import DryRunChecks
from isthmus.control.service.job_state_logger import JobStateLogger
from isthmus.control.service.leader import Leader, log_failure
from isthmus.control.service.metrics.ledger_watch import LedgerWatch
from isthmus.control.service.metrics.server_metrics import ServerMetrics
from isthmus.control.service.notify.notifier import Notifier
from isthmus.control.service.notify.notify_settings import NotifySettings
from isthmus.control.service.notify.subscription_access import SubscriptionAccess
from isthmus.control.service.oidc.device_sign_in import DeviceSignIn
from isthmus.control.service.oidc.oidc_provider import OidcProvider
from isthmus.control.service.oidc.oidc_sign_in import OidcSignIn
from isthmus.control.service.planner_queue import Planner, PlannerQueue
from isthmus.control.service.progress_tracker import ProgressTracker
from isthmus.control.service.submissions import Submissions
from isthmus.control.state.events import (
    AgentReported,
    BudgetReached,
    Event,
    ForgetJob,
    Instruction,
    JobCancelled,
    JobChanged,
    JobDeleted,
    JobSubmitted,
    MakePlans,
    NoticeDue,
    PlanChosen,
    PreemptionAgreed,
    SiteEnrolling,
    SiteGone,
    SiteLeft,
    UnknownJobEnded,
    VictimNamed,
)
from isthmus.control.store.leader_election import LeaderElection, SingleServer
from isthmus.control.store.log_base import LogBase
from isthmus.control.store.log_compactor import LogCompactor
from isthmus.control.store.snapshot_file import SnapshotFile
from isthmus.control.store.store_interface import Store
from isthmus.core.errors import NotFoundError
from isthmus.core.job import Job
from isthmus.core.messages.preflight import SitePreflight
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.views.access_views import AuditRecord, LimitsView
from isthmus.core.views.api_views import (
    HistoryPage,
    JobFilter,
    JobView,
    LogPage,
    MetricsPage,
    PoolView,
    Submission,
    TokenRequest,
    TokenView,
)
from isthmus.core.views.queue_status import DryRun, QueuePage, QueueStatus
from isthmus.core.views.rank_views import RankView
from isthmus.core.views.site_views import InvitationRequest, InvitationWithCode
from isthmus.core.views.usage_views import UsageView

SNAPSHOT_INTERVAL_EVENTS = 20_000
"""Minimum number of events between two snapshots; a fifth of the number of jobs where that is more."""
TICK_S = 0.5
"""Interval between ticks: a tick fires expired timers and reads what other servers appended."""

T = TypeVar("T")


class ControlService:
    """The running control plane without its network side. `clock` returns seconds since the Unix epoch.

    `pool_file` is the operator's pool file: links, owners, chip definitions and the owners of named clusters.
    Clusters join and leave with their agents. Several servers may share one store: the one that holds
    `leader_election` plans jobs, fires timers and compacts the log by `compaction` (`LogCompactor`, which calls
    `before_compaction`); users and agents may connect to any of them. Keys of jobs at switches follow from
    `switch_secret`, which all servers of a store share.
    """

    def __init__(
        self,
        store: Store,
        pool_file: Pool | None = None,
        *,
        planner: Planner,
        rules: CoordinatorConfig | None = None,
        clock: Callable[[], float] = time.time,
        leader_election: LeaderElection | None = None,
        snapshot_file: SnapshotFile | None = None,
        snapshot_interval_events: int = SNAPSHOT_INTERVAL_EVENTS,
        num_planners: int = 1,
        quotas: Quotas | None = None,
        compaction: CompactionPolicy | None = None,
        before_compaction: Callable[[LogBase], None] = lambda _: None,
        switch_secret: bytes | None = None,
        notify: NotifySettings | None = None,
        oidc: OidcProvider | None = None,
    ) -> None:
        self.store, self.pool_file, self.clock, self.quotas = store, pool_file, clock, quotas
        self._constructed = False
        self.audit = AuditLog(store, clock)
        self.gate = TokenGate(TokenRegistry(store, clock))
        self.tokens = TokenAdmin(self.gate.registry, self.audit, clock)
        self.sessions = ConsoleSessions(self.gate.registry, self.audit, clock)
        self.oidc = OidcSignIn(oidc, self.sessions, self.gate.registry, self.audit, clock)
        self.device_oidc = DeviceSignIn(oidc, self.gate.registry, self.audit, clock)
        self.changes = ChangeFeed()
        self._leader_election: LeaderElection = leader_election or SingleServer()
        self._planner_queue = PlannerQueue(
            planner,
            pool_file,
            clock,
            self._propose_as_leader,
            num_workers=num_planners,
            is_wanted=self._is_planning_wanted,
        )
        self._closed = threading.Event()
        self._job_state_logger, self.server_metrics = JobStateLogger(), ServerMetrics()
        # Last event of the newest snapshot: of the one that was loaded, 0 without one.
        self._snapshot_event, self._snapshot_interval = 0, snapshot_interval_events
        self._progress, self._ledger_watch = ProgressTracker(), LedgerWatch()
        # Gauges that do not change while the server runs: metric name to (help text, value).
        self.fixed_gauges: dict[str, tuple[str, float]] = {}
        self._actor = CoordinatorActor(
            store,
            self._on_event_applied,
            rules,
            self.server_metrics.record_append,
            snapshot_file,
            self._restore_from_snapshot,
        )
        self._background_writer = BackgroundWriter(self._actor)
        self._leader = Leader(
            self._actor,
            self._leader_election,
            pool_file,
            clock,
            functools.partial(self._execute_instructions, own=True),
        )
        self._compactor = LogCompactor(
            store,
            compaction or CompactionPolicy(),
            self._actor.durable_state,
            self._leader.append,
            before_compaction,
        )
        self.submissions = Submissions(self._actor, pool_file, clock, quotas=quotas)
        self.catalogue = CatalogueAccess(self._actor, self.audit, clock, quotas)
        self._dry_run_checks = DryRunChecks(clock)
        self.agents = AgentSessions(
            self._actor,
            store,
            pool_file,
            clock,
            self.changes,
            self._progress,
            self._leader_election,
            self._dry_run_checks,
            quotas=quotas,
            switch_secret=switch_secret,
            record_figures=self.server_metrics.record_figures,
        )
        self.site_keys = SiteKeys(self._actor, self.gate.registry, self.audit, clock)
        self.sites = SiteAdmin(self._actor, self.site_keys, self.audit, clock)
        self.ledger = LedgerAccess(self._actor, self.audit, clock, pool_file)
        settings = notify or NotifySettings()
        self.subscriptions = SubscriptionAccess(self._actor, store, settings, self.audit, clock)
        self.notifier = Notifier(
            store,
            self.subscriptions.find,
            settings,
            self.audit,
            clock,
            lambda: self._leader.is_leader,
            self.server_metrics.record_message,
        )
        self.quotas_of_accounts = QuotaAccess(self._actor, self.audit, clock)
        self._tick_thread = threading.Thread(target=self._tick_loop, name="ticks", daemon=True)
        # Its own thread: a tick may take long, and a revoked token is rejected within a second.
        self._token_thread = threading.Thread(target=self._token_loop, name="tokens", daemon=True)
        self._constructed = True

    def start(self) -> None:
        """Become leader if possible, resume pending planning requests, and start ticking."""
        self.gate.registry.refresh()
        self.audit.prune()
        self._leader.update_leadership()
        self._tick_thread.start()
        self._token_thread.start()
        self.notifier.start()

    def close(self) -> None:
        """Stop ticking and planning. Every acknowledged event is already on disk."""
        self.changes.close()
        self._closed.set()
        for thread in (self._tick_thread, self._token_thread):
            if thread.is_alive():
                thread.join()
        self._dry_run_checks.close()
        self.notifier.close()
        self._leader_election.release()
        self._planner_queue.close()
        self._background_writer.close()
        self.audit.close()

    def execute(self, requests: Sequence[ActorRequest]) -> Sequence[ActorRequest]:
        """Execute requests; return once their events are on disk."""
        return self._actor.execute(requests)

    def jobs(
        self, user: str | None, wanted: JobFilter, *, after: str | None, limit: int, newest_first: bool
    ) -> tuple[tuple[JobView, ...], str | None]:
        """Return up to `limit` jobs (of one user) that follow job `after` and meet `wanted`, without plans.

        The second value is the job after which the next page starts, None at the end. Raises `NotFoundError` if
        job `after` does not exist.
        """
        return self._query(
            lambda coordinator: coordinator.find_jobs(user, wanted, after=after, limit=limit, newest_first=newest_first)
        )

    def job(self, job_id: str) -> JobView:
        """Return a job; raise `NotFoundError` if it does not exist."""
        return self._query(lambda coordinator: coordinator.job_view(job_id))

    def current_views(self, changes: Sequence[Change]) -> list[tuple[Change, JobView | None]]:
        """Return each change with the job's current view without plans, None for a deleted job."""

        def views(coordinator: Coordinator) -> list[tuple[Change, JobView | None]]:
            return [(change, _job_view(coordinator, change)) for change in changes]

        return self._query(views) if changes else []

    def last_event(self) -> int:
        """Return the number of the last event applied on this server."""
        return self._actor.last_event_number

    def queue(self, user: str | None) -> tuple[QueueStatus, ...]:
        """Return the queue status of waiting jobs (of one user), in expected starting order."""
        now_s, paces = self.clock(), self._progress.job_progress()
        return answer_query(self._query(lambda coordinator: query_queue(coordinator.state, now_s, paces, user)))

    def limits(self) -> LimitsView:
        """Return the operator's limits and who uses most of them."""
        quotas = self.quotas or Quotas()
        return self._query(lambda coordinator: limits_view(quotas, coordinator.state))

    def queue_page(self, user: str | None, start: int, limit: int) -> QueuePage:
        """Return the jobs (of one user) with a place in the queue, from the one at index `start` on."""
        now_s, paces = self.clock(), self._progress.job_progress()
        query, length = self._query(
            lambda coordinator: query_queue_page(coordinator.state, now_s, paces, user, start, limit)
        )
        return QueuePage(start=start, length=length, jobs=answer_query(query))

    def queue_status(self, job_id: str, user: str | None) -> QueueStatus:
        """Return a job's queue status as `user` may see it; None stands for an operator."""
        now_s, paces = self.clock(), self._progress.job_progress()

        def ask(coordinator: Coordinator) -> WaitQuery:
            return query_job(coordinator.state, require_job(coordinator.state, job_id), now_s, paces, user)

        return answer_query(self._query(ask))[0]

    def ranks(self, job_id: str) -> tuple[RankView, ...]:
        """Return the ranks of a job with their addresses and peers; raises `ConflictError` without a plan."""
        return self._query(lambda coordinator: job_ranks(coordinator.state, require_job(coordinator.state, job_id)))

    def usage(self, *, owner: str | None = None, cluster: str | None = None, user: str | None = None) -> UsageView:
        """Return the chip-hours of an owner, a cluster or a user; None stands for all of them."""
        now_s = self.clock()
        return self._query(
            lambda coordinator: usage_view(coordinator.state, now_s, owner=owner, cluster=cluster, user=user)
        )

    def dry_run(self, user: str, given: Submission, *, exempt: bool = False, high: bool = False) -> DryRun:
        """Return the plans, queue status, preemption victims and checks of a job without submitting it.

        Raises the errors of a submission, `PlanError` if the job cannot be planned and `ConflictError` if the
        planner is busy.
        """
        self.submissions.check(user, given, exempt=exempt, high=high)

        def ask(coordinator: Coordinator) -> tuple[Submission, tuple[MakePlans, MakePlans]]:
            self.submissions.settle(coordinator, user, given, DRY_RUN_JOB_ID)
            pinned = given.model_copy(update={"job": pin_versions(coordinator.state, user, given.job)})
            return pinned, dry_run_requests(coordinator.state, user, pinned)

        submission, asks = self._query(ask)
        plans = find_plans(asks, self._planner_queue.plan_now)
        now_s, paces = self.clock(), self._progress.job_progress()
        asked = self._query(lambda c: query_dry_run(c.state, user, submission, plans, now_s, paces))
        sites = self._query(lambda coordinator: checking_sites(coordinator.state))
        checks = self._dry_run_checks.run(user, submission.job, plans.plans[0], sites) if plans.plans else ()
        return DryRun(plans=plans, standing=answer_query(asked.query)[0], victims=asked.victims, preflight=checks)

    def check_plan(self, job_id: str, plan_id: str, timeout_s: float) -> tuple[SitePreflight, ...]:
        """Return what the sites of a candidate plan find within `timeout_s`; raise `NotFoundError` without the plan."""

        def ask(coordinator: Coordinator) -> tuple[str, Job, Plan, frozenset[str]]:
            job = require_job(coordinator.state, job_id)
            return job.user, job.spec, require_plan(job, plan_id), checking_sites(coordinator.state)

        return self._dry_run_checks.run(*self._query(ask), timeout_s)

    def choose(self, job_id: str, plan_id: str, audit: AuditRecord | None = None) -> JobView:
        """Choose one of a job's candidate plans."""
        event = PlanChosen(now_s=self.clock(), job_id=job_id, plan_id=plan_id)
        return self._actor.propose(lambda _: event, lambda coordinator: coordinator.job_view(job_id), audit)

    def preempt(self, job_id: str, victims: tuple[VictimNamed, ...], audit: AuditRecord | None = None) -> JobView:
        """Give a waiting job the chips of exactly these victims, all or none."""
        event = PreemptionAgreed(now_s=self.clock(), job_id=job_id, victims=victims)
        return self._actor.propose(lambda _: event, lambda coordinator: coordinator.job_view(job_id), audit)

    def cancel(self, job_id: str, by: str = "", audit: AuditRecord | None = None) -> JobView:
        """Stop a job at all sites; `by` is the role and name of a caller that is not its user."""
        event = JobCancelled(now_s=self.clock(), job_id=job_id, by=by)
        return self._actor.propose(lambda _: event, lambda coordinator: coordinator.job_view(job_id), audit)

    def end_unknown(self, job_id: str, audit: AuditRecord | None = None) -> PoolView:
        """End a job that sites run and that the log does not have since its restore."""
        self._propose(UnknownJobEnded(now_s=self.clock(), job_id=job_id), audit)
        return self.pool()

    def delete(self, job_id: str, audit: AuditRecord | None = None) -> None:
        """Delete an ended job with its metrics and logs."""
        self._propose(JobDeleted(now_s=self.clock(), job_id=job_id), audit)

    def declare_site_gone(self, cluster: str, by: str, audit: AuditRecord | None = None) -> PoolView:
        """Count everything of the pool at a lost site as ended; its agent is never admitted again."""
        event = SiteGone(now_s=self.clock(), cluster=cluster, by=by)
        return self._actor.propose(lambda _: event, lambda coordinator: coordinator.pool_view(), audit)

    def enrol_site(self, cluster: str, by: str, audit: AuditRecord | None = None) -> PoolView:
        """Let the next new agent of a cluster take the place of the enrolled one."""
        event = SiteEnrolling(now_s=self.clock(), cluster=cluster, by=by)
        return self._actor.propose(lambda _: event, lambda coordinator: coordinator.pool_view(), audit)

    def invite(self, caller: Caller, request: InvitationRequest) -> InvitationWithCode:
        """Make an invitation; raise `InputError` for an owner that the pool does not have."""
        self._check_owner(request.owner)
        return self.site_keys.invite(caller, request)

    def make_token(self, caller: Caller, request: TokenRequest) -> TokenView:
        """Create a token for `caller`; raise `InputError` for an owner that the pool does not have."""
        if request.role == "owner":
            self._check_owner(request.name)
        return self.tokens.create(caller, request)

    def _check_owner(self, name: str) -> None:
        joined = self._query(lambda c: tuple(record.cluster for record in c.state.clusters.values()))
        check_owner_name(name, joined, self.pool_file)

    def metrics(self, job_id: str, after: int, limit: int, *, newest: bool = False) -> MetricsPage:
        """Return a page of a job's step metrics; see `Store.metrics`."""
        return self.store.metrics(job_id, after=after, limit=limit, newest=newest)

    def history(self, job_id: str, after: int, limit: int) -> HistoryPage:
        """Return a page of a job's history; raise `NotFoundError` if the job does not exist."""
        return self._query(lambda coordinator: history_page(require_job(coordinator.state, job_id), after, limit))

    def logs(self, job_id: str, after: int, rank: int | None, limit: int) -> LogPage:
        """Return a page of a job's log text, with the site of each rank."""
        page = self.store.logs(job_id, after=after, rank=rank, limit=limit)
        chunks = self._query(lambda coordinator: name_clusters(coordinator.state, page.chunks))
        return page.model_copy(update={"chunks": chunks})

    def pool(self) -> PoolView:
        """Return the current state of the pool."""
        links = self.pool_file.links if self.pool_file else ()
        return self._query(lambda coordinator: coordinator.pool_view(links))

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return this server's gauges: metric name to (help text, value)."""

        def read(coordinator: Coordinator) -> int:
            self._ledger_watch.follow(coordinator.state.meter.ledger)
            return coordinator.epoch

        epoch, ledger = self._query(read), self._ledger_watch
        return {
            "isthmus_leader": ("1 while this server is the leader.", self._leader.is_leader),
            "isthmus_epoch": ("Number of leadership epochs so far.", epoch),
            "isthmus_last_event": ("Number of the last event in the log.", self.last_event()),
            "isthmus_ledger_entries": ("Entries of the ledger.", ledger.num_entries),
            "isthmus_ledger_sum_millionths": ("Sum of all entries, 0 in an intact ledger.", ledger.sum_millionths),
            "isthmus_ledger_unpaired_entries": ("Entries without their counterpart.", ledger.num_unpaired),
            "isthmus_notices_waiting": ("Notices that wait for their delivery.", self.notifier.num_waiting),
            **self.fixed_gauges,
        }

    def figures(self) -> PoolFigures:
        """Return what metrics say of jobs, parts and links."""
        now_s, progress = self.clock(), self._progress.job_progress()
        return self._query(lambda coordinator: pool_figures(coordinator.state, now_s, progress))

    def _query(self, question: Callable[[Coordinator], T]) -> T:
        return self._actor.query(question)

    def _propose(self, event: Event, audit: AuditRecord | None = None) -> None:
        self._actor.propose(lambda _: event, lambda _: None, audit)

    def _is_planning_wanted(self, request: MakePlans) -> bool:
        """Return whether the job still waits for the answer to this request."""
        return self._query(lambda coordinator: coordinator.awaits_plans(request.job_id, request.round))

    def _propose_as_leader(self, event: Event) -> None:
        self._background_writer.enqueue(event.kind, self._leader.request(event))

    def _restore_from_snapshot(self, number: int, coordinator: Coordinator) -> None:
        """Restore from a snapshot what `_on_event_applied` derives from events."""
        self._snapshot_event = number
        jobs = coordinator.state.jobs
        self.changes.restore({job_id: job.user for job_id, job in jobs.items()}, number)
        self.server_metrics.restore_job_states({job_id: job.state for job_id, job in jobs.items()})

    def _on_event_applied(self, folded: AppliedEvent) -> None:
        """Update change feed, logs and metrics from a durable event, and execute its instructions.

        Events applied during construction only initialise the state, even if another server appended them.
        """
        live = folded.live and self._constructed
        self.server_metrics.record_event(folded)
        if isinstance(folded.event, JobSubmitted):
            self.changes.record_submission(folded.event.job_id, folded.event.user)
        if live:
            self._job_state_logger.log_restore(folded)
        for instruction in folded.instructions:
            match instruction:
                case JobChanged(job_id=job_id):
                    self.changes.record_change(job_id, folded.number)
                    if live:
                        self._job_state_logger.log_changes(folded, job_id)
                case ForgetJob(job_id=job_id):
                    self.changes.record_deletion(job_id, folded.number)
                    self._job_state_logger.forget(job_id)
                    self.server_metrics.forget_job(job_id)
                    self._progress.forget(job_id)
        if live and not folded.appended_here and isinstance(folded.event, AgentReported):
            self.agents.on_remote_report(folded.event)
        if live and isinstance(folded.event, SiteLeft):
            self.agents.on_site_left(folded.event.cluster)
        if live:
            self._execute_instructions(folded.instructions, own=folded.appended_here)

    def _execute_instructions(self, instructions: Iterable[Instruction], *, own: bool) -> None:
        for instruction in instructions:
            match instruction:
                case NoticeDue():
                    self.notifier.wake()
                case MakePlans() if self._leader.is_leader:
                    self._planner_queue.enqueue(instruction)
                case BudgetReached() if own:
                    self.audit.record("budget-reached", None, instruction.account, instruction.text)
                case ForgetJob(job_id=job_id) if own:
                    log_failure(f"forget the lines of job {job_id}", lambda: self.store.delete_job_output(job_id))

    def _tick_loop(self) -> None:
        while not self._closed.wait(TICK_S):
            log_failure("a tick", self.tick)

    def tick(self) -> None:
        """Save a snapshot if due, read the log, and fire expired timers and compact the log if this server leads."""
        self._save_snapshot_if_due()
        self._leader.tick()
        if self._leader.is_leader:
            self._compactor.step(self.clock(), self._actor.last_event_number)

    def _token_loop(self) -> None:
        while not self._closed.wait(TICK_S):
            log_failure("reading the tokens", self._follow_tokens)

    def _follow_tokens(self) -> None:
        self.gate.registry.refresh()
        self.gate.report_failures(self.audit.record_failed_login)

    def _save_snapshot_if_due(self) -> None:
        """Save a snapshot once enough events were applied since the last one."""
        since = self._actor.last_event_number - self._snapshot_event
        if (
            since >= self._snapshot_interval
            and since >= self._query(lambda coordinator: len(coordinator.state.jobs)) // 5
        ):
            self._snapshot_event = self._actor.save_snapshot()


def _job_view(coordinator: Coordinator, change: Change) -> JobView | None:
    """Return the current view of a changed job without its plans, None if it was deleted."""
    try:
        return coordinator.job_view(change.job_id).model_copy(update={"plans": None})
    except NotFoundError:
        return None
