"""The one memory limit of planner, simulator and export: what a stage may reserve on a chip.

A stage fits if the bytes that its allocator needs (`StageMemory.total_bytes` with every micro-batch in flight) are
at most `memory_limit_bytes`: the capacity that the device reports, less what lies outside the allocator.
"""

from __future__ import annotations

from isthmus.core.chip import Chip
from isthmus.core.stack import Stack
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import StageMemory


def device_bytes(chip: Chip) -> int:
    """Return the capacity of a chip that plans are judged by: what the device reports, else that of its data sheet."""
    return chip.memory_bytes if chip.reported_bytes is None else chip.reported_bytes


def outside_bytes(chip_bytes: float, stack: Stack, degrees: StageDegrees) -> float:
    """Return the bytes of a chip outside the allocator: context, and the buffers of its groups of chips.

    Tensor, context and expert parallelism have a group each; data and pipeline parallelism together count as one, so
    that the limit is the same for every number of stages and replicas.
    """
    groups = 1 + sum(degree > 1 for degree in (degrees.tp, degrees.cp, degrees.ep))
    outside = stack.outside
    return outside.share * chip_bytes + outside.context_bytes + groups * outside.group_bytes


def memory_limit_bytes(chip_bytes: float, stack: Stack, degrees: StageDegrees) -> float:
    """Return the bytes that the allocator of a stage with these degrees may reserve on a chip of `chip_bytes`."""
    return max(0.0, chip_bytes - outside_bytes(chip_bytes, stack, degrees))


def reserved_bytes(allocated_bytes: float, limit_bytes: float, stack: Stack, stranded_bytes: float = 0.0) -> float:
    """Return what the allocator has usually reserved at a peak of `allocated_bytes`; the limit bounds it.

    `stranded_bytes` more lie in holes of the loss.
    """
    usual = allocated_bytes * (1.0 + stack.allocator.usual_share) + stranded_bytes
    return max(min(usual, limit_bytes), allocated_bytes)


def stage_memory_dict(memory: StageMemory, limit_bytes: float, chip_bytes: float, stack: Stack) -> dict[str, float]:
    """Return the bytes of a stage by kind, and what follows: reserved, used of the device, the limit, the chip's."""
    reserved = reserved_bytes(memory.allocated_bytes, limit_bytes, stack, memory.stranded_bytes)
    return {
        **memory.as_dict(),
        "reserved": reserved,
        "device": reserved + chip_bytes - limit_bytes,
        "limit": limit_bytes,
        "chip": float(chip_bytes),
    }
