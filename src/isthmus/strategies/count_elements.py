"""`count_elements`, `crossing_elements`: how many elements cross the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.errors import PlanError
from isthmus.strategies.step import Step
from isthmus.strategies.strategy_steps import StrategySteps


@dataclass(frozen=True, kw_only=True)
class ElementCounts:
    """Elements that cross the network, by host and by aggregator; messages inside a host are left out.

    What aggregators send and receive is what hosts receive from and send to them, added up by aggregator.
    """

    sent_by_host: tuple[int, ...]
    received_by_host: tuple[int, ...]
    sent_by_aggregator: tuple[int, ...]
    received_by_aggregator: tuple[int, ...]
    num_rounds: int
    """Message delays from first to last: rounds of all phases."""


def count_elements(steps: StrategySteps) -> ElementCounts:
    """Return what each host and each aggregator sends and receives, in elements."""
    places = steps.grid.hosts + len(steps.aggregators)
    sent, received = [0] * places, [0] * places
    for step in steps:
        if not (0 <= step.sender < steps.num_participants and 0 <= step.receiver < steps.num_participants):
            raise PlanError(f"{step}: a participant is not below {steps.num_participants}")
        source, target = steps.host_of(step.sender), steps.host_of(step.receiver)
        if source != target:
            sent[source] += step.stop - step.start
            received[target] += step.stop - step.start
    hosts = steps.grid.hosts
    return ElementCounts(
        sent_by_host=tuple(sent[:hosts]),
        received_by_host=tuple(received[:hosts]),
        sent_by_aggregator=tuple(sent[hosts:]),
        received_by_aggregator=tuple(received[hosts:]),
        num_rounds=1 + max((step.round for step in steps), default=-1),
    )


def crossing_elements(steps: Sequence[Step], cluster_of: Sequence[str]) -> dict[str, int]:
    """Return how many elements each cluster sends to others; `cluster_of[r]` is the cluster of rank `r`."""
    sent = dict.fromkeys(cluster_of, 0)
    for step in steps:
        if cluster_of[step.sender] != cluster_of[step.receiver]:
            sent[cluster_of[step.sender]] += step.stop - step.start
    return sent
