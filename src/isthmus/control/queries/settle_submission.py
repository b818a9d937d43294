"""`settle_submission`: a submission with the job's own folders, and with the folder of the job that it resumes."""

from __future__ import annotations

from isthmus.control.queries.accounts.job_project import job_project
from isthmus.control.queries.catalogue.catalogue_versions import pin_versions, with_pins_of
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord, PoolState
from isthmus.core.errors import ConflictError, InputError, NotFoundError
from isthmus.core.job import Job, ResumeSource, is_folder, with_own_folders
from isthmus.core.runs.check_paths import same_path
from isthmus.core.runs.resume_folder import refuse_other_shapes
from isthmus.core.runs.run_identity import differences, run_identity
from isthmus.core.views.api_views import Submission


def settle_submission(state: PoolState, user: str, submission: Submission, job_id: str) -> Submission:
    """Return the submission as it is stored for job `job_id`.

    Raises `NotFoundError`, `ConflictError` or `InputError` if `resume` names a job of another user, one that
    still runs, or one without checkpoints or with another model, or if the job names an entry of the catalogue that
    the user may not use.
    """
    job_project(state.accounts.tree, user, submission.job.project)
    job = pin_versions(state, user, with_own_folders(submission.job, job_id))
    if isinstance(job.resume, str) and not is_folder(job.resume):
        source = _ended_job(state, user, job.resume)
        job = job.model_copy(update={"resume": _resume_source(source, job, submission, job_id)})
    return submission if job is submission.job else submission.model_copy(update={"job": job})


def is_settled_as(stored: Job, job: Job, job_id: str, user: str) -> bool:
    """Return whether `stored` is what `settle_submission` made of `job`; a repeated key must bring the same job."""
    job = with_pins_of(stored, job, user)
    resumes_job = isinstance(job.resume, str) and not is_folder(job.resume)
    if resumes_job:
        if not isinstance(stored.resume, ResumeSource) or stored.resume.job != job.resume:
            return False
        job = job.model_copy(update={"resume": stored.resume})
    return stored == with_own_folders(job, job_id)


def _ended_job(state: PoolState, user: str, name: str) -> JobRecord:
    """Return the ended job that `resume` names: one of `user`, or one that names `user` among its readers."""
    source = state.jobs.get(name)
    if source is None or (source.user != user and user not in source.spec.readers):
        raise NotFoundError(f"no job '{name}'", hint="`isthmus jobs` lists them")
    if not source.spec.trains:
        kind = "virtual" if source.spec.compute == "virtual" else "a command"
        raise InputError(f"resume: job {name} is {kind} and has no checkpoints", hint="name a job that has trained")
    if source.state not in TERMINAL_STATES:
        raise ConflictError(
            f"resume: job {name} is {source.state}: its checkpoints still change",
            hint=f"wait until it has ended, or end it: isthmus cancel {name}",
        )
    return source


def _resume_source(source: JobRecord, job: Job, submission: Submission, job_id: str) -> ResumeSource:
    """Return the folder of the job to resume, with the fields in which the new job differs."""
    folder, name = source.spec.checkpoints.folder, source.id
    for field, own in (("checkpoints.folder", job.checkpoints.folder), ("output", job.output)):
        if same_path(own, folder):
            raise InputError(
                f"{field}: {own} is the folder of the job to resume, {name}, which stays unchanged",
                hint="leave out checkpoints.folder, or use another folder",
            )
    there = run_identity(source.id, source.spec, source.submission.model)
    found = differences(there, run_identity(job_id, submission.job, submission.model))
    refuse_other_shapes(source.id, found)
    return ResumeSource(folder=folder, job=source.id, differences=tuple(map(str, found)))
