"""`NetworkStage`: do the links have left what the boundaries between clusters need, both ways?

Cross-domain pooling report 4.2.3 (3): neighbouring stages at one cluster need no WAN; at two they need
`<d x bandwidth, delay, jitter>`. Several boundaries over one link add up. Without co-scheduling with the
network (`placement.network`) only whether there is a link at all is asked: without one nothing can run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from isthmus.control.placement.resources.free_resources import Ends, FreeLink, Resources
from isthmus.control.placement.resources.requirement import Range, Requirement, WanNeed
from isthmus.core.plan import Refusal

MOST_TOLD = 12
"""Pairs of clusters that are told to be refused: those that lacked least."""


@dataclass(frozen=True)
class _Refused:
    """What a pair was asked for, and what it has (None: there is no link)."""

    need: WanNeed
    link: FreeLink | None

    @property
    def lacking_gbps(self) -> float:
        """The bandwidth that is lacking."""
        return max(0.0, self.need.gbps - (self.link.free_gbps if self.link else 0.0))


class NetworkStage:
    """Asked for pairs of clusters; remembers for each that it refused what was lacking least."""

    def __init__(self, requirement: Requirement, resources: Resources, *, network: bool) -> None:
        self.requirement, self.resources, self.network = requirement, resources, network
        self._refused: dict[Ends, _Refused] = {}

    def joins(self, laid: Sequence[Range], cluster: str) -> bool:
        """Tell whether a range at `cluster` may follow those `laid`."""
        before = laid[-1]
        need, ends = self.requirement.boundaries[before.last - 1], {before.cluster, cluster}
        if len(laid) > 1:
            pairs = itertools.pairwise(laid)
            lasts = [a.last for a, b in pairs if {a.cluster, b.cluster} == ends]
            if lasts:
                also_gbps = sum(self.requirement.boundaries[last - 1].gbps for last in lasts)
                need = replace(need, gbps=need.gbps + also_gbps)
        return self._admits(before.cluster, cluster, need)

    def may_join(self, a: str, b: str) -> bool:
        """Tell whether any boundary of the pipelines may lie between two clusters."""
        return a != b and self._admits(a, b, self._least)

    @cached_property
    def _least(self) -> WanNeed:
        """What every boundary needs, at least."""
        boundaries = self.requirement.boundaries
        return WanNeed(
            gbps=min((one.gbps for one in boundaries), default=0.0),
            delay_s=max((one.delay_s for one in boundaries), default=0.0),
            jitter_s=max((one.jitter_s for one in boundaries), default=0.0),
        )

    def _admits(self, a: str, b: str, need: WanNeed) -> bool:
        links = self.resources.links
        for ends in ((a, b), (b, a)):
            link = links.get(ends)
            if link is None or (self.network and _lacks(link, need)):
                refused, old = _Refused(need, link), self._refused.get(ends)
                if old is None or refused.lacking_gbps < old.lacking_gbps:
                    self._refused[ends] = refused
                return False
        return True

    def refusals(self) -> list[Refusal]:
        """Return a refusal for each pair of clusters that was refused, `MOST_TOLD` at most, by name."""
        least = sorted(self._refused, key=lambda ends: (self._refused[ends].lacking_gbps, ends))
        return [self._refusal(ends) for ends in sorted(least[:MOST_TOLD])]

    def _refusal(self, ends: Ends) -> Refusal:
        refused, owners = self._refused[ends], [self.resources.sites[name].owner for name in ends]
        return Refusal(
            clusters=ends,
            stage="network",
            owner=owners[0],
            lacking_gbps=refused.lacking_gbps,
            reason=f"network: {ends[0]} ({owners[0]}) to {ends[1]} ({owners[1]}): {_words(refused)}",
        )


def _lacks(link: FreeLink, need: WanNeed) -> bool:
    return link.free_gbps < need.gbps or link.delay_s > need.delay_s or link.jitter_s > need.jitter_s


def _words(refused: _Refused) -> str:
    """Say what was lacking."""
    link, need = refused.link, refused.need
    if link is None:
        return "there is no link"
    if refused.lacking_gbps:
        return f"the pipelines need {need.gbps:.3g} Gbit/s, {link.free_gbps:.3g} Gbit/s is left"
    what, has_s, most_s = "delay", link.delay_s, need.delay_s
    if has_s <= most_s:
        what, has_s, most_s = "jitter", link.jitter_s, need.jitter_s
    return f"a {what} of {1e3 * has_s:.3g} ms, the schedule tolerates {1e3 * most_s:.3g} ms"
