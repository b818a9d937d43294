"""`forget_job`: lets Ray forget a job that has ended, for good."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.agent.adapters.ray.ray_rest import RayRest

MONITOR_S = 1.2
"""Ray's monitor of jobs looks once a second."""
MAX_TRIES = 3


def forget_job(rest: RayRest, submission_id: str, pause: Callable[[float], object]) -> None:
    """Delete a job that has ended, until it stays deleted; after `MAX_TRIES` it stays in Ray's list.

    Ray 2.60 writes a job that is deleted before its monitor has seen the end down again, as a failed one. Raises
    `UnavailableError` if Ray does not answer.
    """
    for _ in range(MAX_TRIES):
        pause(MONITOR_S)
        rest.delete(submission_id)
        pause(MONITOR_S)
        if rest.job(submission_id) is None:
            return
