"""The meter's share of the coordinator's time: of its events alone, and of all that it does while a pool runs.

`meter_time` times both event by event, in the same replay of a log. Each event counts with the least of several
replays, so that other load on the machine, which only adds, hardly counts; the garbage collector is off.

`running_time` lets a simulated pool run jobs of hours, whose sites report every `REPORT_S`, and times what the
coordinator does: what it answers to reports that change nothing is most of it, and is in no log.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from isthmus.control.accounting.meter import Meter
from isthmus.control.coordinator import coordinator as coordinator_module
from isthmus.control.coordinator.coordinator import Coordinator, CoordinatorConfig
from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.simulated_server import MemoryLog
from isthmus.control.simulation.traces.generate_trace import generate_trace
from isthmus.control.simulation.traces.job_trace import Trace
from isthmus.control.simulation.traces.trace_pools import assign_owners, make_trace_pool
from isthmus.control.state.events import Event, TariffPublished
from isthmus.core.owner.tariff import Tariff
from isthmus.core.process.gc_pause import collection_paused

REPEATS = 7
REPORT_S = 2.0
"""Between two reports of a site, ten times as long as of an agent: the coordinator's other work is not overstated."""
STRETCH = 4.0
"""Of the times of a generated trace, whose mean job then runs for four hours."""
PRICED_S = 10.0
"""When each owner publishes its tariff."""
SITES = {f"site-{number}": 64 for number in range(4)}


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


def running_time(num_jobs: int, seed: int) -> tuple[MeterTime, float]:
    """Return what the coordinator does for `num_jobs` jobs, and the days that they took."""
    drawn = generate_trace(SITES, seed=seed, num_jobs=num_jobs).jobs
    trace = Trace(jobs=tuple(replace(one, submit_s=STRETCH * one.submit_s, run_s=STRETCH * one.run_s) for one in drawn))
    jobs, pool = assign_owners(trace, make_trace_pool(trace, 0.8, len(SITES)))
    log, inside = MemoryLog(), [0]
    with _timed(inside):
        world = PoolSimulation(pool, jobs, delays=Delays(heartbeat_interval_s=REPORT_S), log=log)
        for site in pool.clusters:
            price = {"cluster": site.name, "node_group": "nodes", "per_chip_hour": "2.5"}
            tariff = Tariff.model_validate({"currency": "EUR", "prices": [price]})
            world.kernel.call_at(PRICED_S, world.server.submit_event, partial(_published, site.owner, tariff))
        world.run()
    whole_ns = round(world.server.decision_wall_s * 1e9)
    return MeterTime(len(log.stored), whole_ns, inside[0]), world.kernel.now_s / 86_400


def _published(owner: str, tariff: Tariff, now_s: float) -> Event:
    return TariffPublished(now_s=now_s, by=owner, owner=owner, tariff=tariff)


def _replay(events: Sequence[Event], config: CoordinatorConfig) -> tuple[list[int], list[int]]:
    """Return the nanoseconds of each event, and of the meter in it."""
    coordinator, inside, whole, metered = Coordinator(config), [0], list[int](), list[int]()
    gc.collect()
    with _timed(inside), collection_paused():
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
