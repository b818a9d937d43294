"""`own_checks`, `peer_checks`: what each site of a plan checks before the job may hold chips there, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from isthmus.core.job import Job
from isthmus.core.messages.preflight import SiteCheck
from isthmus.core.plan import Plan

_SHARED_FOLDERS = ("checkpoints", "output")
"""Folders that all sites of a job must see as one, by the names of their checks."""


MAX_DATA_PATHS = 200
"""Data paths that are checked; further ones are left to the workers."""


def marker_name(job_id: str, preflight_round: int, cluster: str) -> str:
    """Return the name of the file that a cluster leaves in the shared folders of a job."""
    return f".preflight-{job_id}-{preflight_round}-{cluster}"


def own_checks(job: Job, plan: Plan, cluster: str, marker: str, *, has_files: bool = True) -> tuple[SiteCheck, ...]:
    """Return what `cluster` checks of its own files and storage; with several sites it leaves the file `marker`.

    Without `has_files` the files that the job reads are copied there before it starts. A job with `compute: virtual`
    uses no files. URLs and relative paths are left to the workers.
    """
    if not job.trains:
        return ()
    loads = job.task != "pretrain" and any(stage.cluster == cluster for stage in plan.stages)
    weights = "weights" if loads else ""  # a rank that decodes gets them over its link
    left = marker if len(plan.clusters) > 1 else ""
    return (
        *(_local("model", "model", job.model, value=weights) if has_files else ()),
        *(_data_checks(job) if has_files and plan.reads_data(cluster) else ()),
        *(_local("resume", "resume", job.resume_folder) if has_files and job.resume_folder else ()),
        *_local("write", "checkpoints", job.checkpoints.folder, value=left),
        *_local("write", "output", job.output, value=left),
        *_local("space", "storage", job.checkpoints.folder, num_bytes=_storage_bytes(plan)),
    )


def peer_checks(
    job: Job, cluster: str, markers: Mapping[str, str], facts: Mapping[str, Mapping[str, str]]
) -> tuple[SiteCheck, ...]:
    """Return what `cluster` checks of the other sites of `markers`: the files that they left in the shared folders.

    `markers` are the files' names and `facts` what the sites found in the first phase, both by cluster; the fact of a
    folder's name is its path at that site.
    """
    if not job.trains:
        return ()
    folders = {"checkpoints": job.checkpoints.folder, "output": job.output}
    return tuple(
        check
        for peer, marker in markers.items()
        if peer != cluster
        for name in _SHARED_FOLDERS
        for check in _local(
            "marker", name, folders[name], value=marker, peer=peer, peer_path=facts.get(peer, {}).get(name, "")
        )
    )


def _data_checks(job: Job) -> Iterator[SiteCheck]:
    form = "chat" if job.data.format == "auto" and job.task == "finetune" else job.data.format
    training, paths = job.training, job.data.paths[:MAX_DATA_PATHS]
    batch = (
        training.sequence_length * training.global_batch_size
        if form not in ("chat", "prompts") and len(paths) == 1
        else 0
    )
    for path in paths:
        yield from _local("data", "data", path, value=f"{form}:{job.data.text_field}", num_bytes=batch)
    yield from _local("file", "tokenizer", job.data.tokenizer)


def _local(kind: str, name: str, path: str, **fields: object) -> Iterator[SiteCheck]:
    """Yield the check of an absolute path."""
    if path.startswith("/"):
        yield SiteCheck.model_validate({"kind": kind, "name": name, "path": path} | fields)


def _storage_bytes(plan: Plan) -> int:
    """Return the bytes that all sites of the plan write: checkpoints, one being written, and the result."""
    return sum(plan.predicted.storage_bytes) if plan.predicted else 0
