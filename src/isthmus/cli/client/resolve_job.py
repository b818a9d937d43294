"""Which job is meant: by id, by name (the latest of that name), or by a unique beginning of an id."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.cli.client.api_client import Client
from isthmus.core.errors import InputError, NotFoundError
from isthmus.core.messages.api_views import JobState, JobView

ENDED: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
"""States that a job does not leave."""


def find_job(client: Client, word: str) -> JobView:
    """Return the job meant by `word`, with its plans; see `pick`."""
    return client.job(pick(client.jobs(), word).id)


def find_id(client: Client, word: str) -> str:
    """Return the id of the job meant by `word`; see `pick`."""
    return pick(client.jobs(), word).id


def pick(jobs: Sequence[JobView], word: str) -> JobView:
    """Return the job whose id is `word`, else the latest called so, else the one whose id begins so.

    Raises `InputError` where several ids begin so, `NotFoundError` where none does.
    """
    by_id = {job.id: job for job in jobs}
    if word in by_id:
        return by_id[word]
    named = [job for job in jobs if job.name == word]
    if named:
        return max(named, key=lambda job: job.submitted_s)
    begun = [job for job in jobs if word and job.id.startswith(word)]
    if len(begun) > 1:
        some = ", ".join(sorted(job.id for job in begun)[:5])
        raise InputError(f"'{word}' begins the ids of {len(begun)} jobs: {some}", hint="give more characters")
    if not begun:
        raise NotFoundError(f"no job '{word}'", hint="`isthmus jobs` lists your jobs")
    return begun[0]
