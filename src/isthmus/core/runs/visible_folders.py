"""`check_visible_folders`: refuses, before submission, folders of other runs as far as this machine sees them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from isthmus.core.job import JOB_PLACEHOLDER, Job, ResumeSource
from isthmus.core.model import Model
from isthmus.core.runs.content_digests import content_digests
from isthmus.core.runs.resume_folder import inspect_resume
from isthmus.core.runs.run_folder import FolderUse, foreign_folder_error, read_claim, refuse_unclaimed
from isthmus.core.runs.run_identity import RunIdentity, run_identity

_NEW_JOB = "new-job"
"""Stands for the id that the server has not given yet."""


def check_visible_folders(job: Job, model: Model, is_same_job: Callable[[str], bool]) -> Job:
    """Return the job, with the source of `resume: FOLDER` described if this machine sees the folder.

    `is_same_job` says whether a job's id is of this very job, submitted before. Raises `InputError` if the
    output or checkpoint folder belongs to another job or holds files of unknown origin, or if the job cannot
    resume from the folder. Paths that this machine does not see are left to the workers.
    """
    if not job.trains:
        return job
    here = run_identity(_NEW_JOB, job, model, content_digests(job))
    _check_folder(job.output, "output", here, is_same_job)
    _check_folder(job.checkpoints.folder, "checkpoints.folder", here, is_same_job)
    folder = job.resume_folder
    if folder is None or not _is_visible(folder):
        return job
    note = inspect_resume(Path(folder), job, here)
    source = ResumeSource(folder=folder, job=note.job, differences=tuple(map(str, note.differences)))
    return job.model_copy(update={"resume": source})


def _check_folder(path: str, use: FolderUse, here: RunIdentity, is_same_job: Callable[[str], bool]) -> None:
    if JOB_PLACEHOLDER in path or not _is_visible(path):
        return
    folder = Path(path)
    owner = read_claim(folder)
    if owner is None:
        refuse_unclaimed(folder, use)
    elif not is_same_job(owner.job):
        raise foreign_folder_error(folder, use, owner, here)


def _is_visible(path: str) -> bool:
    return "://" not in path and os.access(path, os.R_OK)
