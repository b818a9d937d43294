"""`atp`: as `switchml`, with a parameter server for what finds no slot."""

from __future__ import annotations

from isthmus.strategies.named.aggregation import multicast, push
from isthmus.strategies.step import Step
from isthmus.strategies.strategy_steps import Phase
from isthmus.strategies.worker_grid import WorkerGrid, chunks


def atp(grid: WorkerGrid) -> list[Phase]:
    """Return the phases: each worker sends everything at once; switches add what fits into their slots.

    Workers wait for no window, so the elements of a switch's share beyond its slots arrive before a slot is free
    and go on to the parameter server, the participant after the switches. A host of G chips sends and receives G
    times the elements. A switch returns what it added. Source: C. Lao et al., "ATP: in-network aggregation for
    multi-tenant learning", NSDI 2021.
    """
    workers, server = range(grid.num_workers), grid.aggregator(grid.num_aggregators)
    sent, returned = list[Step](), list[Step]()
    for number, (start, stop) in enumerate(chunks(grid.everything, grid.num_aggregators)):
        room = stop - start if grid.num_slots is None else grid.num_slots * grid.slot_elements
        full = min(start + room, stop)
        for aggregator, part in ((grid.aggregator(number), (start, full)), (server, (full, stop))):
            sent += push(workers, aggregator, part)
            returned += multicast(workers, aggregator, part)
    return [Phase("push", tuple(sent)), Phase("multicast", tuple(returned), streams=True)]
