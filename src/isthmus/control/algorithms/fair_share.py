"""`FairShare`: within a priority, the jobs of users who have used less of their share go first.

A user's usage is its chip-seconds, halved every `half_life_s`, with an hour of the chips that it holds now, divided by
its weight (the fair share of Slurm's multifactor priority, SchedMD 2010 on, with usage by user and computed exactly
rather than every few minutes). The queue is filled progressively: each job of a user that comes before counts as one
more chip-hour, so that users with equal usage take turns. A job thus waits for the users with less usage only; those
gain usage while their jobs run, so no user starves, and the usage of users with jobs in the queue approaches their
weights. Projects that are below others share by the tree (`ShareNode`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Annotated

from sortedcontainers import SortedList

from isthmus.control.algorithms.share_node import Key, ShareNode

Queues = Mapping[str, Annotated[SortedList, Key]]
"""The waiting jobs by user."""


@dataclass(slots=True)
class Usage:
    """Chip-seconds of a user up to `at_s`, decayed, and the chips that it holds since."""

    used_chip_s: float = 0.0
    num_chips: int = 0
    at_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class FairShare:
    """The usage of every user. Without a half-life (0) nothing is in order but chips are counted."""

    half_life_s: float = 0.0
    # Weights that differ from 1, by user. Where users have projects these take their place, as `project:NAME`.
    weights: dict[str, float] = field(default_factory=dict)
    # The same of projects, by account.
    project_weights: dict[str, float] = field(default_factory=dict)
    # What idle projects leave goes to those beside them first; without, to all alike, as in logs of earlier versions.
    by_tree: bool = False
    # With it, by project: its account below those of the projects above it, the highest first; "" are the own jobs of a
    # project that has others below it.
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    usage: dict[str, Usage] = field(default_factory=dict)
    # The time as of which jobs are ordered.
    now_s: float = 0.0

    def configure(
        self, half_life_s: float, weights: Mapping[str, float], now_s: float, *, by_tree: bool = False
    ) -> None:
        """Set half-life, weights, and whether projects share by their tree; the usage so far stays as it is."""
        for one in self.usage.values():
            self._settle(one, now_s)
        self.half_life_s, self.weights, self.by_tree = half_life_s, dict(weights), by_tree

    def charge(self, user: str, num_chips: int, now_s: float) -> None:
        """Count that a user holds `num_chips` more chips from now on (less, if negative)."""
        one = self.usage.setdefault(user, Usage(at_s=now_s))
        self._settle(one, now_s)
        one.num_chips += num_chips

    def used_chip_s(self, user: str) -> float:
        """Return the decayed chip-seconds of a user at `now_s`."""
        one = self.usage.get(user)
        return 0.0 if one is None else self._used(one, self.now_s)

    def weight(self, user: str) -> float:
        """Return the weight of a user or a project."""
        return self.weights.get(user) or self.project_weights.get(user, 1.0)

    def order(self, queues: Queues, ranks: range) -> Iterator[Key]:
        """Yield the keys of all jobs, first to start first; a lower rank precedes."""
        root = self._tree(queues)
        for rank in ranks:
            yield from root.keys(rank)

    def place(self, queues: Queues, user: str, key: Key) -> int:
        """Return the place in `order` from 1 of a user's job, also of one that is not in the queues."""
        rank, root = key[0], self._tree(queues if user in queues else {**queues, user: SortedList()})
        nodes = [root]
        for name in self._path(user):
            nodes.append(nodes[-1].children[name])
        node, tie = nodes.pop(), key
        num_ahead = node.queue.bisect_left(key) - node.queue.bisect_left((rank,))
        for parent in reversed(nodes):
            mine, others = (node.tag(num_ahead), tie), [one for one in parent.children.values() if one is not node]
            num_ahead += sum(one.num_before(rank, mine) for one in others)
            node, tie = parent, min(parent.first(rank) or key, key)
        return int(num_ahead + 1 + sum(queue.bisect_left((rank,)) for queue in queues.values()))

    def _tree(self, queues: Queues) -> ShareNode:
        """Return the accounts with jobs in `queues` below the projects above them, with what each has used."""
        root = ShareNode()
        for account, queue in queues.items():
            node = root
            for name in self._path(account):
                if name not in node.children:
                    node.children[name] = ShareNode(weight=self.weight(name) if name else 1.0)
                node = node.children[name]
            node.queue = queue
        for account in self.usage.keys() if self.paths else self.usage.keys() & queues.keys():
            used_chip_s, num_chips = self.used_chip_s(account), self.usage[account].num_chips
            found: ShareNode | None = root
            for name in self._path(account):
                found = found.children.get(name) if found is not None else None
                if found is not None:
                    found.used_chip_s += used_chip_s
                    found.num_chips += num_chips
        return root

    def _path(self, account: str) -> tuple[str, ...]:
        return self.paths.get(account) or (account,)

    def _settle(self, one: Usage, now_s: float) -> None:
        one.used_chip_s, one.at_s = self._used(one, now_s), max(one.at_s, now_s)

    def _used(self, one: Usage, now_s: float) -> float:
        """Return the usage at `now_s`: chips that are held add to it while it decays."""
        if not self.half_life_s:
            return one.used_chip_s
        left = 0.5 ** (max(0.0, now_s - one.at_s) / self.half_life_s)
        return float(one.used_chip_s * left + one.num_chips * (1 - left) * self.half_life_s / log(2))
