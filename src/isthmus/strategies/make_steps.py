"""`steps`: the steps of a named strategy; `STRATEGIES` is the list of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isthmus.core.errors import InputError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.strategies.named.atp import atp
from isthmus.strategies.named.hierarchical_ring import hierarchical_ring
from isthmus.strategies.named.mesh_2d import mesh_2d
from isthmus.strategies.named.parameter_server import parameter_server
from isthmus.strategies.named.passing import passing
from isthmus.strategies.named.psring import psring
from isthmus.strategies.named.ring import ring
from isthmus.strategies.named.switchml import switchml
from isthmus.strategies.named.torus_2d import torus_2d
from isthmus.strategies.strategy_steps import AggregatorKind, Phase, StrategySteps
from isthmus.strategies.worker_grid import WorkerGrid


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A named strategy: `phases(grid)` returns its messages, with rounds from 0 on in each phase.

    `aggregator` is the kind of its aggregators, None if workers alone sum. `fallback` is the kind of one more
    participant after the aggregators.
    """

    phases: Callable[[WorkerGrid], list[Phase]]
    aggregator: AggregatorKind | None = None
    fallback: AggregatorKind | None = None


STRATEGIES: Mapping[str, Strategy] = {
    "ring": Strategy(phases=ring),
    "hierarchical-ring": Strategy(phases=hierarchical_ring),
    "2d-torus": Strategy(phases=torus_2d),
    "2d-mesh": Strategy(phases=mesh_2d),
    "parameter-server": Strategy(phases=parameter_server, aggregator="server"),
    "psring": Strategy(phases=psring, aggregator="server"),
    "passing": Strategy(phases=passing, aggregator="switch"),
    "switchml": Strategy(phases=switchml, aggregator="switch"),
    "atp": Strategy(phases=atp, aggregator="switch", fallback="server"),
}
"""The strategies by name. Planner, simulator, checker and runtime know a strategy from here."""


def find_strategy(name: str) -> Strategy:
    """Return the strategy `name`, or raise `InputError` with the nearest name."""
    if name not in STRATEGIES:
        raise InputError(f"unknown strategy '{name}'", hint=suggest_name(name, STRATEGIES))
    return STRATEGIES[name]


def steps(
    name: str,
    hosts: int,
    chips: int,
    num_elements: int,
    *,
    num_aggregators: int = 1,
    num_slots: int | None = None,
    slot_elements: int = 64,
) -> StrategySteps:
    """Return the steps by which `hosts` of `chips` workers each sum `num_elements` elements; all receive the sum.

    Workers are participants 0 to `hosts * chips - 1`, host by host; `num_aggregators` parameter servers or switches
    follow if the strategy has any. `num_slots` slots of `slot_elements` elements in each switch bound what a switch
    adds at a time; None means enough for all elements. Raise `InputError` for an unknown name or a count below 1.
    """
    grid = WorkerGrid(
        hosts=hosts,
        chips=chips,
        num_elements=num_elements,
        num_aggregators=num_aggregators,
        num_slots=num_slots,
        slot_elements=slot_elements,
    )
    strategy = find_strategy(name)
    if num_slots is not None and strategy.aggregator != "switch":
        raise InputError(f"strategy '{name}' has no switch", hint="leave num_slots out")
    aggregators = (strategy.aggregator,) * num_aggregators if strategy.aggregator else ()
    fallback = (strategy.fallback,) if strategy.fallback else ()
    return StrategySteps(
        name=name, grid=grid, aggregators=aggregators + fallback, messages=tuple(strategy.phases(grid))
    )
