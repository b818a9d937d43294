"""`2d-torus`: reduce-scatter inside hosts, all-reduce of each share between hosts, all-gather inside hosts."""

from __future__ import annotations

from isthmus.strategies.named.ring_phases import all_gather, all_reduce, held_chunk, reduce_scatter
from isthmus.strategies.strategy_steps import Phase
from isthmus.strategies.worker_grid import WorkerGrid


def torus_2d(grid: WorkerGrid) -> list[Phase]:
    """Return the phases of a torus whose rows are hosts and whose columns are the equal chips of all hosts.

    A host sends 2 (H - 1) / H of the elements, by all its workers. Source: H. Mikami et al., "Massively distributed
    SGD: ImageNet/ResNet-50 training in a flash", 2018.
    """
    rows = [grid.host(host) for host in range(grid.hosts)]
    columns = [
        all_reduce(grid.column(chip), held_chunk(chip, grid.everything, grid.chips)) for chip in range(grid.chips)
    ]
    return [
        Phase("reduce-scatter inside hosts", tuple(s for row in rows for s in reduce_scatter(row, grid.everything))),
        Phase("all-reduce between hosts", tuple(step for column in columns for step in column)),
        Phase("all-gather inside hosts", tuple(s for row in rows for s in all_gather(row, grid.everything))),
    ]
