"""What jobs hold of owners now, and what they held at sites that were away: the open side of the meter."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.core.pool_resource import PoolResource
from isthmus.core.priority import Priority
from isthmus.core.views.ledger_views import HoldPhase

HoldingKey = tuple[int, str]
"""Attempt and cluster; "" stands for the links of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What the part of an attempt holds at a cluster, unchanged for some time.

    `owner` is "" for links, which are the pool's. `late` are the owners of the sites for which the part waits. `away`:
    the server has no contact with the site, so that nothing is charged until its agent proves it.
    """

    attempt: int
    cluster: str
    owner: str
    phase: HoldPhase
    amounts: tuple[tuple[PoolResource, int], ...]
    late: tuple[str, ...] = ()
    away: bool = False

    @property
    def key(self) -> HoldingKey:
        """What identifies it among the holdings of its job."""
        return self.attempt, self.cluster

    @property
    def has_chips(self) -> bool:
        """Whether chips are among what is held."""
        return any(resource.kind == "chips" for resource, _ in self.amounts)


@dataclass(slots=True, kw_only=True)
class OpenHolding:
    """A holding that is charged up to `since_ms`."""

    holding: Holding
    since_ms: int


@dataclass(slots=True, kw_only=True)
class JobMeter:
    """What the meter knows of a job that has not ended."""

    user: str
    job_class: Priority
    project: str = ""
    held: dict[HoldingKey, OpenHolding] = field(default_factory=dict)
    # What is left of the divisions by hours and units, below one millionth each.
    remainders: dict[PoolResource, int] = field(default_factory=dict)
    # By attempt: charged less credited back, in millionths, and how much of it at the last checkpoint.
    charged: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    # The owner by whose fault an attempt was lost.
    lost_by: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Absence:
    """A holding of a site that was away from `begin_ms` to `end_ms`, and the parts of it that its agent has proved."""

    holding: Holding
    user: str
    job_class: Priority
    # The owner by whose fault the attempt was lost; "": it was not.
    lost_by: str
    begin_ms: int
    end_ms: int
    project: str = ""
    proved: list[tuple[int, int]] = field(default_factory=list)
