"""`place_all`: places for all pipelines of a plan, one group of equal pipelines after the other.

`place` places each group on the resources that the previous groups left, the group with the largest stages
first; the search backtracks if a later group does not fit, so all groups are placed or none. Clusters that
hold the same layers must have links, with bandwidth for the gradients beside that of the pipelines.
Exact if every cluster has only whole free nodes and one partial node, unless the search budget runs out
(`whole` false).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.control.placement.place import Candidate, place, varied
from isthmus.control.placement.resources.demand import Alike, Demand
from isthmus.control.placement.resources.free_resources import Ends, Resources
from isthmus.control.placement.resources.gradient_traffic import held_by
from isthmus.control.placement.stages.compute_refusals import never
from isthmus.core.errors import ConflictError
from isthmus.core.job import Placement
from isthmus.core.plan import Refusal

EACH, CALLS = 16, 64
"""Largest number of candidates per group of pipelines, and of calls of `place` per search."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """A place for every pipeline of a plan: one candidate per `Demand.kinds`, and the reasons why it fits."""

    candidates: tuple[Candidate, ...]
    why: str

    @property
    def clusters(self) -> tuple[str, ...]:
        """Clusters in the order of the pipelines, each once."""
        return tuple(dict.fromkeys(name for one in self.candidates for name in one.clusters))

    @property
    def price_per_hour(self) -> float:
        """Price of all pipelines per hour."""
        return sum(one.price_per_hour for one in self.candidates)

    @property
    def crossings(self) -> int:
        """Number of WAN crossings of all groups."""
        return sum(one.crossings for one in self.candidates)


@dataclass(frozen=True, kw_only=True)
class TogetherPlacements:
    """Places for all pipelines of a plan, best first; refusals; `whole` unless the search budget ran out."""

    candidates: tuple[Together, ...]
    refused: tuple[Refusal, ...] = ()
    whole: bool = True


def place_all(
    demand: Demand, resources: Resources, switches: Placement, keep: int = 3, calls: int = CALLS
) -> TogetherPlacements:
    """Return up to `keep` ways to place all pipelines on the free resources, within the constraints."""
    if len(demand.kinds) == 1:
        found = place(demand.kinds[0].requirement, resources, switches, keep)
        candidates = tuple(Together(candidates=(one,), why=one.why) for one in found.candidates)
        return TogetherPlacements(candidates=candidates, refused=found.refused, whole=found.whole)
    refusal = never(demand.chips, demand.num_cards, switches)
    if refusal:
        return TogetherPlacements(candidates=(), refused=(refusal,))
    searches = [_Search(demand, one, keep, calls) for one in _per_owner(resources, switches)]
    placements = [one for search in searches for one in search.run(resources)]
    placements.sort(key=lambda one: (one.crossings, len(one.clusters), one.price_per_hour))
    return TogetherPlacements(
        candidates=tuple(varied(placements, keep)),
        refused=() if placements else tuple(dict.fromkeys(r for one in searches for r in one.refused)),
        whole=all(one.whole for one in searches),
    )


def _per_owner(resources: Resources, switches: Placement) -> list[Placement]:
    """Return the constraints to search under: as given, or one per owner if owners must not be combined."""
    if switches.several_owners:
        return [switches]
    owners = {site.owner for site in resources.sites.values()}
    admitted = sorted(owners & set(switches.owners) if switches.owners else owners)
    return [switches.model_copy(update={"owners": (owner,)}) for owner in admitted] or [switches]


@dataclass
class _Search:
    """One backtracking search; `refused` has the refusals at its deepest level."""

    demand: Demand
    switches: Placement
    keep: int
    calls: int
    whole: bool = True
    refused: tuple[Refusal, ...] = ()
    _farthest: int = -1

    def run(self, resources: Resources) -> list[Together]:
        """Return ways to place all groups, in the order found."""
        found = list[Together]()
        for laid, left in self._lay({}, resources):
            found.append(self._together(laid, left))
            if len(found) >= 4 * self.keep:
                self.whole = False
                break
        return found

    def _lay(
        self, laid: dict[int, Candidate], left: Resources
    ) -> Iterator[tuple[dict[int, Candidate], Resources]]:
        """Yield complete placements, as candidates by group number, with the resources they leave."""
        if len(laid) == len(self.demand.kinds):
            yield laid, left
            return
        if not self.calls:
            self.whole = False
            return
        self.calls -= 1
        number = self.demand.largest_first[len(laid)]
        kind = self.demand.kinds[number]
        found = place(kind.requirement, left, self.switches, EACH)
        self.whole = self.whole and found.whole and len(found.candidates) < EACH
        if not found.candidates:
            self._refuse(len(laid), (_told(kind, one, bool(laid)) for one in found.refused))
        for one in found.candidates:
            extended = {**laid, number: one}
            try:
                remaining, _ = left.beside(kind.requirement, one.ranges, network=self.switches.network)
            except ConflictError:
                continue
            refusal = self._gradients(extended, remaining)
            if refusal is None:
                yield from self._lay(extended, remaining)
            else:
                self._refuse(len(laid), [refusal])

    def _gradients(self, laid: dict[int, Candidate], left: Resources) -> Refusal | None:
        """Return why links cannot carry the gradients, or None; bandwidth is checked once all is placed."""
        rates = gradient_gbps(self.demand, laid)
        is_complete = len(laid) == len(self.demand.kinds)
        for ends, gbps in sorted(rates.items()):
            link = left.links.get(ends)
            free_gbps = link.free_gbps if link else 0.0
            if link is None or (is_complete and self.switches.network and free_gbps < gbps):
                return gradient_refusal(left, ends, gbps)
        return None

    def _refuse(self, depth: int, refused: Iterator[Refusal] | Sequence[Refusal]) -> None:
        if depth > self._farthest:
            self._farthest, self.refused = depth, ()
        if depth == self._farthest:
            self.refused = tuple(dict.fromkeys((*self.refused, *refused)))

    def _together(self, laid: dict[int, Candidate], left: Resources) -> Together:
        kinds = self.demand.kinds
        reasons = [f"{kinds[number].words}: {laid[number].why}" for number in range(len(kinds))]
        for (a, b), gbps in sorted(gradient_gbps(self.demand, laid).items()):
            free_gbps = left.links[a, b].free_gbps
            reasons.append(f"gradients from {a} to {b} need {gbps:.3g} of {free_gbps:.3g} Gbit/s left")
        return Together(candidates=tuple(laid[n] for n in range(len(kinds))), why="; ".join(reasons))


def gradient_gbps(demand: Demand, laid: dict[int, Candidate]) -> dict[Ends, float]:
    """Return the Gbit/s that the gradients of placed groups need, by pair of clusters."""
    held = [
        one
        for number, candidate in laid.items()
        for one in held_by(demand.kinds[number].spans, candidate.ranges)
    ]
    return demand.gradients.gbps(held)


def gradient_refusal(left: Resources, ends: Ends, gbps: float) -> Refusal:
    """Return the refusal of a link that cannot carry the gradients of replicas at its ends."""
    link, owners = left.links.get(ends), [left.sites[name].owner for name in ends]
    free_gbps = link.free_gbps if link else 0.0
    shortage = "there is no link" if link is None else f"{free_gbps:.3g} Gbit/s is left"
    return Refusal(
        clusters=ends,
        stage="network",
        owner=owners[0],
        lacking_gbps=max(0.0, gbps - free_gbps),
        reason=f"network: {ends[0]} ({owners[0]}) to {ends[1]} ({owners[1]}): the gradients of replicas need "
        f"{gbps:.3g} Gbit/s, {shortage}",
    )


def _told(kind: Alike, refusal: Refusal, beside: bool) -> Refusal:
    """Return a refusal that names the replicas that it concerns."""
    stage, _, rest = refusal.reason.partition(": ")
    others = ", beside the others" if beside else ""
    return refusal.model_copy(update={"reason": f"{stage}: for {kind.words}{others}: {rest}"})
