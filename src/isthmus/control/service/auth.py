"""Authentication and authorisation: tokens (256 random bits, stored as SHA-256) with one of four roles.

`admin` may do everything; `owner` syncs the agents of its own clusters and sees only those; `user` submits
jobs and sees only its own; `joiner` is the code of an invitation, which joins one cluster. Objects that a caller may
not see are reported as not found.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from isthmus.control.store.store_interface import Store, StoredToken
from isthmus.core.errors import AuthError, NotFoundError
from isthmus.core.pool import Cluster
from isthmus.core.process.state_folder_lock import fsync_path, unwritable_folder_error
from isthmus.core.views.access_views import AuditRecord
from isthmus.core.views.api_views import ClusterView, JobView, PoolView

Role = Literal["admin", "owner", "user", "joiner"]
ADMIN_TOKEN_FILE = "admin.token"  # noqa: S105 (a file name)
"""File in the state folder with the first admin token, mode 0600."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The authenticated sender of a request: its role and name, the id of its token, its address.

    `high` says that its token grants priority `high`. A key of a site's agent acts for `site` alone ("": no key), and
    ends the key that it `replaces`.
    """

    role: Role
    name: str
    token_id: str = field(default="", compare=False)
    address: str = field(default="", compare=False)
    high: bool = field(default=False, compare=False)
    site: str = ""
    replaces: str = field(default="", compare=False)


class UnknownCallerError(AuthError):
    """Missing or unknown token: HTTP status 401 rather than 403."""

    http_status = 401

    def __init__(self) -> None:
        super().__init__("no valid token", hint="send 'Authorization: Bearer TOKEN' with a token that an admin made")

    def as_dict(self) -> dict[str, str | None]:
        """Return the error under the name of the public tree."""
        return super().as_dict() | {"error": "AuthError"}


def token_digest(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal, the form in which it is stored."""
    return hashlib.sha256(token.encode()).hexdigest()


def ensure_admin_token(store: Store, state_folder: Path, now_s: float) -> None:
    """Create the admin token on the first start: first in `<state>/admin.token`, then in the store.

    A crash in between leaves a file with an unknown token; the next start replaces it.
    """
    if any(token.role == "admin" for token in store.tokens()):
        return
    file = state_folder / ADMIN_TOKEN_FILE
    try:
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            token = secrets.token_urlsafe(32)
            stream.write(token + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        fsync_path(state_folder)
    except OSError as error:
        raise unwritable_folder_error(state_folder, error) from error
    made = StoredToken(role="admin", name="admin", digest=token_digest(token), created_s=now_s)
    line = AuditRecord(at_s=now_s, action="token-created", actor="server", subject=made.id, detail="admin admin")
    store.put_token(made, (line,))


def require_role(caller: Caller, *roles: Role) -> None:
    """Raise `AuthError` unless the caller has one of `roles` or is an admin."""
    if caller.role != "admin" and caller.role not in roles:
        raise AuthError(
            f"a token of role '{caller.role}' may not do this",
            hint=f"use a token of role {' or '.join((*roles, 'admin'))}",
        )


def require_own_job(caller: Caller, job: JobView) -> None:
    """Raise `NotFoundError` if the job belongs to another user, so that its existence stays hidden."""
    require_role(caller, "user")
    if caller.role != "admin" and job.user != caller.name:
        raise NotFoundError(f"no job '{job.id}'", hint="`isthmus jobs` lists them")


def require_own_cluster(caller: Caller, named: str, cluster: Cluster, registered: str | None) -> None:
    """Raise `AuthError` unless the caller may report for `cluster`.

    `named` is the cluster in the request path, `registered` its owner in the pool.
    """
    require_role(caller, "owner")
    if cluster.name != named:
        raise AuthError(f"a report of cluster '{cluster.name}' was sent to the path of cluster '{named}'")
    if registered is not None and cluster.owner != registered:
        raise AuthError(f"cluster '{named}' does not belong to owner '{cluster.owner}'")
    if caller.site and caller.site != named:
        raise AuthError(
            f"this is the key of cluster '{caller.site}', not of '{named}'", hint="each agent has a key of its own"
        )
    if caller.role != "admin" and cluster.owner != caller.name:
        raise AuthError(
            f"this token belongs to owner '{caller.name}', cluster '{named}' to owner '{cluster.owner}'",
            hint="give the agent a token of the cluster's owner",
        )


def require_site(caller: Caller, cluster: str, owner: str | None) -> None:
    """Raise unless the caller is an admin or owns `cluster`; to other owners it does not exist."""
    require_role(caller, "owner")
    if caller.role != "admin" and (caller.name != owner or caller.site not in ("", cluster)):
        raise NotFoundError(f"no cluster '{cluster}' of yours has joined the pool", hint="isthmus site list names them")


def visible_pool(caller: Caller, pool: PoolView) -> PoolView:
    """Return what the caller may see of the pool.

    An owner sees its own clusters and their links; a user all of them, without their agents and others' jobs.
    """
    if caller.role == "admin":
        return pool
    if caller.role == "user":
        return pool.model_copy(update={"clusters": tuple(map(_as_seen_by_users, pool.clusters))})
    clusters = tuple(
        view for view in pool.clusters if view.cluster.owner == caller.name and caller.site in ("", view.cluster.name)
    )
    names = {view.cluster.name for view in clusters}
    links, measured = (
        tuple(link for link in found if names & {link.source, link.target}) for found in (pool.links, pool.measured)
    )
    use = tuple(link for link in pool.use if names & {link.source, link.target})
    return PoolView(clusters=clusters, links=links, measured=measured, use=use)


def _as_seen_by_users(view: ClusterView) -> ClusterView:
    """Return a cluster without its agent and the jobs of others; whether it takes parts stays."""
    duty = view.duty.model_copy(update={"by": "", "jobs": ()})
    hidden = {"agent": None, "jobs": (), "released_at_s": None, "unknown_parts": (), "duty": duty}
    return view.model_copy(update=hidden)
