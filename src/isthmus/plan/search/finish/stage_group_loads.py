"""`stage_group_loads`: how evenly a plan loads its node groups (heterogeneous-training report, 3.2.2, equation 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan.time.calibration import DATA_SHEET, Calibration
from isthmus.plan.time.chip_rates import with_chip_rates
from isthmus.plan.time.predict import PlanForecast


@dataclass(frozen=True, kw_only=True)
class StageGroupLoad:
    """The stages of a plan in one node group."""

    cluster: str
    node_group: str
    chip: str
    num_chips: int
    # Layers of the stages times the samples that pass them in a step: K of equation 8 in pipeline and data parallelism.
    num_layer_samples: float
    # Compute per layer and sample, over that of all other groups together: N of equation 8; None for a single group.
    load_ratio: float | None
    # Share of the step in which its chips compute, the mean over its chips.
    busy_share: float
    # Peak of its fullest chip, and what the chip has.
    peak_memory_bytes: float
    memory_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return dict(vars(self))


def stage_group_loads(
    plan: Plan, pool: Pool, forecast: PlanForecast, calibration: Calibration = DATA_SHEET
) -> tuple[StageGroupLoad, ...]:
    """Return the load of each node group that hosts stages of `plan`, in plan order.

    T of equation 8 is the rate of products that the chips sustain, K what they compute; Q = T / K. Above a ratio of 1 a
    group has more compute per layer and sample than the others, so that it waits for them.
    """
    calibration = with_chip_rates(calibration, plan, pool)
    kinds: dict[tuple[str, str], list[float]] = {}
    runs = iter(forecast.result.stages)
    found = [(stage, next(runs)) for replica in range(plan.dp) for stage in plan.pipeline(replica)]
    for stage, run in found:
        chip = pool.chip(pool.node_group(stage.cluster, stage.node_group))
        rate = chip.flop_per_s(plan.precision or "bf16") * calibration.value("matmul_share", chip.name)
        samples = plan.micro_batches_of(stage.replica) * plan.micro_batch_size_of(stage.replica)
        row = kinds.setdefault((stage.cluster, stage.node_group), [0.0] * 5)
        row[0] += stage.num_chips
        row[1] += stage.num_chips * rate
        row[2] += stage.num_layers * samples
        row[3] += stage.num_chips * run.busy_s
        row[4] = max(row[4], run.peak_memory_bytes)
    whole_rate, whole_work = (sum(row[place] for row in kinds.values()) for place in (1, 2))
    loads = []
    for (cluster, name), (chips, rate, work, busy_s, peak) in kinds.items():
        chip = pool.chip(pool.node_group(cluster, name))
        others = (whole_rate - rate) / (whole_work - work) if len(kinds) > 1 else None
        loads.append(
            StageGroupLoad(
                cluster=cluster, node_group=name, chip=chip.name, num_chips=round(chips), num_layer_samples=work,
                load_ratio=rate / work / others if others else None, busy_share=busy_s / chips / forecast.iteration_s,
                peak_memory_bytes=peak, memory_bytes=chip.memory_bytes,
            )
        )  # fmt: skip
    return tuple(loads)
