"""`plan_moves`: the fewest running parts to move so that a waiting one can start; white paper 3.2.1, rescheduling.

A move saves a part, ends it and starts it again elsewhere on the same site: all of what moves has a place again beside
the waiting part. Sets of parts are tried by their number, so the first that works is smallest; of equally many the one
that costs least is taken. The search is exact unless it says otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_placement import GangPlacement
from isthmus.site.topology.gang_request import GangRequest
from isthmus.site.topology.place_gang import place_gang
from isthmus.site.topology.unit_kinds import UnitKind, num_fitting, unit_kinds

Key = TypeVar("Key", bound=Hashable)

MAX_CHECKS, MAX_TRIES = 50_000, 2_000
"""Sets of parts of which the sum is looked at, and those that are placed; beyond, the best so far is the answer."""
MAX_CANDIDATES = 20
"""Parts among which all sets are searched; of more, those whose nodes are cleared by the fewest moves."""


@dataclass(frozen=True, kw_only=True)
class RunningGang(Generic[Key]):
    """A part that runs: what it asked for, the cards that it has by node, and what its move costs in card-seconds.

    Parts that are not `movable` stay: exempt ones, those that cannot save, and those outside of windows and budgets.
    """

    key: Key
    request: GangRequest
    taken: Mapping[int, int]
    cost_card_s: float
    movable: bool = True


@dataclass(frozen=True, kw_only=True)
class MovePlan(Generic[Key]):
    """The parts to move, where the waiting part then goes, and where the moved ones go.

    `is_proven`: no smaller set of movable parts makes room.
    """

    moved: tuple[Key, ...]
    placement: GangPlacement
    moved_to: Mapping[Key, GangPlacement]
    cost_card_s: float
    is_proven: bool


def plan_moves(
    free: FreeCards,
    waiting: GangRequest,
    running: Iterable[RunningGang[Key]],
    *,
    gain_card_s: float,
    max_moves: int,
    max_tries: int = MAX_TRIES,
) -> MovePlan[Key] | None:
    """Return the fewest moves after which `waiting` has a place, or None: too many, too dear, or impossible.

    `gain_card_s` is what the earlier start is worth, in card-seconds: moves that cost as much or more are not made.
    After `max_tries` placements of sets the best so far is the answer.
    """
    if free.total < waiting.num_cards:
        return None  # moves free no card in sum
    movable = [one for one in running if one.movable and one.cost_card_s < gain_card_s]
    room = _Room(free, waiting)
    candidates, is_whole = _candidates(free, room, movable)
    checks, tries = itertools.count(), itertools.count()
    for num in range(room.fewest(candidates), min(max_moves, len(candidates)) + 1):
        best: MovePlan[Key] | None = None
        for chosen in itertools.combinations(candidates, num):
            cost = sum(one.cost_card_s for one in chosen)
            if cost >= gain_card_s or (best is not None and cost >= best.cost_card_s):
                continue
            if next(checks) >= MAX_CHECKS:
                return best
            if not room.may_fit(chosen):
                continue
            if next(tries) >= max_tries:
                return best
            found = _try(free, waiting, chosen)
            if found is not None:
                best = MovePlan(
                    moved=tuple(one.key for one in chosen), placement=found[0], moved_to=found[1],
                    cost_card_s=cost, is_proven=is_whole,
                )  # fmt: skip
        if best is not None:
            return best
    return None


class _Room:
    """How many of the waiting part's pieces the site holds, and what moves add to it."""

    def __init__(self, free: FreeCards, waiting: GangRequest) -> None:
        self._free = free
        self._kinds = [
            (kind, len(kind.units) - num_fitting(free, kind.piece_cards, kind.num_pieces))
            for kind in unit_kinds(free.tree, waiting)[0]
        ]
        self.in_super_nodes = any(kind.num_pieces > 1 and lacking > 0 for kind, lacking in self._kinds)

    def gain(self, moved: Iterable[RunningGang[Key]], kind: UnitKind) -> int:
        """Return how many more units of `kind`, by itself, the site holds without `moved`."""
        free, size, num = self._free, kind.piece_cards, kind.num_pieces
        freed: dict[int, int] = {}
        for one in moved:
            for node, mask in one.taken.items():
                freed[node] = freed.get(node, 0) + mask.bit_count()
        more = {node: (free.counts[node] + got) // size - free.counts[node] // size for node, got in freed.items()}
        level = free.tree.unit_level
        if num == 1 or level is None:
            return sum(more.values())
        total = 0
        for domain in {free.tree.domains[level][node] for node in more}:
            nodes = free.tree.members[level][domain]
            before = sum(free.counts[node] // size for node in nodes)
            total += (before + sum(more.get(node, 0) for node in nodes)) // num - before // num
        return total

    def may_fit(self, moved: Sequence[RunningGang[Key]]) -> bool:
        """Return whether each size of the waiting part's units, by itself, fits without `moved`."""
        return all(lacking <= 0 or self.gain(moved, kind) >= lacking for kind, lacking in self._kinds)

    def fewest(self, candidates: Sequence[RunningGang[Key]]) -> int:
        """Return a number of moves below which none make room: each adds at most the pieces of its nodes."""
        fewest, tree = 1, self._free.tree
        for kind, lacking in self._kinds:
            most = sorted(
                (sum(tree.cards[node] // kind.piece_cards for node in one.taken) for one in candidates), reverse=True
            )
            total = 0
            for num, pieces in enumerate(most, 1):
                total += pieces
                if total >= lacking:
                    fewest = max(fewest, num)
                    break
        return fewest

    def helps(self, one: RunningGang[Key], others: FreeCards) -> bool:
        """Return whether a node of `one` holds more of the waiting part once it and all `others` are gone."""
        counts = self._free.counts
        return any(
            others.counts[node] // kind.piece_cards > counts[node] // kind.piece_cards
            for kind, lacking in self._kinds
            for node in one.taken
            if lacking > 0
        )


def _try(
    free: FreeCards, waiting: GangRequest, moved: Collection[RunningGang[Key]]
) -> tuple[GangPlacement, dict[Key, GangPlacement]] | None:
    """Place the waiting part and `moved`, the largest units first; None if one has no place."""
    left = free.copy()
    for one in moved:
        for node, mask in one.taken.items():
            left.give(node, mask)
    requests = [(None, waiting), *((one.key, one.request) for one in moved)]
    places: dict[Key, GangPlacement] = {}
    own: GangPlacement | None = None
    for key, request in sorted(requests, key=lambda one: -max(unit.num_cards for unit in one[1].units)):
        found = place_gang(left, request)
        if not isinstance(found, GangPlacement):
            return None
        for node, mask in found.taken.items():
            left.take(node, mask)
        if key is None:
            own = found
        else:
            places[key] = found
    return None if own is None else (own, places)


def _candidates(
    free: FreeCards, room: _Room, movable: Sequence[RunningGang[Key]]
) -> tuple[list[RunningGang[Key]], bool]:
    """Return the parts among which sets are searched, cheapest first, and whether these are all."""
    if len(movable) <= MAX_CANDIDATES:
        return sorted(movable, key=lambda one: one.cost_card_s), True
    emptied = free.copy()
    for one in movable:
        for node, mask in one.taken.items():
            emptied.give(node, mask)
    useful = [one for one in movable if room.helps(one, emptied)]
    kept: dict[Key, RunningGang[Key]] = {}
    places = _parts_by_domain(free, useful, room.in_super_nodes).values()
    for parts in sorted(places, key=lambda parts: (len(parts), sum(one.cost_card_s for one in parts))):
        if len(kept.keys() | {one.key for one in parts}) > MAX_CANDIDATES:
            break
        kept |= {one.key: one for one in parts}
    return sorted(kept.values(), key=lambda one: one.cost_card_s), False


def _parts_by_domain(
    free: FreeCards, parts: Iterable[RunningGang[Key]], in_super_nodes: bool
) -> dict[int, list[RunningGang[Key]]]:
    """Return the parts on each node, or on each super-node for units that need one."""
    level = free.tree.unit_level if in_super_nodes else None
    found: dict[int, list[RunningGang[Key]]] = {}
    for one in parts:
        for place in {node if level is None else free.tree.domains[level][node] for node in one.taken}:
            found.setdefault(place, []).append(one)
    return found
