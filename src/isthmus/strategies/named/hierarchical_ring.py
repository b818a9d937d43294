"""`hierarchical-ring`: a ring inside each host, a ring of the hosts' roots, then a broadcast inside each host."""

from __future__ import annotations

from isthmus.strategies.named.ring_phases import all_reduce
from isthmus.strategies.step import Step
from isthmus.strategies.strategy_steps import Phase
from isthmus.strategies.worker_grid import WorkerGrid


def hierarchical_ring(grid: WorkerGrid) -> list[Phase]:
    """Return the phases; the first worker of a host is its root.

    A host sends 2 (H - 1) / H of the elements; its root alone uses the network. The broadcast follows the ring of
    the host, from worker to worker. Source: X. Jia et al., "Highly scalable deep learning training system with
    mixed-precision: training ImageNet in four minutes", 2018.
    """
    inside = [step for host in range(grid.hosts) for step in all_reduce(grid.host(host), grid.everything)]
    chain = [
        Step(hop, worker, worker + 1, *grid.everything, adds=False)
        for host in range(grid.hosts)
        for hop, worker in enumerate(grid.host(host)[:-1])
    ]
    between = all_reduce(grid.column(0), grid.everything)
    return [
        Phase("all-reduce inside hosts", tuple(inside)),
        Phase("all-reduce of roots", tuple(between)),
        Phase("broadcast inside hosts", tuple(chain) if between else ()),
    ]
