"""`parameter-server`: every worker sends all its elements to the servers, which return the sum."""

from __future__ import annotations

from isthmus.strategies.named.aggregation import multicast, push
from isthmus.strategies.strategy_steps import Phase
from isthmus.strategies.worker_grid import WorkerGrid, chunks


def parameter_server(grid: WorkerGrid) -> list[Phase]:
    """Return the phases; each of the servers sums an equal share of the elements.

    A host of G chips sends and receives G times the elements, each of p servers H G / p times. Source: section 4.1
    of the PASSING paper, equation (4).
    """
    workers = range(grid.num_workers)
    shares = [
        (grid.aggregator(number), share) for number, share in enumerate(chunks(grid.everything, grid.num_aggregators))
    ]
    return [
        Phase("push", tuple(step for server, share in shares for step in push(workers, server, share))),
        Phase("broadcast", tuple(step for server, share in shares for step in multicast(workers, server, share))),
    ]
