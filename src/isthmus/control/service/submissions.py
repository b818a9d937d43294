"""`Intake`: takes jobs in, each once however often it is sent, and refuses what the pool cannot know."""

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
"""What any pool satisfies."""


class Intake:
    """Submissions, one by one or many at once. `file` is the operator's pool, `clock` gives seconds."""

    def __init__(self, actor: Actor, file: Pool | None, clock: Callable[[], float]) -> None:
        self._actor, self._file, self._clock = actor, file, clock

    def submission(self, user: str, submission: Submission) -> Request:
        """Return the request that takes a job in; its result is the job, once it is settled.

        The same user and key again are answered with the job that is there. Its error is `InputError` where
        the job's placement names what the pool does not know, and `PlanError` for degrees that cannot be.
        """
        new = _draw_ids([submission])[0]
        return self._request(user, submission, new, lambda coordinator, job_id: coordinator.job(job_id))

    def submit_all(self, user: str, submissions: Sequence[Submission]) -> list[str | IsthmusError]:
        """Take many jobs in with one flush, each as if it came alone: its id, or why it was refused."""
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
        """Return the request that takes a job in; `show` makes the answer out of the id of the job."""
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
                    f"key '{submission.key}' already stands for another job, '{known}'",
                    hint="use a new key for a new job",
                )
            return show(coordinator, known)

        return Request(answer, propose)

    def check(self, coordinator: Coordinator, submission: Submission) -> None:
        """Raise `InputError` where a job's placement names what the pool does not know, or nowhere at all."""
        if submission.job.placement == ANYWHERE:
            return
        joined = tuple(record.cluster for record in coordinator.state.clusters.values())
        check_placement(submission.job.placement, joined, self._file)
        check_clusters(submission.job.placement, joined, self._file)


def _draw_ids(submissions: Sequence[Submission]) -> list[str]:
    """Return a new id for each job, its name in front."""
    drawn = secrets.token_hex(4 * len(submissions))
    return [f"{one.job.name[:50]}-{drawn[8 * i : 8 * i + 8]}" for i, one in enumerate(submissions)]


def _wrong_degrees(submission: Submission) -> IsthmusError | None:
    """Return why the degrees that a job fixes cannot be kept; None where they can."""
    try:
        check_degrees(submission.job, submission.model)
    except IsthmusError as error:
        return error
    return None


def _outcome(request: Request) -> str | IsthmusError:
    """Return what became of one of many submissions; raise what is nobody's mistake but ours."""
    if request.error is not None and not isinstance(request.error, IsthmusError):
        raise request.error
    return request.error or request.result
