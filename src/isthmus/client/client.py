"""`Client`: submit, plan, follow and cancel jobs from Python."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import resolve_settings
from isthmus.client.job_events import JobEvents
from isthmus.client.job_filter import make_job_filter
from isthmus.client.log_lines import LogLine, LogLines
from isthmus.client.outage import Outage
from isthmus.client.read_job import complete_job, read_job
from isthmus.client.resolve_job import TERMINAL_STATES, find_job_id
from isthmus.client.site_checks import await_checks, require_not_refused
from isthmus.client.submission_folders import check_run_folders
from isthmus.core.errors import ConflictError, PlanError, UnavailableError
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.model import require_trainable
from isthmus.core.plan import PlanSet
from isthmus.core.views.api_views import JobState, JobView, PoolView, Submission
from isthmus.core.views.queue_status import DryRun

if TYPE_CHECKING:
    import httpx

POLL_S = 0.3
"""Interval of questions to the server while its planner works, in seconds."""


@dataclass(frozen=True)
class JobUpdate:
    """A change of a followed job: its present view, and the step metrics that have arrived since the last update."""

    view: JobView
    metrics: tuple[StepMetrics, ...] = ()

    @property
    def step(self) -> int | None:
        """The latest step among the new metrics, None without any."""
        return max((one.step for one in self.metrics), default=None)

    @property
    def loss(self) -> float | None:
        """The training loss of the latest step that has one among the new metrics, None without any."""
        losses = [(one.step, one.values["loss"]) for one in self.metrics if one.values.get("loss") is not None]
        return max(losses)[1] if losses else None


@dataclass(frozen=True)
class _SystemClock:
    """The time of this machine, or of a test."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class Client:
    """A connection to a pool's server; a context manager.

    `Client(server, token_file=..., ca=...)`; what is not given comes from the settings of the command line:
    `ISTHMUS_SERVER`, `ISTHMUS_TOKEN_FILE` or `ISTHMUS_TOKEN`, `ISTHMUS_CA`, then the context file. `transport`, `now`
    and `sleep` replace the network and the clock in tests. A `job` argument is a job's id, a unique id prefix, a name
    (the latest job with it), or a `JobView`.

    Every method raises an `IsthmusError`: its `message` says what is wrong with which value, its `hint` what to do
    next. `NotFoundError`: no such job or plan; `AuthError`: a missing token or permission; `ConflictError`: not
    possible in the present state; `InputError`: an invalid file or value; `UnavailableError`: no server.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        ca: str | os.PathLike[str] | None = None,
        transport: httpx.BaseTransport | None = None,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        settings = resolve_settings(
            os.environ,
            server=server,
            token_file=Path(token_file) if token_file is not None else None,
            ca=Path(ca) if ca is not None else None,
        )
        self._clock = _SystemClock(now, sleep)
        self._api = ApiClient(settings.server, settings.token, settings.ca, transport=transport, sleep=sleep)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Jobs continue."""
        self._api.close()

    def submit(
        self,
        job: str | os.PathLike[str] | Job,
        *,
        auto: bool = False,
        key: str | None = None,
        checks_wait_s: float = 0.0,
    ) -> JobView:
        """Submit a job file, or a `Job` with absolute paths; return the job as the server sees it.

        `auto` takes the plan that is predicted to be fastest, as `policy: auto` in the job does; otherwise `choose`
        starts the job. A retry with the same `key` returns the same job.

        The sites check the job's files after this returns; with `checks_wait_s` it waits up to that long for them, and
        raises `ConflictError` with what they found if they refuse the job.
        """
        view = self._api.submit(self._make_submission(job, auto=auto, key=key or secrets.token_hex(16)))
        if checks_wait_s > 0:
            clock = self._clock
            view, found = await_checks(self._api, view, limit_s=checks_wait_s, now=clock.now, sleep=clock.sleep)
            require_not_refused(view, found)
        return view

    def dry_run(self, job: str | os.PathLike[str] | Job) -> DryRun:
        """Return the plans, queue position and expected start that a job would have, without submitting it."""
        return self._api.dry_run(self._make_submission(job))

    def job(self, job: str | JobView) -> JobView:
        """Return the present view of a job, with its candidate plans."""
        return self._api.job(self._id(job))

    def jobs(
        self,
        *,
        state: Sequence[JobState] = (),
        name: str | None = None,
        user: str | None = None,
        owner: str | None = None,
        since_s: float | None = None,
        limit: int | None = None,
    ) -> list[JobView]:
        """Return your jobs (an admin: all), latest first, without their plans; every filter given must be met.

        `owner` keeps jobs whose plan uses a cluster of that owner, `since_s` those submitted since that time
        (seconds since the epoch).
        """
        wanted = make_job_filter(state=state, name=name, user=user, owner=owner, since_s=since_s)
        return self._api.jobs(wanted, limit=limit)

    def plans(self, job: str | JobView, *, timeout_s: float = 60.0) -> PlanSet:
        """Return a job's candidate plans, fastest first, and the refused combinations; wait for the planner.

        Raises `PlanError` if the job has ended without plans, `ConflictError` after `timeout_s`.
        """
        job_id, end_s = self._id(job), self._clock.now() + timeout_s
        view = self._api.job(job_id)
        while view.state == "planning" and self._clock.now() < end_s:
            self._clock.sleep(POLL_S)
            view = self._api.job(job_id)
        if view.state == "planning":
            raise ConflictError(f"job {job_id} is still being planned after {timeout_s:g} s", hint="ask again later")
        if view.state == "failed" and view.plans is None:
            raise PlanError(f"job {job_id} failed: {view.reason}", hint="correct the job and submit it again")
        return self._api.plans(job_id)

    def choose(self, job: str | JobView, plan: str) -> JobView:
        """Choose a plan of the job by its id; the job starts once its chips are free."""
        return self._api.choose(self._id(job), plan)

    def watch(self, job: str | JobView, *, interval_s: float = 1.0) -> Iterator[JobUpdate]:
        """Yield an update at each change of a job, at most one per `interval_s`, until it has ended.

        The last update has the job's final state. Waits for a server that restarts; raises `UnavailableError` if it
        is away for longer than a minute. Leaving the iterator does not end the job.
        """
        job_id, cursor = self._id(job), 0
        outage = Outage(self._clock)
        with JobEvents(self._clock, self._api, job_id, interval_s, lambda _: None) as changes:
            while True:
                try:
                    view = self._api.job(job_id)
                    metrics, cursor = self._metrics_after(job_id, cursor)
                    outage.reset()
                except UnavailableError as error:
                    outage.raise_if_expired(error)
                else:
                    yield JobUpdate(view, metrics)
                    if view.state in TERMINAL_STATES:
                        return
                changes.wait()

    def metrics(self, job: str | JobView) -> tuple[StepMetrics, ...]:
        """Return all step metrics of a job, in the order of their arrival."""
        return self._metrics_after(self._id(job), 0)[0]

    def logs(self, job: str | JobView, *, rank: int | None = None) -> Iterator[LogLine]:
        """Yield the lines that the workers (or one rank) have logged so far."""
        job_id, cursor, lines = self._id(job), 0, LogLines()
        while (page := self._api.logs(job_id, after=cursor, rank=rank)).chunks:
            yield from lines.add(page.chunks)
            cursor = page.next
        yield from lines.flush()

    def cancel(self, job: str | JobView) -> JobView:
        """Stop a job at all sites; its checkpoints are kept."""
        return self._api.cancel(self._id(job))

    def pool(self) -> PoolView:
        """Return the clusters with their free chips, and the links."""
        return self._api.pool()

    def _id(self, job: str | JobView) -> str:
        return job.id if isinstance(job, JobView) else find_job_id(self._api, job)

    def _metrics_after(self, job_id: str, cursor: int) -> tuple[tuple[StepMetrics, ...], int]:
        found: list[StepMetrics] = []
        while (page := self._api.metrics(job_id, after=cursor)).metrics:
            found += page.metrics
            cursor = page.next
        return tuple(found), cursor

    def _make_submission(self, job: str | os.PathLike[str] | Job, *, auto: bool = False, key: str = "") -> Submission:
        """Return the submission of a job file or job, complete and checked as the command line does it."""
        entries = self._api.entries
        read = complete_job(job, Path.cwd(), entries) if isinstance(job, Job) else read_job(Path(job), entries)
        require_trainable(read.model)
        given = check_run_folders(self._api, read.job, read.model, key or None)
        if auto:
            given = given.model_copy(update={"policy": "auto"})
        return Submission(job=given, model=read.model, key=key)
