"""`psring`: a ring inside each host, parameter servers between hosts."""

from __future__ import annotations

from isthmus.strategies.named.aggregation import multicast, push
from isthmus.strategies.named.ring_phases import all_gather, held_chunk, reduce_scatter
from isthmus.strategies.strategy_steps import Phase
from isthmus.strategies.worker_grid import WorkerGrid, chunks


def psring(grid: WorkerGrid) -> list[Phase]:
    """Return the phases: reduce-scatter in hosts, push of each chip's chunk, broadcast to the same chips, all-gather.

    A host sends and receives the elements once, each of p servers H / p times. One host needs no server. The
    all-gather streams behind the broadcast. Source: section 4.1 of the PASSING paper, equations (1) to (3).
    """
    hosts = [grid.host(host) for host in range(grid.hosts)]
    shares = [
        (grid.column(chip), grid.aggregator(number), share)
        for chip in range(grid.chips)
        for number, share in enumerate(
            chunks(held_chunk(chip, grid.everything, grid.chips), grid.num_aggregators),
        )
        if grid.hosts > 1
    ]
    return [
        Phase("reduce-scatter inside hosts", tuple(s for one in hosts for s in reduce_scatter(one, grid.everything))),
        Phase("push", tuple(step for share in shares for step in push(*share))),
        Phase("broadcast", tuple(step for share in shares for step in multicast(*share))),
        Phase(
            "all-gather inside hosts",
            tuple(step for one in hosts for step in all_gather(one, grid.everything)),
            streams=grid.hosts > 1,
        ),
    ]
