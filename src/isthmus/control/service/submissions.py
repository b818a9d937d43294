"""`Submissions`: accepts job submissions, idempotent by key, and rejects those that name unknown resources."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.placement import check_clusters, check_degrees, check_placement_names
from isthmus.control.service.coordinator_actor import ActorRequest, CoordinatorActor
from isthmus.control.state.events import Event, JobSubmitted
from isthmus.core.errors import ConflictError, IsthmusError
from isthmus.core.job import PlacementConstraints
from isthmus.core.messages.api_views import Submission
from isthmus.core.pool import Pool

ANYWHERE = PlacementConstraints()
"""Placement without constraints: any pool satisfies it."""


class Submissions:
    """Accepts submissions, single or in bulk. `pool_file` is the operator's pool, `clock` returns seconds."""

    def __init__(self, actor: CoordinatorActor, pool_file: Pool | None, clock: Callable[[], float]) -> None:
        self._actor, self._pool_file, self._clock = actor, pool_file, clock

    def submit_request(self, user: str, submission: Submission) -> ActorRequest:
        """Return the request that submits a job; its result is the view of the job.

        A repeated user and key return the existing job. Its error is `InputError` if the placement names
        something the pool does not have, and `PlanError` for impossible parallel degrees.
        """
        new = _draw_ids([submission])[0]
        return self._request(user, submission, new, lambda coordinator, job_id: coordinator.job_view(job_id))

    def submit_all(self, user: str, submissions: Sequence[Submission]) -> list[str | IsthmusError]:
        """Submit jobs independently of each other in one batch; return the id or the error of each."""
        done = self._actor.execute(
            [
                self._request(user, one, new, lambda _, job_id: job_id)
                for one, new in zip(submissions, _draw_ids(submissions), strict=True)
            ]
        )
        return [_submission_outcome(request) for request in done]

    def _request(
        self,
        user: str,
        submission: Submission,
        job_id: str,
        make_answer: Callable[[Coordinator, str], object],
    ) -> ActorRequest:
        """Return the request that submits a job; `make_answer` makes the answer from the job's id."""
        now_s, wrong = self._clock(), _degrees_error(submission)

        def propose(coordinator: Coordinator) -> Event | None:
            if coordinator.job_id_of_key(user, submission.key) is not None:
                return None
            self.check_submission(coordinator, submission)
            if wrong is not None:
                raise wrong
            return JobSubmitted(now_s=now_s, job_id=job_id, user=user, submission=submission)

        def answer(coordinator: Coordinator) -> object:
            known = coordinator.job_id_of_key(user, submission.key) or job_id
            if known != job_id and coordinator.job_view(known).job != submission.job:
                raise ConflictError(
                    f"key '{submission.key}' already belongs to another job, '{known}'",
                    hint="use a new key for a new job",
                )
            return make_answer(coordinator, known)

        return ActorRequest(answer, propose)

    def check_submission(self, coordinator: Coordinator, submission: Submission) -> None:
        """Raise `InputError` if a placement names something the pool lacks, or excludes every cluster."""
        if submission.job.placement == ANYWHERE:
            return
        joined = tuple(record.cluster for record in coordinator.state.clusters.values())
        check_placement_names(submission.job.placement, joined, self._pool_file)
        check_clusters(submission.job.placement, joined, self._pool_file)


def _draw_ids(submissions: Sequence[Submission]) -> list[str]:
    """Return a new id for each job: its name, then eight random hexadecimal digits."""
    drawn = secrets.token_hex(4 * len(submissions))
    return [f"{one.job.name[:50]}-{drawn[8 * i : 8 * i + 8]}" for i, one in enumerate(submissions)]


def _degrees_error(submission: Submission) -> IsthmusError | None:
    """Return why the parallel degrees of a job are impossible, None if they are possible."""
    try:
        check_degrees(submission.job, submission.model)
    except IsthmusError as error:
        return error
    return None


def _submission_outcome(request: ActorRequest) -> str | IsthmusError:
    """Return the job id or the user's error of one submission; raise an internal error."""
    if request.error is not None and not isinstance(request.error, IsthmusError):
        raise request.error
    return request.error or request.result
