"""Cells of plan tables: degrees, micro-batches, memory, utilisation and cost of a plan, as text with units."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.units import format_bytes

SETTING_COLUMNS = ("tp", "ep", "ZeRO", "micro-batches")
"""Headers of `setting_cells`."""


def setting_cells(plan: Plan) -> tuple[str, ...]:
    """Return the degrees of a plan (all that its stages have) and its micro-batches per replica, count x size."""
    batches = sorted({(plan.micro_batches_of(r), plan.micro_batch_size_of(r)) for r in range(plan.dp)})
    return (
        _distinct([stage.tp for stage in plan.stages]),
        _distinct([stage.ep for stage in plan.stages]),
        str(plan.zero),
        ", ".join(f"{count} x {size}" for count, size in batches),
    )


def _distinct(values: Sequence[int]) -> str:
    return "/".join(map(str, sorted(set(values))))


def memory_text(plan: Plan, pool: Pool | None = None) -> str:
    """Return the peak memory of the fullest chip; with `pool` also its share of the chip's memory."""
    peaks = plan.predicted.peak_memory_bytes if plan.predicted else ()
    if not peaks:
        return "-"
    if pool is None or len(peaks) != len(plan.stages):
        return format_bytes(max(peaks))
    places = {(stage.cluster, stage.node_group) for stage in plan.stages}
    capacity = {place: pool.chip(pool.node_group(*place)).memory_bytes for place in places}
    shares = [num / capacity[s.cluster, s.node_group] for num, s in zip(peaks, plan.stages, strict=True)]
    fullest = max(range(len(shares)), key=shares.__getitem__)
    return f"{format_bytes(peaks[fullest])} ({shares[fullest]:.0%})"


def mfu_text(mfu_fraction: float) -> str:
    """Return a utilisation in percent, `-` if it was not predicted."""
    return f"{mfu_fraction:.1%}" if mfu_fraction else "-"


def cost_text(cost: float, currency: str) -> str:
    """Return a price with its unit, `-` for a pool without prices."""
    return f"{cost:.4g} {currency}".rstrip() if cost else "-"


def cost_note(plans: Sequence[Plan]) -> str:
    """Return the unit of the plans' cost where the pool does not name it, else an empty string."""
    costs = [plan.predicted for plan in plans if plan.predicted and plan.predicted.cost_per_iteration]
    if not costs or costs[0].currency:
        return ""
    return "Cost: in the unit of price_per_chip_hour; `currency: EUR` in the pool file names it."
