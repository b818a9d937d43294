"""Invitations, and the sites that join by them. A code counts once; a repeated join of the same key changes nothing."""

from __future__ import annotations

from dataclasses import replace

from isthmus.control.state.events import InvitationRevoked, SiteInvited, SiteJoined
from isthmus.control.state.job_records import PoolState
from isthmus.control.state.site_membership import InvitationRecord, ProbationRecord
from isthmus.control.state.site_records import ClusterRecord
from isthmus.core.errors import AuthError, ConflictError

MAX_INVITATIONS = 1000
"""Invitations that the state keeps; those that have ended go first."""


def admit_invitation(state: PoolState, event: SiteInvited) -> bool:
    """Return whether the invitation is new; raise if it is for a joined cluster of another owner, or one too many."""
    if event.id in state.invitations:
        return False
    known = state.clusters.get(event.cluster or "")
    if known is not None and known.cluster.owner != event.owner:
        raise ConflictError(
            f"cluster '{event.cluster}' belongs to owner '{known.cluster.owner}', not to '{event.owner}'",
            hint="isthmus site list names the sites and their owners",
        )
    open_now = [one for one in state.invitations.values() if _is_open(one, event.now_s)]
    if len(open_now) >= MAX_INVITATIONS:
        raise ConflictError(
            f"{len(open_now)} invitations are open",
            hint="revoke some: isthmus site invitations, isthmus token revoke ID",
        )
    return True


def admit_revocation(state: PoolState, event: InvitationRevoked) -> bool:
    """Return whether the invitation can still be used."""
    known = state.invitations.get(event.id)
    return known is not None and _is_open(known, event.now_s)


def admit_join(state: PoolState, event: SiteJoined) -> bool:
    """Return whether the cluster joins; False for a repeated join, whose answer was lost.

    Raises `AuthError` for an invitation that has ended or is for another owner or cluster, `ConflictError` for one
    that was used by another cluster or key, and for a cluster that has joined already.
    """
    cluster, known = event.cluster, state.invitations.get(event.invitation)
    if known is None or known.revoked or event.now_s >= known.expires_s:
        raise AuthError("the invitation has ended", hint="the operator makes another one: isthmus site invite OWNER")
    if known.joined:
        if (known.joined, known.key) == (cluster.name, event.key):
            return False
        raise ConflictError(
            f"the invitation was used already: cluster '{known.joined}' has joined by it",
            hint="if that was not you, tell the operator at once: isthmus site leave removes the cluster",
        )
    _check_terms(state, known, event)
    return True


def _check_terms(state: PoolState, known: InvitationRecord, event: SiteJoined) -> None:
    cluster, num_chips = event.cluster, sum(group.num_chips for group in event.cluster.node_groups)
    if cluster.owner != known.owner:
        raise AuthError(
            f"the invitation is for a cluster of owner '{known.owner}', and '{cluster.name}' belongs to "
            f"'{cluster.owner}'",
            hint="write the owner of the invitation into the cluster's file",
        )
    if known.cluster not in (None, cluster.name):
        raise AuthError(
            f"the invitation is for cluster '{known.cluster}', not for '{cluster.name}'",
            hint="write this name into the cluster's file, or ask the operator for another invitation",
        )
    if known.max_chips is not None and num_chips > known.max_chips:
        raise AuthError(
            f"cluster '{cluster.name}' has {num_chips} chips, and the invitation is for {known.max_chips} at most",
            hint="list fewer nodes in the cluster's file, or ask the operator for another invitation",
        )
    present = state.clusters.get(cluster.name)
    if present is not None and (known.cluster is None or present.cluster.owner != cluster.owner):
        raise ConflictError(
            f"a cluster '{cluster.name}' has joined the pool already",
            hint="choose another name; a site that has lost its key needs an invitation with --cluster",
        )


def add_invitation(state: PoolState, event: SiteInvited) -> None:
    """Record an invitation; those that have ended make room."""
    if len(state.invitations) >= MAX_INVITATIONS:
        kept = {key: one for key, one in state.invitations.items() if one.joined or _is_open(one, event.now_s)}
        state.invitations = kept
    state.invitations[event.id] = InvitationRecord(
        owner=event.owner, by=event.by, made_s=event.now_s, expires_s=event.expires_s, cluster=event.cluster,
        max_chips=event.max_chips, probation=event.probation,
    )  # fmt: skip


def revoke_invitation(state: PoolState, event: InvitationRevoked) -> None:
    """End an invitation."""
    state.invitations[event.id] = replace(state.invitations[event.id], revoked=True)


def add_site(state: PoolState, event: SiteJoined) -> None:
    """Record the cluster, which is away until its agent reports, and spend the invitation."""
    name, known = event.cluster.name, state.invitations[event.invitation]
    state.invitations[event.invitation] = replace(known, joined=name, key=event.key)
    if name not in state.clusters:
        probation = ProbationRecord(since_s=event.now_s) if known.probation else None
        state.clusters[name] = ClusterRecord(
            cluster=event.cluster, incarnation="", free_chips={}, connected=False, probation=probation
        )


def _is_open(one: InvitationRecord, now_s: float) -> bool:
    return not (one.revoked or one.joined or now_s >= one.expires_s)
