"""`stage_table`: the memory of every stage of an even pipeline, per chip, as a stack keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.core.chip import Chip, Precision
from isthmus.core.model import Model
from isthmus.core.stack import Stack
from isthmus.plan.memory.memory_limit import device_bytes, memory_limit_bytes, reserved_bytes, stage_memory_dict
from isthmus.plan.memory.memory_table import MeshDegrees
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.profile.component import Recompute
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.profile.stack_tensors import stacked_profile


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """What the memory of training depends on beside the degrees."""

    sequence_length: int
    stack: Stack
    micro_batch_size: int = 1
    micro_batches: int | None = None
    """Micro-batches of a step, None: at least as many as stages."""
    precision: Precision = "bf16"
    zero: Literal[0, 1, 2, 3] = 0
    recompute: Recompute = "none"


def stage_table(
    model: Model, parallel: MeshDegrees, training: TrainingMemory, chip: Chip | None = None
) -> list[dict[str, float]]:
    """Return the bytes of each stage under 1F1B, first to last; with a chip also what it has and whether they fit.

    Layers are divided evenly. Stage i of p has p - i micro-batches in flight, or all of the step. Raises `PlanError`
    for more stages than layers.
    """
    profile = stacked_profile(profile_model(model), training.stack, training.precision)
    count, layers = parallel.pp, profile.num_layers
    degrees = StageDegrees(tp=parallel.tp, cp=parallel.cp, ep=parallel.ep, dp=parallel.dp, zero=training.zero)
    found = []
    for index in range(count):
        in_flight = min(count - index, training.micro_batches or count)
        memory = stage_memory(
            profile, (index * layers // count, (index + 1) * layers // count),
            is_first=index == 0, is_last=index == count - 1, micro_batch_size=training.micro_batch_size,
            sequence_length=training.sequence_length, in_flight=in_flight,
            precision="fp32" if training.precision in ("fp32", "tf32") else "bf16",
            tp=parallel.tp, cp=parallel.cp, ep=parallel.ep, dp=parallel.dp, sp=parallel.tp > 1, zero=training.zero,
            recompute=training.recompute,
        )  # fmt: skip
        row = {"in_flight": float(in_flight), **memory.as_dict()}
        if chip is None:
            row["reserved"] = reserved_bytes(
                memory.allocated_bytes, float("inf"), training.stack, memory.stranded_bytes
            )
        else:
            chip_bytes = device_bytes(chip)
            limit_bytes = memory_limit_bytes(chip_bytes, training.stack, degrees)
            row |= stage_memory_dict(memory, limit_bytes, chip_bytes, training.stack)
            row["fits"] = float(memory.total_bytes <= limit_bytes)
        found.append(row)
    return found
