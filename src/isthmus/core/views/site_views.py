"""Bodies of the REST interface for the membership of sites, shared by server, agents and command line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeInt, PositiveFloat, PositiveInt
from isthmus.core.pool import Cluster

DutyState = Literal["open", "cordoned", "draining", "drained", "leaving"]
"""Whether a site takes new parts: only an `open` one does."""

MAX_DRAIN_S = 7 * 86400.0
"""Longest time that a drain waits for checkpoints."""
DRAIN_S = 1800.0
"""How long a drain waits for checkpoints unless it is said."""


class ProbationView(FrozenModel):
    """A new site takes one job at a time, none of high priority, and has no checkpoint alone.

    It ends at `ends_s` if the site is in contact, or once `num_needed` jobs have trained to their end there.
    """

    since_s: float
    ends_s: float
    num_succeeded: NonNegativeInt = 0
    num_needed: PositiveInt


class DutyView(FrozenModel):
    """Whether a site takes new parts, and of a drained one the `jobs` that still have parts there.

    `by` closed it, at `since_s`; at `deadline_s` jobs without a new checkpoint are stopped (None: that has passed).
    """

    state: DutyState = "open"
    by: str = ""
    since_s: float | None = None
    deadline_s: float | None = None
    jobs: tuple[Name, ...] = ()
    probation: ProbationView | None = None


class DrainRequest(FrozenModel):
    """Request to drain a site, or to leave: jobs get `limit_s` to save a checkpoint."""

    limit_s: Annotated[PositiveFloat, Field(le=MAX_DRAIN_S)] = DRAIN_S


class LeaveRequest(DrainRequest):
    """Request to leave the pool; `discards_checkpoints`: also with the only checkpoints of jobs that wait."""

    discards_checkpoints: bool = False


class Belonging(FrozenModel):
    """Something that a site has in the pool: what `kind` of thing, and its `name`."""

    kind: Literal["site", "agent", "copies", "key", "link", "invitation", "file", "history", "usage", "audit"]
    name: str


class LeaveView(FrozenModel):
    """How far the leaving of a site is: `jobs` still have parts there; `gone` once nothing of it is left.

    `removed` is what goes with the site, `left` what the pool keeps.
    """

    site: Name
    gone: bool
    jobs: tuple[Name, ...] = ()
    removed: tuple[Belonging, ...] = ()
    left: tuple[Belonging, ...] = ()


INVITATION_S = 3600.0
"""How long an invitation can be used."""
KEY_LIFE_S = 30 * 86400.0
"""How long a key of a site's agent counts that is not renewed."""

KeyDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""The SHA-256 of a key; the key itself never leaves the site but as the token of its agent's requests."""


class InvitationRequest(FrozenModel):
    """Request for a code by which `owner` joins one cluster, of this name and size at most (None: any).

    The site begins with a probation unless the operator knows it.
    """

    owner: Name
    cluster: Name | None = None
    max_chips: PositiveInt | None = None
    probation: bool = True
    expires_in_s: Annotated[PositiveFloat, Field(le=INVITATION_S)] = INVITATION_S


class InvitationView(FrozenModel):
    """An invitation without its code; `joined` is the cluster that has used it."""

    id: str
    owner: Name
    cluster: Name | None = None
    max_chips: PositiveInt | None = None
    probation: bool = True
    by: str = ""
    made_s: float
    expires_s: float
    state: Literal["open", "used", "revoked", "expired"]
    joined: str = ""


class InvitationWithCode(InvitationView):
    """A new invitation; the code is shown once, and stored as a hash."""

    code: Annotated[str, Field(repr=False)]


class JoinRequest(FrozenModel):
    """Request to join `cluster`; `key` is the digest of the key that its agent has drawn."""

    cluster: Cluster
    key: KeyDigest


class KeyRequest(FrozenModel):
    """Request to accept the next key of a site's agent, by its digest."""

    key: KeyDigest


class JoinedView(FrozenModel):
    """A key that was accepted for a site; `key_id` is no secret."""

    site: Name
    owner: Name
    key_id: str
    probation: bool = False
