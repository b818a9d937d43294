"""`balance_blocks`: deal the blocks of an attention score matrix to cores so that the slowest core ends
early.

Source: long-sequence RL report, section 2.2.3. See `docs/algorithms/attention-blocks.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Blocks by core, in order: `cores[i]` lists block indices. `total_cost` adds the cost of using cores."""

    cores: tuple[tuple[int, ...], ...]
    slowest_cost: float
    total_cost: float


def core_range(num_blocks: int, num_cores: int) -> tuple[int, int]:
    """Return the fewest and most cores worth trying.

    All cores if there are at least (num_cores - 2) num_cores blocks. Else from sqrt(num_blocks + 1/4) + 1/2,
    rounded down, to `num_cores`. Never more cores than blocks.
    """
    if num_blocks < 1 or num_cores < 1:
        raise InputError(f"{num_blocks} blocks on {num_cores} cores", hint="at least one of each")
    most = min(num_blocks, num_cores)
    if num_blocks >= (num_cores - 2) * num_cores:
        return most, most
    fewest = (1 + math.isqrt(4 * num_blocks + 1)) // 2
    return min(fewest, most), most


def balance_blocks(block_costs: Sequence[float], num_cores: int, cost_per_core: float = 0.0) -> BlockPlan:
    """Return the cheapest of the plans for each number of cores in `core_range`; ties go to fewer cores.

    `block_costs[j]` is the cost of block `j` (any unit, at least 0); blocks stay in order and a core has a
    run of them. `cost_per_core` (rho in the report) is what each core used adds for scheduling.
    """
    fewest, most = core_range(len(block_costs), num_cores)
    if min(block_costs) < 0 or cost_per_core < 0:
        raise InputError("a negative cost", hint="costs are at least 0")
    plans = []
    for count in range(fewest, most + 1):
        cores = _deal(block_costs, count)
        slowest = max(sum(block_costs[j] for j in core) for core in cores)
        plans.append(BlockPlan(cores=cores, slowest_cost=slowest, total_cost=slowest + cost_per_core * count))
    return min(plans, key=lambda plan: plan.total_cost)


def _deal(block_costs: Sequence[float], count: int) -> tuple[tuple[int, ...], ...]:
    """Fill core after core up to an even share of what is left; half a block may stick out."""
    cores: list[tuple[int, ...]] = []
    left, block = math.fsum(block_costs), 0
    for core in range(count):
        limit = left / (count - core)
        mine: list[int] = []
        cost = 0.0
        while block < len(block_costs):
            last = core == count - 1
            if not last and not cost + block_costs[block] * 0.5 < limit:
                break
            mine.append(block)
            cost += block_costs[block]
            block += 1
        left -= cost
        cores.append(tuple(mine))
    return tuple(cores)
