"""`check_places`: guaranteed and limited chips of a cluster or node group exist, and are guaranteed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from isthmus.control.state.job_records import PoolState
from isthmus.core.errors import ConflictError, FieldError
from isthmus.core.owner.accounts import Accounts, ChipsAt, Project
from isthmus.core.owner.chip_scope import ChipScope, within_scopes


def check_places(state: PoolState, accounts: Accounts) -> None:
    """Raise `FieldError` for chips that no cluster has, `ConflictError` for guarantees that together exceed a cluster.

    What is in effect already is not refused: a cluster that has left or shrunk keeps no other change from being made.
    """
    before = {(name, one) for name, _, one in _lines(state.accounts.accounts)}
    for name, place, one in _lines(accounts):
        if (name, one) not in before:
            _check_line(state, one, place)
    old, new = _promised(state.accounts.accounts.projects), _promised(accounts.projects)
    for scope, by_project in new.items():
        have, most = sum(by_project.values()), chips_of(state, scope)
        before_it = old.get(scope, {})
        grows = any(chips > before_it.get(name, 0) for name, chips in by_project.items())
        if scope.cluster and most is not None and have > most and grows:
            held = ", ".join(f"{name} {chips}" for name, chips in sorted(by_project.items()))
            raise ConflictError(
                f"{have} chips of {scope} are guaranteed, it has {most}: {held}",
                hint=f"lower guaranteed_at of some of them by {have - most} chips",
            )


def chips_of(state: PoolState, scope: ChipScope) -> int | None:
    """Return the chips of a cluster or a node group; None if there is no such one."""
    record = state.clusters.get(scope.cluster)
    if record is None:
        return None
    groups = {one.name: one.num_chips for one in record.cluster.node_groups}
    return groups.get(scope.node_group) if scope.node_group else sum(groups.values())


def _lines(accounts: Accounts) -> Iterator[tuple[str, tuple[str, ...], ChipsAt]]:
    """Yield each guarantee and limit at a place: whose it is, its field, and the line."""
    for index, project in enumerate(accounts.projects):
        for place, line in enumerate(project.guaranteed_at):
            yield project.name, ("projects", str(index), "guaranteed_at", str(place)), line
    for field, name, limits in accounts.all_limits():
        for place, line in enumerate(limits.chips_at):
            yield f"{field[0]} {name}", (*field, "limits", "chips_at", str(place)), line


def _check_line(state: PoolState, line: ChipsAt, place: tuple[str, ...]) -> None:
    most, record = chips_of(state, line.scope), state.clusters.get(line.cluster)
    if most is None:
        what, known = f"no cluster '{line.cluster}' has joined", sorted(state.clusters)
        if record is not None:
            known = [group.name for group in record.cluster.node_groups]
            what = f"cluster {line.cluster} has no node group '{line.node_group}'"
        raise FieldError(what, place=place, hint=f"known: {', '.join(known) or 'none'}")
    if place[2] == "guaranteed_at" and line.chips > most:
        raise FieldError(
            f"{line.chips} chips of {line.scope} are guaranteed, it has {most}",
            place=(*place, "chips"), hint="guarantee at most what there is",
        )  # fmt: skip


def _promised(projects: Iterable[Project]) -> dict[ChipScope, dict[str, int]]:
    """Return the guaranteed chips within each scope, by project at the top: those below it share its own."""
    found: dict[ChipScope, dict[str, int]] = {}
    for project in projects:
        for scope, chips in within_scopes(project.guarantees).items() if project.parent is None else ():
            found.setdefault(scope, {})[project.name] = chips
    return found
