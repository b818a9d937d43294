"""`ring`: one ring over all workers, host by host."""

from __future__ import annotations

from isthmus.strategies.named.ring_phases import all_gather, reduce_scatter
from isthmus.strategies.strategy_steps import Phase
from isthmus.strategies.worker_grid import WorkerGrid


def ring(grid: WorkerGrid) -> list[Phase]:
    """Return the phases: reduce-scatter, then all-gather, over N workers.

    The fewest bytes that N workers can send if all send the same: 2 (N - 1) / N of the elements each, and so each
    host, in 2 (N - 1) rounds. Source: Gibiansky, 2017.
    """
    workers = list(range(grid.num_workers))
    return [
        Phase("reduce-scatter", tuple(reduce_scatter(workers, grid.everything))),
        Phase("all-gather", tuple(all_gather(workers, grid.everything))),
    ]
