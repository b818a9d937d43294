"""`FoldersInUse`: the checkpoint and output folders of jobs that have not ended, so that no other job names them."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

import pydantic_core

from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.errors import InputError
from isthmus.core.job import JOB_PLACEHOLDER, Job
from isthmus.core.runs.run_identity import differences, list_differences, run_identity
from isthmus.core.views.api_views import Submission

_MIN_ENTRIES_TO_PRUNE = 1024
_MAX_CHECKED, _MAX_CHECKED_CHARS = 4096, 1024
"""Checked submissions whose folders are remembered until the state has their jobs, and the longest folders of one."""


class FoldersInUse:
    """An index of folders to live jobs. It reads new jobs from the state before each answer; used by one thread.

    Folders are compared by name; the worker's claim decides where links or mounts give one folder two names.
    """

    def __init__(self) -> None:
        self._users: dict[str, str] = {}
        # The folders of checked submissions by job: most of them become jobs, which need not be parsed again then.
        self._checked: dict[str, tuple[str, ...]] = {}
        self._last_number = 0

    def check(self, state: PoolState, user: str, submission: Submission, job_id: str) -> None:
        """Raise `InputError` if a live job uses a folder of job `job_id`; its own user sees id and differences."""
        self._update(state)
        folders = tuple(_folders(submission.job))
        for field, folder in folders:
            other = state.live_jobs.get(self._users.get(folder, ""))
            if other is not None:
                raise _in_use_error(field, folder, other, user, submission)
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        if sum(len(folder) for _, folder in folders) <= _MAX_CHECKED_CHARS:
            self._checked[job_id] = tuple(folder for _, folder in folders)

    def _update(self, state: PoolState) -> None:
        """Add the jobs submitted since the last call; drop ended ones once they are the majority."""
        new: list[JobRecord] = []
        for job in reversed(state.jobs.values()):
            if job.number <= self._last_number:
                break
            new.append(job)
        for job in reversed(new):
            folders = self._checked.pop(job.id, None)
            if job.id in state.live_jobs:
                self._users |= dict.fromkeys(_packed_folders(job) if folders is None else folders, job.id)
        self._last_number = max(self._last_number, state.num_submitted)
        if len(self._users) > _MIN_ENTRIES_TO_PRUNE + 4 * len(state.live_jobs):
            self._users = {folder: job for folder, job in self._users.items() if job in state.live_jobs}


def _folders(job: Job) -> Iterator[tuple[str, str]]:
    """Yield field and normal name of the folders that a job writes, except those named after the job itself."""
    if job.trains:
        for field, folder in (("checkpoints.folder", job.checkpoints.folder), ("output", job.output)):
            if JOB_PLACEHOLDER not in folder:
                yield field, posixpath.normpath(folder)


def _packed_folders(job: JobRecord) -> tuple[str, ...]:
    """Return the names of `_folders` of a stored job without making it: after a start the first check reads all."""
    fields = pydantic_core.from_json(job.packed.job_json)
    if fields.get("engine", "isthmus") != "isthmus" or fields.get("compute", "real") != "real":
        return ()
    checkpoints = fields.get("checkpoints", {}).get("folder", JOB_PLACEHOLDER)
    return tuple(posixpath.normpath(one) for one in (checkpoints, fields["output"]) if JOB_PLACEHOLDER not in one)


def _in_use_error(field: str, folder: str, other: JobRecord, user: str, submission: Submission) -> InputError:
    own = f"use output: {folder}-{JOB_PLACEHOLDER}"
    hint = own if field == "output" else "leave out checkpoints.folder"
    if other.user != user:
        return InputError(f"{field} {folder} is in use by another job", hint=f"{hint}, or use another folder")
    there = run_identity(other.id, other.spec, other.submission.model)
    found = differences(there, run_identity(other.id, submission.job, submission.model))
    differing = f"which differs: {list_differences(found)}" if found else "which has the same training fields"
    return InputError(
        f"{field} {folder} is in use by job {other.id} ({other.state}), {differing}",
        hint=f"{hint}, or end that job first: isthmus cancel {other.id}",
    )
