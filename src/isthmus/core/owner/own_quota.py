"""`own_quota`: what an owner may change of the quota of its project: chips at its own clusters, and nothing else."""

from __future__ import annotations

from collections.abc import Collection

from isthmus.core.errors import AuthError, InputError, NotFoundError
from isthmus.core.owner.accounts import MAX_PLACES, Accounts, ChipsAt, PlacedChips
from isthmus.core.owner.with_quota import QuotaChange

_OF_OPERATOR = ("chips", "chip_hours_per_month", "spend_per_month")


def own_quota(
    accounts: Accounts, account: str, change: QuotaChange, owner: str, clusters: Collection[str]
) -> QuotaChange:
    """Return the quota of an account after an owner's change: what the operator set for other clusters stays.

    `clusters` are the owner's. Raises `NotFoundError` for an account that is not a project of the owner, `AuthError`
    for limits on anything but the chips of these clusters, `InputError` for too many places.
    """
    found = [one for one in accounts.projects if f"project:{one.name}" == account and one.owner == owner]
    if not found:
        raise NotFoundError(f"no account '{account}'", hint="isthmus quota show lists those that you may see")
    for name in _OF_OPERATOR:
        if getattr(change, name) is not None:
            raise AuthError(f"{name}: the operator sets it", hint="an owner sets chips_at and guaranteed_at")
    for line in (*change.chips_at, *(change.guaranteed_at or ())):
        if line.cluster not in clusters:
            raise AuthError(f"cluster '{line.cluster}' is not yours", hint="an owner limits chips of its own clusters")
    project = found[0]
    kept = project.limits.model_copy(update={"chips_at": _merged(project.limits.chips_at, change.chips_at, clusters)})
    guaranteed = change.guaranteed_at
    if guaranteed is not None:
        guaranteed = _merged(project.guaranteed_at, guaranteed, clusters)
    for lines in (kept.chips_at, guaranteed or ()):
        if len(lines) > MAX_PLACES:
            raise InputError(
                f"{len(lines)} places with those of other owners' clusters, at most {MAX_PLACES}",
                hint="name clusters instead of their node groups",
            )
    return QuotaChange(**dict(kept), guaranteed_at=guaranteed)


def _merged(before: PlacedChips, given: tuple[ChipsAt, ...], clusters: Collection[str]) -> PlacedChips:
    return (*(line for line in before if line.cluster not in clusters), *given)
