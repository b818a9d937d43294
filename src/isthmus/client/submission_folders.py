"""The folders of a job at submission: the job to resume from, and folders of other jobs that this machine sees."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from isthmus.client.api_client import ApiClient
from isthmus.client.resolve_job import find_job_id
from isthmus.core.errors import NotFoundError
from isthmus.core.job import Job, is_folder, with_own_folders
from isthmus.core.model import Model
from isthmus.core.runs.visible_folders import check_visible_folders


def with_resume(job: Job, resume: str | None) -> Job:
    """Return `job` with another job or folder (a path with `/`) to resume from; None leaves it as it is."""
    if resume is None:
        return job
    return job.model_copy(update={"resume": str(Path(resume).absolute()) if is_folder(resume) else resume})


def check_run_folders(client: ApiClient, job: Job, model: Model, key: str | None) -> Job:
    """Return the job with the full id of the job to resume; raise `InputError` for a folder of another job.

    With an idempotency key the folder may belong to this job, submitted before.
    """
    if isinstance(job.resume, str) and not is_folder(job.resume):
        job = job.model_copy(update={"resume": find_job_id(client, job.resume)})

    def is_same_job(job_id: str) -> bool:
        if not key:
            return False
        with suppress(NotFoundError):
            known = client.job(job_id).job
            return known == with_own_folders(job, job_id).model_copy(update={"resume": known.resume})
        return False

    return check_visible_folders(job, model, is_same_job)
