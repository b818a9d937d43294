"""`Submissions`: accepts job submissions and rejects those that name unknown resources.

Only an equal key of the same user is the same job: submissions of equal content without one are different jobs, and
a random id that is already taken is drawn again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.placement import check_clusters, check_degrees, check_output_site, check_placement_names
from isthmus.control.queries.quotas import Quotas, check_live_jobs, check_submission
from isthmus.control.queries.settle_submission import is_settled_as, settle_submission
from isthmus.control.service.access.audit_log import make_line
from isthmus.control.service.auth import Caller
from isthmus.control.service.coordinator_actor import ActorRequest, CoordinatorActor
from isthmus.control.service.folders_in_use import FoldersInUse
from isthmus.control.state.events import Event, JobSubmitted
from isthmus.core.errors import ConflictError, IsthmusError, UnavailableError
from isthmus.core.job import PlacementConstraints
from isthmus.core.pool import Pool
from isthmus.core.runs.check_job import check_job
from isthmus.core.runs.job_id import RANDOM_BYTES, make_job_id
from isthmus.core.views.access_views import AuditRecord
from isthmus.core.views.api_views import Submission

MAX_DRAWS = 100
"""Ids drawn for one submission; with 128 random bits the first is free."""
ANYWHERE = PlacementConstraints()
"""Placement without constraints: any pool satisfies it."""


class Submissions:
    """Accepts submissions, single or in bulk.

    `pool_file` is the operator's pool, `clock` returns seconds, `draw` as many random bytes as its argument says.
    `quotas` limit what users submit, unless a submission is `exempt`; `high` grants it priority `high`.
    """

    def __init__(
        self,
        actor: CoordinatorActor,
        pool_file: Pool | None,
        clock: Callable[[], float],
        draw: Callable[[int], bytes] = secrets.token_bytes,
        quotas: Quotas | None = None,
    ) -> None:
        self._quotas = quotas
        self._actor, self._pool_file, self._clock, self._draw = actor, pool_file, clock, draw
        self._folders_in_use = FoldersInUse()

    def submit_request(
        self,
        user: str,
        submission: Submission,
        *,
        exempt: bool = False,
        high: bool = False,
        caller: Caller | None = None,
    ) -> ActorRequest:
        """Return the request that submits a job, with its audit line by `caller`; its result is the view of the job.

        A repeated user and key return the existing job. Its error is `ConflictError` if that job has other content,
        `InputError` if the placement names something the pool does not have, if fields contradict each other, or if a
        live job uses its folders, and `PlanError` for impossible parallel degrees; `QuotaError`, `TooLargeError` and
        `AuthError` beyond the quotas.
        """
        drawn = self._draw(RANDOM_BYTES)
        return self._request(
            user, submission, drawn, lambda coordinator, job_id: coordinator.job_view(job_id), exempt, high, caller
        )

    def submit_all(
        self,
        user: str,
        submissions: Sequence[Submission],
        *,
        exempt: bool = False,
        high: bool = False,
        caller: Caller | None = None,
    ) -> list[str | IsthmusError]:
        """Submit jobs independently of each other in one batch; return the id or the error of each."""
        drawn = self._draw(RANDOM_BYTES * len(submissions))
        parts = [drawn[RANDOM_BYTES * i : RANDOM_BYTES * (i + 1)] for i in range(len(submissions))]
        requests = [
            self._request(user, one, part, lambda _, job_id: job_id, exempt, high, caller)
            for one, part in zip(submissions, parts, strict=True)
        ]
        done = self._actor.execute(requests)
        return [_submission_outcome(request) for request in done]

    def _request(
        self,
        user: str,
        submission: Submission,
        drawn: bytes,
        make_answer: Callable[[Coordinator, str], object],
        exempt: bool,
        high: bool,
        caller: Caller | None,
    ) -> ActorRequest:
        """Return the request that submits a job; `make_answer` makes the answer from the job's id."""
        quotas = None if exempt else self._quotas
        now_s, wrong = self._clock(), _error_of(lambda: self.check(user, submission, exempt=exempt, high=high))
        job_id = make_job_id(submission.job.name, drawn)

        def propose(coordinator: Coordinator) -> Event | None:
            nonlocal job_id
            if coordinator.job_id_of_key(user, submission.key) is not None:
                return None
            if quotas is not None:
                check_live_jobs(quotas, coordinator.state, user)
            job_id = self._free_id(coordinator, submission.job.name, job_id)
            settled = self.settle(coordinator, user, submission, job_id)
            if wrong is not None:
                raise wrong
            return JobSubmitted(now_s=now_s, job_id=job_id, user=user, submission=settled)

        def answer(coordinator: Coordinator) -> object:
            known = coordinator.job_id_of_key(user, submission.key) or job_id
            if known != job_id and not _has_content(coordinator, known, submission):
                raise ConflictError(
                    f"key '{submission.key}' already belongs to another job, '{known}', with other content",
                    hint="use a new key for a new job",
                )
            return make_answer(coordinator, known)

        def lines(_coordinator: Coordinator, event: Event) -> tuple[AuditRecord, ...]:
            return (make_line("job-submitted", caller, event.now_s, job_id),) if caller is not None else ()

        return ActorRequest(answer, propose, lines)

    def check(self, user: str, submission: Submission, *, exempt: bool, high: bool = False) -> None:
        """Raise an error if the user may not submit such a job, or if its fields contradict each other or its model."""
        if self._quotas is not None and not exempt:
            check_submission(self._quotas, user, submission, high=high)
        check_content(submission)

    def _free_id(self, coordinator: Coordinator, name: str, job_id: str) -> str:
        """Return `job_id`, or another one drawn for this name if a job has it already."""
        for _ in range(MAX_DRAWS):
            if job_id not in coordinator.state.jobs:
                return job_id
            job_id = make_job_id(name, self._draw(RANDOM_BYTES))
        raise UnavailableError(
            f"{MAX_DRAWS} random ids for job '{name}' are all taken", hint="check the server's source of randomness"
        )

    def settle(self, coordinator: Coordinator, user: str, submission: Submission, job_id: str) -> Submission:
        """Return the submission as it is stored for job `job_id`.

        Raises `InputError` if a placement or `output_site` names something the pool lacks, or excludes every cluster,
        if `resume` cannot work, or if a live job uses a folder of the job.
        """
        joined = tuple(record.cluster for record in coordinator.state.clusters.values())
        if submission.job.output_site is not None:
            check_output_site(submission.job.output_site, joined, self._pool_file)
        if submission.job.placement != ANYWHERE:
            check_placement_names(submission.job.placement, joined, self._pool_file)
            check_clusters(submission.job.placement, joined, self._pool_file)
        settled = settle_submission(coordinator.state, user, submission, job_id)
        self._folders_in_use.check(coordinator.state, user, settled, job_id)
        return settled


def check_content(submission: Submission) -> None:
    """Raise `InputError` or `PlanError` if fields of a job contradict each other or its model."""
    check_job(submission.job, submission.model)
    check_degrees(submission.job, submission.model)


def _has_content(coordinator: Coordinator, job_id: str, submission: Submission) -> bool:
    """Return whether a job has the content of `submission`: its fields and its model."""
    known = coordinator.state.jobs[job_id]
    stored = known.submission
    return stored.model == submission.model and is_settled_as(stored.job, submission.job, job_id, known.user)


def _error_of(check: Callable[[], None]) -> IsthmusError | None:
    """Return the error that a check raises, None if it passes."""
    try:
        check()
    except IsthmusError as error:
        return error
    return None


def _submission_outcome(request: ActorRequest) -> str | IsthmusError:
    """Return the job id or the user's error of one submission; raise an internal error."""
    if request.error is not None and not isinstance(request.error, IsthmusError):
        raise request.error
    return request.error or request.result
