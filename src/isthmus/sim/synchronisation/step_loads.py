"""`step_loads`: what the steps of a strategy load, as shares of the bytes that are summed, without rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from isthmus.strategies import Phase, StrategySteps, steps

Resource = Literal["worker", "ring", "server", "switch", "slots"]
"""Worker NICs, links of the rings inside servers, NICs of parameter servers, ports of switches, slots of switches."""

_UNITS = 64
"""Elements of the smallest piece, so that a count of slots is as fine as 1/64 of a piece."""


@dataclass(frozen=True, kw_only=True)
class StageOfPhases:
    """Phases that stream: the load of the busiest resource of each kind, and the delays of their rounds.

    A load is a multiple of the bytes that a worker contributes.
    """

    names: tuple[str, ...]
    loads: tuple[tuple[Resource, float], ...]
    network_rounds: int
    """Rounds with a message between hosts, or to or from an aggregator."""
    inside_rounds: int
    """Rounds with messages inside hosts only."""
    between_hosts: tuple[tuple[int, int, float], ...]
    """Loads of each direction between two hosts: sender, receiver, load. Aggregators are numbered after hosts."""


@lru_cache(maxsize=512)
def step_loads(
    name: str, hosts: int, chips: int, num_aggregators: int, slot_share: float | None = None
) -> tuple[StageOfPhases, ...]:
    """Return the loads of strategy `name`, one entry for phases that stream into each other.

    The steps are those of a number of elements that all chunks divide. `slot_share` is what the slots of a switch
    hold, as a share of the elements; None means all.
    """
    num = 2 * hosts * chips * num_aggregators * _UNITS
    slots = None if slot_share is None else max(int(slot_share * num), 1)
    of = steps(name, hosts, chips, num, num_aggregators=num_aggregators, num_slots=slots, slot_elements=1)
    groups: list[list[Phase]] = []
    for phase in of.messages:
        if not any(step.stop > step.start for step in phase.steps):
            continue
        if groups and phase.streams:
            groups[-1].append(phase)
        else:
            groups.append([phase])
    return tuple(_stage(of, group) for group in groups)


def _stage(of: StrategySteps, phases: Sequence[Phase]) -> StageOfPhases:
    loads: dict[tuple[Resource, object], int] = defaultdict(int)
    held: dict[int, set[tuple[int, int]]] = defaultdict(set)
    rounds: dict[tuple[str, int], bool] = {}
    between: dict[tuple[int, int], int] = defaultdict(int)
    for name, step in ((phase.name, step) for phase in phases for step in phase.steps):
        source, target = of.host_of(step.sender), of.host_of(step.receiver)
        size = step.stop - step.start
        if size == 0:
            continue
        rounds[name, step.round] = rounds.get((name, step.round), False) or source != target
        if source == target:
            for link in _ring_links(step.sender, step.receiver, source * of.grid.chips, of.grid.chips):
                loads["ring", link] += size
            continue
        between[source, target] += size
        loads[_kind(of, step.sender), ("sends", source)] += size
        loads[_kind(of, step.receiver), ("receives", target)] += size
        if _kind(of, step.receiver) == "switch":
            held[step.receiver].add((step.start, step.stop))
    for switch, ranges in held.items():
        loads["slots", switch] = sum(stop - start for start, stop in ranges)
    return StageOfPhases(
        names=tuple(phase.name for phase in phases),
        loads=_busiest(loads.items(), of.grid.num_elements),
        network_rounds=sum(rounds.values()),
        inside_rounds=len(rounds) - sum(rounds.values()),
        between_hosts=tuple((*ends, size / of.grid.num_elements) for ends, size in between.items()),
    )


def _kind(of: StrategySteps, participant: int) -> Resource:
    beyond = participant - of.grid.num_workers
    return of.aggregators[beyond] if beyond >= 0 else "worker"


def _ring_links(sender: int, receiver: int, first: int, chips: int) -> list[tuple[int, int]]:
    """Return the links of a host's ring from `sender` to `receiver`, the shorter way round; `first` is its chip 0."""
    ahead = (receiver - sender) % chips
    way, hops = (1, ahead) if ahead <= chips - ahead else (-1, chips - ahead)
    return [(first + (sender - first + way * hop) % chips, way) for hop in range(hops)]


def _busiest(
    loads: Iterable[tuple[tuple[Resource, object], int]], num_elements: int
) -> tuple[tuple[Resource, float], ...]:
    most: dict[Resource, int] = {}
    for (kind, _), size in loads:
        most[kind] = max(most.get(kind, 0), size)
    return tuple((kind, size / num_elements) for kind, size in most.items())
