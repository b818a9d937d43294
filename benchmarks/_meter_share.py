"""The meter's share of the coordinator's time: both are timed event by event, in the same replay of a log.

Each event counts with the least of several replays, so that other load on the machine, which only adds, hardly counts;
the garbage collector is off.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from isthmus.control.accounting.meter import Meter
from isthmus.control.coordinator import coordinator as coordinator_module
from isthmus.control.coordinator.coordinator import Coordinator, CoordinatorConfig
from isthmus.control.state.events import Event

REPEATS = 7


class MeterTime(NamedTuple):
    """Nanoseconds of some events: of the coordinator, and of the meter in it."""

    events: int
    coordinator_ns: int
    meter_ns: int

    @property
    def share(self) -> float:
        """The meter's share."""
        return self.meter_ns / self.coordinator_ns


def meter_time(events: Sequence[Event], config: CoordinatorConfig, repeats: int = REPEATS) -> MeterTime:
    """Return what replaying `events` costs."""
    runs = [_replay(events, config) for _ in range(repeats)]
    whole, metered = ([min(times) for times in zip(*one, strict=True)] for one in zip(*runs, strict=True))
    return MeterTime(len(events), sum(whole), sum(metered))


def _replay(events: Sequence[Event], config: CoordinatorConfig) -> tuple[list[int], list[int]]:
    """Return the nanoseconds of each event, and of the meter in it."""
    coordinator, inside, whole, metered = Coordinator(config), [0], list[int](), list[int]()
    with _timed(inside), _no_collection():
        for event in events:
            inside[0], began_ns = 0, time.perf_counter_ns()
            coordinator.handle(event)
            whole.append(time.perf_counter_ns() - began_ns)
            metered.append(inside[0])
    return whole, metered


@contextmanager
def _timed(inside: list[int]) -> Iterator[None]:
    """Add the nanoseconds of the meter to `inside`."""

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        def measured(*given: Any) -> None:
            began_ns = time.perf_counter_ns()
            call(*given)
            inside[0] += time.perf_counter_ns() - began_ns

        return measured

    with (
        patch.object(coordinator_module, "meter_jobs", timed(coordinator_module.meter_jobs)),
        patch.object(Meter, "advance", timed(Meter.advance)),
    ):
        yield


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
