"""`OwnerPolicy`: what the owner of a site lets the pool do there. `policy.yaml` is its file form.

It stays at the site: the site's own agent enforces it, and refuses what breaks it, whoever orders it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base import Fraction, Frozen, Index, Name, NotNegative
from isthmus.core.job import Job
from isthmus.core.pool import Cluster, UnknownNameError

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
TimeOfDay = Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]

DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class Hours(Frozen):
    """From one time of day to another, `HH:MM` of the site's clock, on each of `days`.

    Where the end is not after the beginning it is on the day after.
    """

    days: tuple[Day, ...] = DAYS
    begin: TimeOfDay = Field("00:00", alias="from")
    end: TimeOfDay = Field("00:00", alias="to")

    def contain(self, moment: datetime) -> bool:
        """Tell whether `moment`, by the site's clock, is among them."""
        time, day = moment.strftime("%H:%M"), moment.weekday()
        today, yesterday = DAYS[day] in self.days, DAYS[day - 1] in self.days
        if self.begin < self.end:
            return today and self.begin <= time < self.end
        return (today and time >= self.begin) or (yesterday and time < self.end)


class OwnerPolicy(Frozen):
    """What the owner of a site lets the pool do there.

    The pool's jobs may hold at most `pool_chips` of a node group, or `pool_share` of one that is not named
    there; only within `hours`, only of `users`, and only those that read and write below `folders` (paths or
    URLs): each of the three is free where it is empty. When the hours end, jobs that train have `protect_s`
    to save their work, and then go. Cards that a job of the pool holds without running are taken back after
    `hold_s`.

    Local jobs of level `preemptible_from` and of those below it may be preempted by the pool's jobs of a
    higher level; without it none may. A preempted job gets SIGTERM and `grace_s` later SIGKILL, and goes
    back to its place in the queue. With `local_evicts_pool` a local job takes the cards of the pool's jobs of
    a lower level where it finds no others; those that train have `protect_s` to save their work first. A job
    of the pool that waits before local jobs holds free cards back from them for `hold_back_s` at most.
    """

    version: Literal[1] = 1
    pool_share: Fraction = 1.0
    pool_chips: dict[Name, Index] = Field(default_factory=dict)
    hours: tuple[Hours, ...] = ()
    users: tuple[Name, ...] = ()
    folders: tuple[str, ...] = ()
    hold_s: NotNegative = 900.0
    preemptible_from: Name | None = None
    grace_s: NotNegative = 30.0
    local_evicts_pool: bool = True
    protect_s: NotNegative = 60.0
    hold_back_s: NotNegative = 0.0

    def limit(self, node_group: str, chips: int) -> int:
        """Return how many of the `chips` of `node_group` the pool's jobs may hold at once."""
        return min(chips, self.pool_chips.get(node_group, int(self.pool_share * chips)))

    def is_open(self, moment: datetime) -> bool:
        """Tell whether the pool may work at `moment`, by the site's clock."""
        return not self.hours or any(hours.contain(moment) for hours in self.hours)

    def objection(self, user: str, job: Job) -> str:
        """Return why a job of `user` may not run here at any time, or "" where it may."""
        if self.users and user not in self.users:
            return f"the owner lets jobs of {', '.join(self.users)} run here, not of '{user}'"
        strange = next((path for path in _paths(job) if not _is_below(path, self.folders)), None)
        if self.folders and strange is not None:
            return f"'{strange}' is not below {', '.join(self.folders)}, which the owner lets the pool use"
        return ""

    def check(self, cluster: Cluster) -> None:
        """Raise `UnknownNameError` where the policy names a node group or a level that `cluster` lacks."""
        groups = [group.name for group in cluster.node_groups]
        for group in self.pool_chips:
            if group not in groups:
                raise UnknownNameError("node group", group, groups)
        levels = cluster.priorities.levels
        if self.preemptible_from is not None and self.preemptible_from not in levels:
            raise UnknownNameError("priority level", self.preemptible_from, levels)


def _paths(job: Job) -> Iterator[str]:
    """Every path that a job reads or writes."""
    yield from (*job.data.paths, job.model, job.checkpoints.folder, job.output)
    if job.data.tokenizer != "bytes":
        yield job.data.tokenizer


def _is_below(path: str, folders: Iterable[str]) -> bool:
    """Tell whether `path` is one of `folders` or in it; `..` leads nowhere."""
    place = _parts(path)
    return any(place[: len(_parts(folder))] == _parts(folder) for folder in folders)


def _parts(path: str) -> list[str]:
    scheme, _, rest = path.rpartition("://")
    return [scheme, *posixpath.normpath(rest).split("/")]
