"""`Accounts`: the projects, groups and limits of a pool, the operator's `accounts.yaml`, which is set as a whole.

Projects form a tree. A job counts to its user, to the groups of its user, and to its project with all projects above
it; the limits of all of these hold. Amounts of a month are those of the calendar month, in UTC.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeInt
from isthmus.core.owner.chip_scope import ALL_CHIPS, ChipScope
from isthmus.core.priority import Priority
from isthmus.core.units import MILLIONTHS, Price

MAX_PROJECTS, MAX_GROUPS, MAX_USERS, MAX_MEMBERS = 1_024, 256, 4_096, 1_024
"""Most projects, groups and limited users of a pool, and most members of each project and group."""
MAX_DEPTH = 8
"""Most projects from the top of the tree to the lowest one."""
MAX_CHIPS, MAX_CHIP_HOURS = 10**9, 10**12
MAX_PLACES = 64
"""Most clusters and node groups at which an account has guaranteed or limited chips."""
GROUP_PREFIX = "group:"
"""Begins a member that is a group, not a user."""

NumChips = Annotated[NonNegativeInt, Field(le=MAX_CHIPS)]


class ChipsAt(FrozenModel):
    """Chips of a cluster, or of one of its node groups."""

    cluster: Name
    node_group: Name | None = None
    chips: NumChips

    @property
    def scope(self) -> ChipScope:
        """The chips that it is about."""
        return ChipScope(self.cluster, self.node_group or "")


def _check_once(lines: tuple[ChipsAt, ...]) -> tuple[ChipsAt, ...]:
    for index, line in enumerate(lines):
        if line.scope in (one.scope for one in lines[:index]):
            raise ValueError(f"{line.scope} is listed twice")
    return lines


PlacedChips = Annotated[tuple[ChipsAt, ...], Field(max_length=MAX_PLACES), AfterValidator(_check_once)]


class Limits(FrozenModel):
    """The most that jobs hold at once, and use in a month: chip-hours, and money in the pool's currency.

    `chips` are all that they hold, `chips_at` those of a cluster or a node group. At 80 % of an amount of the month the
    operator is warned; at 100 % running jobs are saved and wait for the next one.
    """

    chips: NumChips | None = None
    chips_at: PlacedChips = ()
    chip_hours_per_month: Annotated[NonNegativeInt, Field(le=MAX_CHIP_HOURS)] | None = None
    spend_per_month: Price | None = None

    @property
    def on_chips(self) -> dict[ChipScope, int]:
        """The limits on chips held at once, that of the whole pool first."""
        whole = {} if self.chips is None else {ALL_CHIPS: self.chips}
        return whole | {one.scope: one.chips for one in self.chips_at}

    @property
    def spend_millionths(self) -> int | None:
        """The limit on the spend of a month in millionths of the currency's unit; None without one."""
        return None if self.spend_per_month is None else int(self.spend_per_month * MILLIONTHS)

    @property
    def is_monthly(self) -> bool:
        """Whether an amount of the month is limited."""
        return self.chip_hours_per_month is not None or self.spend_per_month is not None


NO_LIMITS = Limits()


class UserGroup(FrozenModel):
    """A named set of users. Its limits hold for the jobs of all its members together."""

    name: Name
    members: Annotated[tuple[Name, ...], Field(max_length=MAX_MEMBERS)] = ()
    limits: Limits = NO_LIMITS


class Project(FrozenModel):
    """A project, at the top of the tree or below `parent`.

    `members` are users, and groups as `group:NAME`; members of a project may also submit jobs to the projects below it.
    What the jobs of a project do not hold of its guarantee is lent to other jobs, and reclaimed when its own jobs wait:
    `guaranteed_chips` of any cluster, and besides these the chips of each line of `guaranteed_at`.
    With fair share on, projects share the chips of a priority by `weight`; those below one divide its share, its own
    jobs counting as one more of weight 1. `priority` ranks projects: all jobs of a `high` one come before those of the
    others, all jobs of a `low` one after them. The `owner` of clusters sees its projects, and sets their quotas of the
    chips of its own clusters.
    """

    name: Name
    parent: Name | None = None
    owner: Name | None = None
    members: Annotated[tuple[Annotated[str, Field(max_length=80)], ...], Field(max_length=MAX_MEMBERS)] = ()
    guaranteed_chips: NumChips = 0
    guaranteed_at: PlacedChips = ()
    weight: Annotated[float, Field(gt=0, le=10**6)] = 1.0
    priority: Priority = "middle"
    limits: Limits = NO_LIMITS

    @property
    def guarantees(self) -> dict[ChipScope, int]:
        """The guaranteed chips by what they are of."""
        lines = ((ALL_CHIPS, self.guaranteed_chips), *((one.scope, one.chips) for one in self.guaranteed_at))
        return {scope: chips for scope, chips in lines if chips}


class UserLimits(FrozenModel):
    """The limits of one user."""

    name: Name
    limits: Limits


class Accounts(FrozenModel):
    """All projects, groups and limited users of a pool; `require_project` refuses jobs without a project."""

    version: Literal[1] = 1
    require_project: bool = False
    projects: Annotated[tuple[Project, ...], Field(max_length=MAX_PROJECTS)] = ()
    groups: Annotated[tuple[UserGroup, ...], Field(max_length=MAX_GROUPS)] = ()
    users: Annotated[tuple[UserLimits, ...], Field(max_length=MAX_USERS)] = ()

    def all_limits(self) -> Iterator[tuple[tuple[str, str], str, Limits]]:
        """Yield for each account its field, such as `("projects", "0")`, its name and its limits."""
        for index, project in enumerate(self.projects):
            yield ("projects", str(index)), project.name, project.limits
        for index, group in enumerate(self.groups):
            yield ("groups", str(index)), group.name, group.limits
        for index, user in enumerate(self.users):
            yield ("users", str(index)), user.name, user.limits
