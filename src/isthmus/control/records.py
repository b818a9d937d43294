"""What the coordinator knows: jobs, their parts, clusters, and how many chips are really free.

Plain mutable records, changed only by `coordinator` and `lifecycle`. A part is promised to its job, and
counted against its cluster, from the moment it is opened until its site has said `released`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from isthmus.core.messages import Desired, Fault, ObservedPart, RankMap, WorkerAddress
from isthmus.core.plan import Plan, PlanSet
from isthmus.core.pool import Cluster
from isthmus.core.views import JobState, Submission

PartLife = Literal[
    "ordered", "queued", "ready", "prepared", "refused", "running", "succeeded", "failed", "released"
]
"""A part as the coordinator knows it: `ordered` until its site has said anything about it."""

Ending = Literal["waiting", "failed", "succeeded", "cancelled"]
FreeChips = dict[str, dict[str, int]]
"""Chips free by cluster and node group; only connected clusters appear."""

ENDED: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
STORY_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The coordinator's times, in seconds.

    `reservation_s` bounds how long chips are held at one site while another prepares; `start_s` how long
    workers may take to check in; `lease_s` is what a site may hold unrenewed; after `agent_lost_s` without
    a report a site is not connected. A refused job is tried again after `retry_s`, doubled at each refusal
    up to `retry_most_s`.
    """

    reservation_s: float = 30.0
    start_s: float = 150.0
    lease_s: float = 30.0
    agent_lost_s: float = 10.0
    retry_s: float = 2.0
    retry_most_s: float = 60.0

    def backoff_s(self, refusals: int) -> float:
        """Return how long a job waits after its `refusals`-th refusal in a row (from 1)."""
        return min(self.retry_s * 2.0 ** min(refusals - 1, 30), self.retry_most_s)


@dataclass(slots=True, kw_only=True)
class PartRecord:
    """The piece of one attempt at one cluster; `chips` by node group.

    `committed` says that the site was ever told to run it: processes may exist until it is released.
    """

    job: str
    attempt: int
    cluster: str
    ranks: tuple[int, ...]
    chips: dict[str, int]
    desired: Desired = "prepared"
    state: PartLife = "ordered"
    detail: str = ""
    fault: Fault | None = None
    committed: bool = False
    workers: tuple[WorkerAddress, ...] = ()
    story: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """A job. `parts` are those of the present attempt, and older ones whose release is still unconfirmed.

    `round` counts requests to the planner, `asked` says that one is out, `tried_on` what was free when it
    was made. A `pinned` plan stays the job's plan: its user chose it, or the job has trained under it
    (`ran`). `setback` is why it last started again, `fault` where the cause of the present attempt's failure
    lies as far as is known. `ending` is where `stopping` leads. `deadline_s` is
    when the present state has lasted too long.
    """

    id: str
    user: str
    submission: Submission
    submitted_s: float
    changed_s: float
    state: JobState = "planning"
    reason: str = ""
    setback: str = ""
    fault: Fault | None = None
    attempt: int = 0
    restarts: int = 0
    refusals: int = 0
    round: int = 0
    asked: bool = False
    tried_on: FreeChips | None = None
    plans: PlanSet | None = None
    plan: Plan | None = None
    pinned: bool = False
    ran: bool = False
    parts: dict[tuple[int, str], PartRecord] = field(default_factory=dict)
    rank_map: RankMap | None = None
    ending: Ending = "waiting"
    deadline_s: float | None = None
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def auto(self) -> bool:
        """Whether the job takes the fastest plan by itself."""
        return self.submission.job.policy == "auto"

    def present(self) -> list[PartRecord]:
        """Return the parts of the present attempt, in the plan's order."""
        return [part for part in self.parts.values() if part.attempt == self.attempt]

    def unreleased(self) -> list[PartRecord]:
        """Return the parts of any attempt whose site has not yet said `released`."""
        return [part for part in self.parts.values() if part.state != "released"]


@dataclass(slots=True, kw_only=True)
class ClusterRecord:
    """A site as last reported. `promised` are the unreleased parts there, by (job, attempt).

    `incarnations` are all that ever reported; `heard_s` is when a report last came (not part of the log).
    """

    cluster: Cluster
    incarnation: str
    free_chips: dict[str, int]
    reported: dict[tuple[str, int], ObservedPart]
    connected: bool = True
    heard_s: float | None = None
    incarnations: set[str] = field(default_factory=set)
    promised: dict[tuple[str, int], PartRecord] = field(default_factory=dict)

    def wanted(self, group: str) -> int:
        """Return the chips of a node group promised to parts that are not being released."""
        parts = (part for part in self.promised.values() if part.desired != "released")
        return sum(part.chips.get(group, 0) for part in parts)

    def free(self) -> dict[str, int]:
        """Return the chips by node group that could be promised now.

        The smaller of what the promises leave of the inventory, and what the site reports free less what
        it has been promised to hold but did not yet hold when it reported: the owner's own work counts.
        """
        left = {group.name: group.chips for group in self.cluster.node_groups}
        site = {name: self.free_chips.get(name, 0) for name in left}
        for key, part in self.promised.items():
            seen = self.reported.get(key)
            held = seen is not None and seen.state in ("prepared", "running")
            for name in left.keys() & part.chips.keys():
                left[name] -= part.chips[name]
                if not held:
                    site[name] -= part.chips[name]
        return {name: max(0, min(left[name], site[name])) for name in left}


@dataclass(slots=True, kw_only=True)
class State:
    """Everything the coordinator knows; jobs in the order of their submission, `live` those not ended.

    `epoch` counts the servers that have spoken for the pool, `touched` are the jobs whose view the event in
    hand has changed.
    """

    rules: Rules
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    live: dict[str, JobRecord] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    epoch: int = 0
    clusters: dict[str, ClusterRecord] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)

    def free(self) -> FreeChips:
        """Return what could be promised now at every connected cluster."""
        return {name: record.free() for name, record in self.clusters.items() if record.connected}

    def shortfall(self, plan: Plan) -> str:
        """Say in words which site lacks what for `plan` now; empty where the plan fits."""
        return "; ".join(self._lacks(plan))

    def _lacks(self, plan: Plan) -> Iterator[str]:
        for part in plan.parts():
            record = self.clusters.get(part.cluster)
            if record is None or not record.connected:
                yield f"{part.cluster} {'is not connected' if record else 'has not joined'}"
                continue
            free = record.free()
            for group, chips in part.chips.items():
                if free.get(group, 0) < chips:
                    yield f"{part.cluster} has {free.get(group, 0)} {group} free of the {chips} needed"
