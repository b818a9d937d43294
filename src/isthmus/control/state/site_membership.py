"""Records of a site's membership of the pool: closed to new parts, being drained, leaving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActorRole = Literal["admin", "owner"]
"""Whose act it was: the operator of the pool, or the owner of the site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonRecord:
    """A site is closed to new parts; what runs there goes on. A cordon of an admin is lifted by an admin only."""

    by: str
    role: ActorRole
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecord:
    """The jobs of a cordoned site are saved and stopped; `leaves`: the site then leaves the pool."""

    by: str
    since_s: float
    # When jobs without a new checkpoint are stopped; None: that time has passed.
    deadline_s: float | None
    leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitationRecord:
    """What a code lets an owner join: once, until `expires_s`. The code itself is known to the owner alone."""

    owner: str
    by: str
    made_s: float
    expires_s: float
    # The name that the cluster must have, and its most chips; None: any.
    cluster: str | None = None
    max_chips: int | None = None
    # The site begins with a probation.
    probation: bool = True
    revoked: bool = False
    # The cluster that has joined by it, with the digest of its first key; "": none yet.
    joined: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbationRecord:
    """A site is new: it takes few jobs, of little value, until it has proven itself."""

    since_s: float
    # Jobs that have trained to their end there since.
    num_succeeded: int = 0
