"""`2d-mesh`: two ring all-reduces one after the other, by rows and by columns, with the halves crossed."""

from __future__ import annotations

from isthmus.strategies.named.ring_phases import all_reduce
from isthmus.strategies.strategy_steps import Phase
from isthmus.strategies.worker_grid import Range, WorkerGrid, chunks


def mesh_2d(grid: WorkerGrid) -> list[Phase]:
    """Return two phases: the first half by rows (hosts) while the second goes by columns, then the other way round.

    Both directions are in use all the time. Each worker sends 2 (H - 1) / H of the elements to other hosts, so a
    host sends as many times that as it has chips: for meshes in which every chip has a network port of its own.
    Source: C. Ying et al., "Image classification at supercomputer scale", 2018.
    """
    first, second = chunks(grid.everything, 2)

    def phase(name: str, by_rows: Range, by_columns: Range) -> Phase:
        rows = [step for host in range(grid.hosts) for step in all_reduce(grid.host(host), by_rows)]
        columns = [step for chip in range(grid.chips) for step in all_reduce(grid.column(chip), by_columns)]
        return Phase(name, (*rows, *columns))

    return [phase("halves by rows and columns", first, second), phase("halves crossed", second, first)]
