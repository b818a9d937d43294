"""`check_steps`: proves by symbolic execution that steps compute their regions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import overload

from isthmus.core.errors import PlanError
from isthmus.strategies.count_elements import ElementCounts, count_elements
from isthmus.strategies.step import Region, Step
from isthmus.strategies.strategy_steps import StrategySteps


@overload
def check_steps(steps: StrategySteps) -> ElementCounts: ...
@overload
def check_steps(steps: Sequence[Step], regions: Sequence[Region]) -> None: ...
def check_steps(steps: Sequence[Step], regions: Sequence[Region] | None = None) -> ElementCounts | None:
    """Raise `PlanError` unless every receiver of `regions` ends with each contribution exactly once.

    The steps of a named strategy carry their regions; for them, return the elements that each host and aggregator
    sends and receives.

    Also raises if a step sends what its sender does not hold, if two messages of a round replace one value or one
    both replaces and adds, or if ranges overlap without being equal: then no order of arrival could be stated.
    Steps are executed round by round, each rank with what it held before the round. A rank that waits for the
    messages of its rounds in ascending order, and sends as soon as it holds the values, never deadlocks: each message
    depends on messages of earlier rounds only.
    """
    if regions is None:
        if not isinstance(steps, StrategySteps):
            raise PlanError("steps without regions", hint="pass regions, or the steps of a named strategy")
        check_steps(steps, steps.regions)
        return count_elements(steps)
    ranges = sorted({(step.start, step.stop) for step in steps})
    for (_, stop), (start, after) in pairwise(ranges):
        if start < stop:
            raise PlanError(f"the steps cut elements at {start} and {after}, inside another step's range to {stop}")
    by_range: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in steps:
        by_range[step.start, step.stop].append(step)
    covered = dict.fromkeys(regions, 0)
    for (start, stop), messages in by_range.items():
        region = next((one for one in regions if one.start <= start and stop <= one.stop), None)
        if region is None:
            raise PlanError(f"elements {start} to {stop} are in no region")
        covered[region] += stop - start
        _check_range(region, start, sorted(messages, key=lambda step: step.round))
    for region, elements in covered.items():
        stays = len(region.contributors) == 1 and region.receivers == region.contributors
        if not stays and elements != region.stop - region.start:
            raise PlanError(f"the steps move {elements} elements of {region}")
    return None


def _check_range(region: Region, start: int, messages: Sequence[Step]) -> None:
    held = {rank: Counter([rank]) for rank in region.contributors}
    for number in sorted({step.round for step in messages}):
        arrived: dict[int, list[Step]] = defaultdict(list)
        for step in messages:
            if step.round == number:
                if step.sender not in held or step.sender == step.receiver:
                    raise PlanError(f"{step}: the sender does not hold the values, or is the receiver")
                arrived[step.receiver].append(step)
        before = dict(held)
        for receiver, parts in arrived.items():
            if not all(step.adds for step in parts):
                if len(parts) > 1:
                    raise PlanError(f"round {number}: messages to rank {receiver} replace one value: {parts}")
                held[receiver] = before[parts[0].sender]
            else:
                own = before.get(receiver, Counter())
                held[receiver] = sum((before[step.sender] for step in parts), own)
    for rank in region.receivers:
        if held.get(rank) != Counter(region.contributors):
            raise PlanError(f"rank {rank} ends with {dict(held.get(rank, {}))} of elements from {start} on in {region}")
