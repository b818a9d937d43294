"""`NetworkFilter`: checks that links have the bandwidth, delay and jitter that stage boundaries need.

Cross-domain pooling report 4.2.3 (3): neighbouring stages at one cluster need no WAN; at two they need
`<d x bandwidth, delay, jitter>` in both directions. Several boundaries over one link add up. Without
`placement.network`, only the existence of the link is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from isthmus.control.placement.resources.free_resources import ClusterPair, FreeLink, FreeResources
from isthmus.control.placement.resources.pipeline_requirement import PipelineRequirement, StageRange, WanRequirement
from isthmus.core.plan import Refusal

MAX_REFUSALS = 12
"""Largest number of refused pairs to report, smallest shortage first."""


@dataclass(frozen=True)
class _RefusedPair:
    """The need and the link of a refused pair (None: there is no link)."""

    need: WanRequirement
    link: FreeLink | None

    @property
    def lacking_gbps(self) -> float:
        """The missing bandwidth."""
        return max(0.0, self.need.gbps - (self.link.free_gbps if self.link else 0.0))


class NetworkFilter:
    """Checks pairs of clusters and records the smallest shortage of each refused pair."""

    def __init__(self, requirement: PipelineRequirement, resources: FreeResources, *, network: bool) -> None:
        self.requirement, self.resources, self.network = requirement, resources, network
        self._refused: dict[ClusterPair, _RefusedPair] = {}

    def can_follow(self, placed: Sequence[StageRange], cluster: str) -> bool:
        """Return whether a range at `cluster` may follow the ranges `placed`."""
        before = placed[-1]
        need, ends = self.requirement.boundaries[before.last - 1], {before.cluster, cluster}
        if len(placed) > 1:
            pairs = itertools.pairwise(placed)
            lasts = [a.last for a, b in pairs if {a.cluster, b.cluster} == ends]
            if lasts:
                also_gbps = sum(self.requirement.boundaries[last - 1].gbps for last in lasts)
                need = replace(need, gbps=need.gbps + also_gbps)
        return self._admits(before.cluster, cluster, need)

    def can_connect(self, a: str, b: str) -> bool:
        """Return whether the link between two clusters suffices for any boundary of the pipelines."""
        return a != b and self._admits(a, b, self._minimum_need)

    @cached_property
    def _minimum_need(self) -> WanRequirement:
        """The weakest need of any boundary."""
        boundaries = self.requirement.boundaries
        return WanRequirement(
            gbps=min((one.gbps for one in boundaries), default=0.0),
            delay_s=max((one.delay_s for one in boundaries), default=0.0),
            jitter_s=max((one.jitter_s for one in boundaries), default=0.0),
        )

    def _admits(self, a: str, b: str, need: WanRequirement) -> bool:
        links = self.resources.links
        for ends in ((a, b), (b, a)):
            link = links.get(ends)
            if link is None or (self.network and _is_insufficient(link, need)):
                refused, old = _RefusedPair(need, link), self._refused.get(ends)
                if old is None or refused.lacking_gbps < old.lacking_gbps:
                    self._refused[ends] = refused
                return False
        return True

    def refusals(self) -> list[Refusal]:
        """Return up to `MAX_REFUSALS` refusals, one per refused pair of clusters, by name."""
        least = sorted(self._refused, key=lambda ends: (self._refused[ends].lacking_gbps, ends))
        return [self._refusal(ends) for ends in sorted(least[:MAX_REFUSALS])]

    def _refusal(self, ends: ClusterPair) -> Refusal:
        refused, owners = self._refused[ends], [self.resources.sites[name].owner for name in ends]
        return Refusal(
            clusters=ends,
            stage="network",
            owner=owners[0],
            lacking_gbps=refused.lacking_gbps,
            reason=f"network: {ends[0]} ({owners[0]}) to {ends[1]} ({owners[1]}): {_describe_shortage(refused)}",
        )


def _is_insufficient(link: FreeLink, need: WanRequirement) -> bool:
    return link.free_gbps < need.gbps or link.delay_s > need.delay_s or link.jitter_s > need.jitter_s


def _describe_shortage(refused: _RefusedPair) -> str:
    """Describe the shortage."""
    link, need = refused.link, refused.need
    if link is None:
        return "there is no link"
    if refused.lacking_gbps:
        return f"the pipelines need {need.gbps:.3g} Gbit/s, {link.free_gbps:.3g} Gbit/s is left"
    what, has_s, most_s = "delay", link.delay_s, need.delay_s
    if has_s <= most_s:
        what, has_s, most_s = "jitter", link.jitter_s, need.jitter_s
    return f"a {what} of {1e3 * has_s:.3g} ms, the schedule tolerates {1e3 * most_s:.3g} ms"
