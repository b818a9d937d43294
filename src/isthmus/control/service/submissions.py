"""`Intake`: accepts job submissions, idempotent by key, and rejects those that name unknown resources."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.placement import check_clusters, check_degrees, check_placement
from isthmus.control.service.actor import Actor, Request
from isthmus.control.state.events import Event, JobSubmitted
from isthmus.core.errors import ConflictError, IsthmusError
from isthmus.core.job import Placement
from isthmus.core.messages.api_views import Submission
from isthmus.core.pool import Pool

ANYWHERE = Placement()
"""Placement without constraints: any pool satisfies it."""


class Intake:
    """Accepts submissions, single or in bulk. `file` is the operator's pool, `clock` returns seconds."""

    def __init__(self, actor: Actor, file: Pool | None, clock: Callable[[], float]) -> None:
        self._actor, self._file, self._clock = actor, file, clock

    def submission(self, user: str, submission: Submission) -> Request:
        """Return the request that submits a job; its result is the view of the job.

        A repeated user and key return the existing job. Its error is `InputError` if the placement names
        something the pool does not have, and `PlanError` for impossible parallel degrees.
        """
        new = _draw_ids([submission])[0]
        return self._request(user, submission, new, lambda coordinator, job_id: coordinator.job(job_id))

    def submit_all(self, user: str, submissions: Sequence[Submission]) -> list[str | IsthmusError]:
        """Submit jobs independently of each other in one batch; return the id or the error of each."""
        done = self._actor.settle(
            [
                self._request(user, one, new, lambda _, job_id: job_id)
                for one, new in zip(submissions, _draw_ids(submissions), strict=True)
            ]
        )
        return [_outcome(request) for request in done]

    def _request(
        self, user: str, submission: Submission, job_id: str, show: Callable[[Coordinator, str], object]
    ) -> Request:
        """Return the request that submits a job; `show` makes the answer from the job's id."""
        now_s, wrong = self._clock(), _wrong_degrees(submission)

        def propose(coordinator: Coordinator) -> Event | None:
            if coordinator.job_of_key(user, submission.key) is not None:
                return None
            self.check(coordinator, submission)
            if wrong is not None:
                raise wrong
            return JobSubmitted(now_s=now_s, job_id=job_id, user=user, submission=submission)

        def answer(coordinator: Coordinator) -> object:
            known = coordinator.job_of_key(user, submission.key) or job_id
            if known != job_id and coordinator.job(known).job != submission.job:
                raise ConflictError(
                    f"key '{submission.key}' already belongs to another job, '{known}'",
                    hint="use a new key for a new job",
                )
            return show(coordinator, known)

        return Request(answer, propose)

    def check(self, coordinator: Coordinator, submission: Submission) -> None:
        """Raise `InputError` if a placement names something the pool lacks, or excludes every cluster."""
        if submission.job.placement == ANYWHERE:
            return
        joined = tuple(record.cluster for record in coordinator.state.clusters.values())
        check_placement(submission.job.placement, joined, self._file)
        check_clusters(submission.job.placement, joined, self._file)


def _draw_ids(submissions: Sequence[Submission]) -> list[str]:
    """Return a new id for each job: its name, then eight random hexadecimal digits."""
    drawn = secrets.token_hex(4 * len(submissions))
    return [f"{one.job.name[:50]}-{drawn[8 * i : 8 * i + 8]}" for i, one in enumerate(submissions)]


def _wrong_degrees(submission: Submission) -> IsthmusError | None:
    """Return why the parallel degrees of a job are impossible, None if they are possible."""
    try:
        check_degrees(submission.job, submission.model)
    except IsthmusError as error:
        return error
    return None


def _outcome(request: Request) -> str | IsthmusError:
    """Return the job id or the user's error of one submission; raise an internal error."""
    if request.error is not None and not isinstance(request.error, IsthmusError):
        raise request.error
    return request.error or request.result
