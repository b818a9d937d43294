"""`switchml`: every worker sends all its elements through the switches, which add."""

from __future__ import annotations

from isthmus.strategies.named.aggregation import stream_through
from isthmus.strategies.strategy_steps import Phase
from isthmus.strategies.worker_grid import WorkerGrid, chunks


def switchml(grid: WorkerGrid) -> list[Phase]:
    """Return the one phase; each switch adds an equal share of the elements.

    Every worker is a worker of its own to the switch, also where several share a host's network card: a host of G
    chips sends and receives G times the elements. Source: A. Sapio et al., "Scaling distributed machine learning
    with in-network aggregation", 2021; section 5.1 of the PASSING paper for several chips on a host.
    """
    window = None if grid.num_slots is None else grid.num_slots * grid.slot_elements
    return [
        Phase(
            "through the switches",
            tuple(
                step
                for number, share in enumerate(chunks(grid.everything, grid.num_aggregators))
                for step in stream_through(range(grid.num_workers), grid.aggregator(number), share, window)
            ),
        )
    ]
