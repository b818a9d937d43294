"""`candidate_slots`: of many slots, the ones that are combined; a plan on a single slot may use any.

The search combines slots in pairs, triples and nested groups, so that its work grows with their cube. Of more than
`MAX_CANDIDATES` slots it keeps those with the best bound alone or with one linked neighbour, which one pass over the
links computes. Owners take turns: an owner who registers many clusters gets no more candidates than any other owner
that has as many. The choice is a heuristic; the proven bound of a search covers all slots.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.slots import ChipSlot

MAX_CANDIDATES = 24
"""Up to this many slots, all are combined."""

MAX_IN_PIPELINES = 16
"""Beyond `MAX_CANDIDATES`, pairs and triples of this number of slots are tried as one pipeline."""

WIDE_STEP = 1.5
"""Ratio of the numbers of slots that are tried as one ring of replicas, beyond `MAX_CANDIDATES`."""


class Candidates(NamedTuple):
    """Slots to combine, each tuple in the order in which they were given."""

    combined: tuple[ChipSlot, ...]
    # Those of them of which pairs and triples are tried as one pipeline.
    in_pipelines: tuple[ChipSlot, ...]
    # Larger sets to try as replicas.
    wide: tuple[tuple[ChipSlot, ...], ...]


def candidate_slots(
    slots: Sequence[ChipSlot], routes: Routes, no_wait_s: Callable[[ChipSlot], float], messages_bytes: float
) -> Candidates:
    """Return the slots to combine, and larger sets to try as replicas.

    `no_wait_s` returns the seconds of a step on a slot that never waits; `messages_bytes` is what a pipeline sends
    over each of its links in a step.
    """
    if len(slots) <= MAX_CANDIDATES:
        return Candidates(tuple(slots), tuple(slots), ())
    least_s = _least_seconds(slots, routes, no_wait_s, messages_bytes)
    by_owner: dict[str, list[ChipSlot]] = defaultdict(list)
    for slot in sorted(slots, key=lambda one: (least_s[one], one.cluster, one.group.name)):
        if least_s[slot] < math.inf:
            by_owner[slot.owner].append(slot)
    ranked = list(_in_turns(list(by_owner.values())))
    kept, piped = (set(ranked[:most]) for most in (MAX_CANDIDATES, MAX_IN_PIPELINES))
    return Candidates(
        tuple(slot for slot in slots if slot in kept),
        tuple(slot for slot in slots if slot in piped),
        tuple(_wide_sets(ranked, routes)),
    )


def _least_seconds(
    slots: Sequence[ChipSlot], routes: Routes, no_wait_s: Callable[[ChipSlot], float], messages_bytes: float
) -> dict[ChipSlot, float]:
    """Return a bound on each slot's best step: alone, or with the best neighbour and the messages between them."""
    alone_s = {slot: no_wait_s(slot) for slot in slots}
    best: dict[str, ChipSlot] = {}
    for slot in slots:
        if slot.cluster not in best or alone_s[slot] < alone_s[best[slot.cluster]]:
            best[slot.cluster] = slot
    least_s = dict(alone_s)
    for a, b in routes.linked_pairs():
        if a in best and b in best:
            ends = best[a], best[b]
            together_s = 1 / max(sum(1 / alone_s[one] for one in ends), 1e-300)
            pair_s = max(together_s, messages_bytes / routes.bytes_per_s(a, b))
            for one in ends:
                least_s[one] = min(least_s[one], pair_s)
    return least_s


def _in_turns(queues: Sequence[Sequence[ChipSlot]]) -> Iterator[ChipSlot]:
    """Yield the first of every queue, then the second of every queue, and on."""
    for turn in itertools.zip_longest(*queues):
        yield from (slot for slot in turn if slot is not None)


def _wide_sets(ranked: Sequence[ChipSlot], routes: Routes) -> Iterator[tuple[ChipSlot, ...]]:
    """Yield sets of more than `MAX_CANDIDATES` slots in which each is linked to the one before it."""
    ring: list[ChipSlot] = []
    for slot in ranked:
        if not ring or not routes.missing_link(ring[-1].cluster, slot.cluster):
            ring.append(slot)
    count = len(ring)
    while count > MAX_CANDIDATES:
        yield tuple(ring[:count])
        count = math.floor(count / WIDE_STEP)
