"""`passing`: a ring inside each host, switches that add between hosts."""

from __future__ import annotations

from isthmus.strategies.named.aggregation import stream_through
from isthmus.strategies.named.ring_phases import all_gather, held_chunk, reduce_scatter
from isthmus.strategies.strategy_steps import Phase
from isthmus.strategies.worker_grid import WorkerGrid, chunks


def passing(grid: WorkerGrid) -> list[Phase]:
    """Return the phases: reduce-scatter in hosts, each chip's chunk through the switches, all-gather in hosts.

    A host sends and receives the elements once, at the same time. The chips of a host have equal shares of a
    switch's slots, at least one each. One host needs no switch. Source: section 4.2 of the PASSING paper.
    """
    hosts = [grid.host(host) for host in range(grid.hosts)]
    window = None if grid.num_slots is None else max(grid.num_slots // grid.chips, 1) * grid.slot_elements
    through = [
        step
        for chip in range(grid.chips)
        for number, share in enumerate(chunks(held_chunk(chip, grid.everything, grid.chips), grid.num_aggregators))
        for step in stream_through(grid.column(chip), grid.aggregator(number), share, window)
        if grid.hosts > 1
    ]
    return [
        Phase("reduce-scatter inside hosts", tuple(s for one in hosts for s in reduce_scatter(one, grid.everything))),
        Phase("through the switches", tuple(through)),
        Phase(
            "all-gather inside hosts",
            tuple(step for one in hosts for step in all_gather(one, grid.everything)),
            streams=grid.hosts > 1,
        ),
    ]
