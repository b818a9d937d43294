"""`Quotas`: what one user or owner may ask of a server, and the checks before a submission or a cluster is accepted."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields

from isthmus.control.state.job_records import PoolState
from isthmus.control.state.packed_submission import PackedSubmission
from isthmus.core.errors import AuthError, QuotaError, TooLargeError
from isthmus.core.pool import Cluster
from isthmus.core.views.access_views import LimitsView, LimitUse
from isthmus.core.views.api_views import Submission

MAX_LISTED_USERS = 50
"""Users that a view of the limits lists."""


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """The operator's limits. An admin's submissions are exempt."""

    # Largest number of jobs of a user that have not ended.
    live_jobs_per_user: int = 1000
    # Most bytes of all jobs of a user with their models, ended ones included: the server has them in memory.
    stored_bytes_per_user: int = 512 << 20
    # Largest number of clusters of an owner, beside those that the operator's pool file names.
    clusters_per_owner: int = 64
    # Largest stored size of a job with the dimensions of its model.
    job_bytes: int = 1 << 20
    # Largest number of versions of a user in the catalogue, and of files in all of them.
    versions_per_user: int = 256
    version_files_per_user: int = 65_536
    # Most bytes of metrics and logs of a job that the server keeps; a job of its own user may write any amount.
    output_bytes_per_job: int = 1 << 30
    # Users who may submit jobs of priority `high`, which may preempt others.
    high_priority_users: frozenset[str] = frozenset()


def limits_view(quotas: Quotas, state: PoolState) -> LimitsView:
    """Return the limits, and the `MAX_LISTED_USERS` users with most live jobs."""
    numbers = {one.name: getattr(quotas, one.name) for one in fields(quotas) if one.name != "high_priority_users"}
    live, stored = state.indexes.live_by_user, state.indexes.stored_by_user
    users = heapq.nlargest(MAX_LISTED_USERS, live, key=lambda user: (live[user], user))
    return LimitsView(
        limits=numbers,
        high_priority_users=tuple(sorted(quotas.high_priority_users)),
        users=tuple(LimitUse(user=one, live_jobs=live[one], stored_bytes=stored.get(one, 0)) for one in users),
    )


def check_submission(quotas: Quotas, user: str, submission: Submission, *, high: bool = False) -> None:
    """Raise `AuthError` for a priority that was not granted, and `TooLargeError` for too large a job.

    `high` says that the token of the submission grants priority `high`.
    """
    if submission.job.priority == "high" and not high and user not in quotas.high_priority_users:
        raise AuthError(
            f"user '{user}' may not submit jobs of priority 'high', which may preempt those of others",
            hint="use priority 'middle', or ask the pool operator: isthmus token grant, serve --high-priority-user",
        )
    packed = PackedSubmission.pack(submission)
    num_bytes = len(packed.job_json) + len(packed.model_json.encode())
    if num_bytes > quotas.job_bytes:
        raise TooLargeError(
            f"job '{submission.job.name}' takes {num_bytes:,} bytes with its model's config, at most "
            f"{quotas.job_bytes:,} are accepted",
            hint="name folders or globs in data.paths instead of single files; the operator sets --max-job-kib",
        )


def check_live_jobs(quotas: Quotas, state: PoolState, user: str) -> None:
    """Raise `QuotaError` if the user has as many jobs that have not ended, or as many bytes of jobs, as it may have."""
    count = state.indexes.live_by_user.get(user, 0)
    if count >= quotas.live_jobs_per_user:
        raise QuotaError(
            f"user '{user}' has {count} jobs that have not ended, at most {quotas.live_jobs_per_user} are accepted",
            hint="wait until some have ended, or cancel some; the operator sets --max-jobs-per-user",
        )
    stored = state.indexes.stored_by_user.get(user, 0)
    if stored >= quotas.stored_bytes_per_user:
        raise QuotaError(
            f"the jobs of user '{user}' take {stored:,} bytes, at most {quotas.stored_bytes_per_user:,} are accepted",
            hint="delete ended ones: isthmus delete JOB; the operator sets --max-stored-mib",
        )


def check_catalogue_quota(quotas: Quotas, state: PoolState, user: str, num_files: int) -> None:
    """Raise `QuotaError` if another version of `num_files` files is more than the user may have in the catalogue."""
    mine = [one for entry in state.catalogue.values() if entry.owner == user for one in entry.versions.values()]
    if len(mine) >= quotas.versions_per_user:
        raise QuotaError(
            f"user '{user}' has {len(mine)} versions in the catalogue, at most {quotas.versions_per_user} are accepted",
            hint="remove versions that no job needs; the operator sets --max-versions-per-user",
        )
    total = num_files + sum(one.num_files for one in mine)
    if total > quotas.version_files_per_user:
        raise QuotaError(
            f"the versions of user '{user}' would list {total:,} files, at most {quotas.version_files_per_user:,} are "
            "accepted",
            hint="pack small files into larger ones, or remove versions that no job needs",
        )


def check_cluster_quota(quotas: Quotas, state: PoolState, cluster: Cluster) -> None:
    """Raise `QuotaError` if a new cluster's owner has as many clusters as it may have."""
    if cluster.name in state.clusters:
        return
    count = sum(record.cluster.owner == cluster.owner for record in state.clusters.values())
    if count >= quotas.clusters_per_owner:
        raise QuotaError(
            f"owner '{cluster.owner}' has {count} clusters, at most {quotas.clusters_per_owner} are accepted: "
            f"'{cluster.name}' cannot join",
            hint="the operator adds it to the server's pool file, or sets --max-clusters-per-owner",
        )
