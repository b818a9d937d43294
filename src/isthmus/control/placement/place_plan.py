"""`place_plan`: places for all pipelines of a plan, one group of equal pipelines after the other.

`place_pipelines` places each group on the resources that the previous groups left, the group with the largest stages
first; the search backtracks if a later group does not fit, so all groups are placed or none. Clusters that
hold the same layers must have links, with bandwidth for the gradients beside that of the pipelines.
Exact if every cluster has only whole free nodes and one partial node, unless the search budget runs out
(`exhaustive` false).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.control.placement.filters.compute_refusals import constraint_refusal
from isthmus.control.placement.place_pipelines import Candidate, diverse_first, place_pipelines
from isthmus.control.placement.resources.free_resources import ClusterPair, FreeResources
from isthmus.control.placement.resources.gradient_traffic import stage_locations
from isthmus.control.placement.resources.plan_requirement import EqualPipelines, PlanRequirement
from isthmus.core.errors import ConflictError
from isthmus.core.job import PlacementConstraints
from isthmus.core.plan import Refusal

CANDIDATES_PER_GROUP, MAX_SEARCHES = 16, 64
"""Largest number of candidates per group of pipelines, and of calls of `place_pipelines` per search."""


@dataclass(frozen=True, kw_only=True)
class PlanPlacement:
    """A place for every pipeline of a plan: one candidate per `PlanRequirement.groups`, and the reasons why it fits."""

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
    def wan_crossings(self) -> int:
        """Number of WAN crossings of all groups."""
        return sum(one.wan_crossings for one in self.candidates)


@dataclass(frozen=True, kw_only=True)
class PlanPlacementResult:
    """Places for all pipelines of a plan, best first; refusals; `exhaustive` unless the search budget ran out."""

    candidates: tuple[PlanPlacement, ...]
    refused: tuple[Refusal, ...] = ()
    exhaustive: bool = True


def place_plan(
    plan_requirement: PlanRequirement,
    resources: FreeResources,
    constraints: PlacementConstraints,
    keep: int = 3,
    max_searches: int = MAX_SEARCHES,
) -> PlanPlacementResult:
    """Return up to `keep` ways to place all pipelines on the free resources, within the constraints."""
    if len(plan_requirement.groups) == 1:
        found = place_pipelines(plan_requirement.groups[0].requirement, resources, constraints, keep)
        candidates = tuple(PlanPlacement(candidates=(one,), why=one.why) for one in found.candidates)
        return PlanPlacementResult(candidates=candidates, refused=found.refused, exhaustive=found.exhaustive)
    refusal = constraint_refusal(plan_requirement.chips, plan_requirement.num_devices, constraints)
    if refusal:
        return PlanPlacementResult(candidates=(), refused=(refusal,))
    searches = [
        _Search(plan_requirement, one, keep, max_searches) for one in _constraints_per_owner(resources, constraints)
    ]
    placements = [one for search in searches for one in search.run(resources)]
    placements.sort(key=lambda one: (one.wan_crossings, len(one.clusters), one.price_per_hour))
    return PlanPlacementResult(
        candidates=tuple(diverse_first(placements, keep)),
        refused=() if placements else tuple(dict.fromkeys(r for one in searches for r in one.refused)),
        exhaustive=all(one.exhaustive for one in searches),
    )


def _constraints_per_owner(resources: FreeResources, constraints: PlacementConstraints) -> list[PlacementConstraints]:
    """Return the constraints to search under: as given, or one per owner if owners must not be combined."""
    if constraints.several_owners:
        return [constraints]
    owners = {site.owner for site in resources.sites.values()}
    admitted = sorted(owners & set(constraints.owners) if constraints.owners else owners)
    return [constraints.model_copy(update={"owners": (owner,)}) for owner in admitted] or [constraints]


@dataclass
class _Search:
    """One backtracking search; `refused` has the refusals at its deepest level."""

    plan_requirement: PlanRequirement
    constraints: PlacementConstraints
    keep: int
    searches_left: int
    exhaustive: bool = True
    refused: tuple[Refusal, ...] = ()
    _deepest: int = -1

    def run(self, resources: FreeResources) -> list[PlanPlacement]:
        """Return ways to place all groups, in the order found."""
        found = list[PlanPlacement]()
        for laid, left in self._extend({}, resources):
            found.append(self._plan_placement(laid, left))
            if len(found) >= 4 * self.keep:
                self.exhaustive = False
                break
        return found

    def _extend(
        self, placed: dict[int, Candidate], left: FreeResources
    ) -> Iterator[tuple[dict[int, Candidate], FreeResources]]:
        """Yield complete placements, as candidates by group number, with the resources they leave."""
        if len(placed) == len(self.plan_requirement.groups):
            yield placed, left
            return
        if not self.searches_left:
            self.exhaustive = False
            return
        self.searches_left -= 1
        number = self.plan_requirement.largest_first[len(placed)]
        kind = self.plan_requirement.groups[number]
        found = place_pipelines(kind.requirement, left, self.constraints, CANDIDATES_PER_GROUP)
        self.exhaustive = self.exhaustive and found.exhaustive and len(found.candidates) < CANDIDATES_PER_GROUP
        if not found.candidates:
            self._refuse(len(placed), (_name_replicas(kind, one, bool(placed)) for one in found.refused))
        for one in found.candidates:
            extended = {**placed, number: one}
            try:
                remaining, _ = left.after_placing(kind.requirement, one.ranges, network=self.constraints.network)
            except ConflictError:
                continue
            refusal = self._gradient_refusal(extended, remaining)
            if refusal is None:
                yield from self._extend(extended, remaining)
            else:
                self._refuse(len(placed), [refusal])

    def _gradient_refusal(self, placed: dict[int, Candidate], left: FreeResources) -> Refusal | None:
        """Return why links cannot carry the gradients, or None; bandwidth is checked once all is placed."""
        rates = gradient_gbps(self.plan_requirement, placed)
        is_complete = len(placed) == len(self.plan_requirement.groups)
        for ends, gbps in sorted(rates.items()):
            link = left.links.get(ends)
            free_gbps = link.free_gbps if link else 0.0
            if link is None or (is_complete and self.constraints.network and free_gbps < gbps):
                return gradient_refusal(left, ends, gbps)
        return None

    def _refuse(self, depth: int, refused: Iterator[Refusal] | Sequence[Refusal]) -> None:
        if depth > self._deepest:
            self._deepest, self.refused = depth, ()
        if depth == self._deepest:
            self.refused = tuple(dict.fromkeys((*self.refused, *refused)))

    def _plan_placement(self, placed: dict[int, Candidate], left: FreeResources) -> PlanPlacement:
        kinds = self.plan_requirement.groups
        reasons = [f"{kinds[number].label}: {placed[number].why}" for number in range(len(kinds))]
        for (a, b), gbps in sorted(gradient_gbps(self.plan_requirement, placed).items()):
            free_gbps = left.links[a, b].free_gbps
            reasons.append(f"gradients from {a} to {b} need {gbps:.3g} of {free_gbps:.3g} Gbit/s left")
        return PlanPlacement(candidates=tuple(placed[n] for n in range(len(kinds))), why="; ".join(reasons))


def gradient_gbps(plan_requirement: PlanRequirement, placed: dict[int, Candidate]) -> dict[ClusterPair, float]:
    """Return the Gbit/s that the gradients of placed groups need, by pair of clusters."""
    held = [
        one
        for number, candidate in placed.items()
        for one in stage_locations(plan_requirement.groups[number].layer_spans, candidate.ranges)
    ]
    return plan_requirement.gradients.gbps_by_pair(held)


def gradient_refusal(left: FreeResources, ends: ClusterPair, gbps: float) -> Refusal:
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


def _name_replicas(group: EqualPipelines, refusal: Refusal, beside: bool) -> Refusal:
    """Return a refusal that names the replicas that it concerns."""
    stage, _, rest = refusal.reason.partition(": ")
    others = ", beside the others" if beside else ""
    return refusal.model_copy(update={"reason": f"{stage}: for {group.label}{others}: {rest}"})
