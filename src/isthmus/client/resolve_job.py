"""Resolve a job argument: an id, a name (the latest job with it), or a unique id prefix."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.client.api_client import ApiClient
from isthmus.core.errors import InputError, NotFoundError
from isthmus.core.views.api_views import JobState, JobView

TERMINAL_STATES: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
"""Final states of a job."""


def find_job(client: ApiClient, word: str) -> JobView:
    """Return the job that `word` refers to, with its plans; see `select_job`."""
    return client.job(select_job(client.jobs(), word).id)


def find_job_id(client: ApiClient, word: str) -> str:
    """Return the id of the job that `word` refers to; see `select_job`."""
    return select_job(client.jobs(), word).id


def select_job(jobs: Sequence[JobView], word: str) -> JobView:
    """Return the job with id `word`, else the latest with that name, else the one with that id prefix.

    Raises `InputError` for an ambiguous prefix, `NotFoundError` if none matches.
    """
    by_id = {job.id: job for job in jobs}
    if word in by_id:
        return by_id[word]
    named = [job for job in jobs if job.name == word]
    if named:
        return max(named, key=lambda job: job.submitted_s)
    matches = [job for job in jobs if word and job.id.startswith(word)]
    if len(matches) > 1:
        some = ", ".join(sorted(job.id for job in matches)[:5])
        raise InputError(f"'{word}' matches {len(matches)} job ids: {some}", hint="give more characters")
    if not matches:
        raise NotFoundError(f"no job '{word}'", hint="`isthmus jobs` lists your jobs")
    return matches[0]
