"""The folders of a run as its workers use them: claimed before training, and the checkpoint to resume from."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from isthmus.core.errors import InputError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.model import load_model
from isthmus.core.runs.content_digests import content_digests
from isthmus.core.runs.resume_folder import inspect_resume
from isthmus.core.runs.run_folder import claim_folder, newest_checkpoint_step
from isthmus.core.runs.run_identity import RunIdentity, run_identity
from isthmus.core.runs.storage_access import check_unmoved


def claim_run_folders(spec: WorkerSpec) -> None:
    """Claim the output and checkpoint folders for the job; every rank calls this before it reads or writes any file.

    Raises `InputError` if a path of the job lies outside the storage of its user, and, with the differing fields, if a
    folder belongs to another job or holds files of unknown origin; `UnavailableError` if it cannot be written.
    """
    check_unmoved(spec.job, spec.user, spec.storage)
    claim_output(spec)
    identify = cache(partial(identity_of, spec))
    folder = Path(spec.job.checkpoints.folder)
    claim_folder(folder, "checkpoints.folder", spec.run, identify, user=spec.user, adopt=spec.has_trained)


def claim_output(spec: WorkerSpec) -> None:
    """Claim the output folder, before training and again before the export; raises like `claim_run_folders`."""
    identify = partial(identity_of, spec)
    claim_folder(Path(spec.job.output), "output", spec.run, identify, user=spec.user, adopt=spec.has_trained)


def check_resume(spec: WorkerSpec) -> None:
    """Raise `InputError` if the job cannot resume from its source; needed only before its own first checkpoint."""
    folder = spec.job.resume_folder
    if spec.job.resume is not None and folder is None:
        raise InputError(f"resume: {spec.job.resume} names a job", hint="the server replaces it by the job's folder")
    if folder is None or spec.has_trained or newest_checkpoint_step(Path(spec.job.checkpoints.folder)):
        return
    if len(spec.plan.clusters) > 1 and not newest_checkpoint_step(Path(folder)):
        return  # other sites of the job may have it; the ranks look for it together
    note = inspect_resume(Path(folder), spec.job, identity_of(spec))
    if spec.rank == 0:
        print(note.text, flush=True)


def identity_of(spec: WorkerSpec) -> RunIdentity:
    """Return the identity of the run of `spec`, with the digests of its files."""
    return run_identity(spec.run, spec.job, load_model(spec.job.model), content_digests(spec.job), user=spec.user)
