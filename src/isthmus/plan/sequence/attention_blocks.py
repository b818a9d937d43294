"""`balance_blocks`: assigns the blocks of an attention score matrix to cores, balancing their load.

Source: long-sequence RL report, section 2.2.3. See `docs/algorithms/attention-blocks.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Block indices of each core, in order; `total_cost` is `slowest_cost` plus the cost of its cores."""

    cores: tuple[tuple[int, ...], ...]
    slowest_cost: float
    total_cost: float


def core_range(num_blocks: int, num_cores: int) -> tuple[int, int]:
    """Return the minimum and maximum number of cores to try.

    With at least (num_cores - 2) num_cores blocks it is all cores; otherwise from
    floor(sqrt(num_blocks + 1/4) + 1/2) to `num_cores`. Never more cores than blocks.
    """
    if num_blocks < 1 or num_cores < 1:
        raise InputError(f"{num_blocks} blocks on {num_cores} cores", hint="give at least one of each")
    most = min(num_blocks, num_cores)
    if num_blocks >= (num_cores - 2) * num_cores:
        return most, most
    fewest = (1 + math.isqrt(4 * num_blocks + 1)) // 2
    return min(fewest, most), most


def balance_blocks(block_costs: Sequence[float], num_cores: int, cost_per_core: float = 0.0) -> BlockPlan:
    """Return the cheapest assignment over the numbers of cores in `core_range`; ties go to fewer cores.

    `block_costs[j]` is the cost of block `j`, (num_blocks,), in any unit, at least 0. Each core gets a
    contiguous range of blocks. `cost_per_core` (rho in the report) is the scheduling cost of each used core.
    """
    fewest, most = core_range(len(block_costs), num_cores)
    if min(block_costs) < 0 or cost_per_core < 0:
        raise InputError("negative cost", hint="costs must be at least 0")
    plans = []
    for count in range(fewest, most + 1):
        cores = _assign_blocks(block_costs, count)
        slowest = max(sum(block_costs[j] for j in core) for core in cores)
        plans.append(BlockPlan(cores=cores, slowest_cost=slowest, total_cost=slowest + cost_per_core * count))
    return min(plans, key=lambda plan: plan.total_cost)


def _assign_blocks(block_costs: Sequence[float], count: int) -> tuple[tuple[int, ...], ...]:
    """Fill core after core up to an equal share of the remaining cost; half a block may exceed it."""
    cores: list[tuple[int, ...]] = []
    left, block = math.fsum(block_costs), 0
    for core in range(count):
        limit = left / (count - core)
        assigned: list[int] = []
        cost = 0.0
        while block < len(block_costs):
            last = core == count - 1
            if not last and not cost + block_costs[block] * 0.5 < limit:
                break
            assigned.append(block)
            cost += block_costs[block]
            block += 1
        left -= cost
        cores.append(tuple(assigned))
    return tuple(cores)
