"""Bounds on the time of a schedule: its critical path below, serial execution above."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.schedule import Operation, Schedule
from isthmus.sim.pipeline.compile_schedule import COMPUTE_OPERATIONS

DurationFunction = Callable[[int, Operation], float]
"""Function from stage and compute operation (or update) to seconds."""

HopFunction = Callable[[int, int], float]
"""Function from sending and receiving stage to seconds of a message on an idle link: transfer and delay."""


def critical_path_s(schedule: Schedule, duration_s: DurationFunction, hop_s: HopFunction) -> float:
    """Return the length of the longest chain of dependent operations, in seconds.

    Stages execute in order, every message has its own link, and no stage waits for its sends. Raises
    `RuntimeError` for a schedule that deadlocks.
    """
    clocks, places = [0.0] * schedule.num_stages, [0] * schedule.num_stages
    arrivals: dict[tuple[bool, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for stage, operations in enumerate(schedule.stages):
            while places[stage] < len(operations):
                one = operations[places[stage]]
                key = _message_key(schedule, stage, one)
                if key is None:
                    clocks[stage] += duration_s(stage, one)
                elif one.kind.startswith("send_"):
                    arrivals[key] = clocks[stage] + hop_s(stage, schedule.peer_stage(stage, one))
                elif one.kind.startswith("wait_receive_"):
                    if key not in arrivals:
                        break
                    clocks[stage] = max(clocks[stage], arrivals[key])
                places[stage] += 1
                moved = True
    if any(place < len(operations) for place, operations in zip(places, schedule.stages, strict=True)):
        raise RuntimeError(f"schedule {schedule.name} deadlocks")
    return max(clocks)


def serial_sum_s(schedule: Schedule, duration_s: DurationFunction, hop_s: HopFunction) -> float:
    """Return the seconds of all computations and messages, executed one after another."""
    total_s = 0.0
    for stage, one in schedule:
        if one.kind in COMPUTE_OPERATIONS or one.kind == "update":
            total_s += duration_s(stage, one)
        elif one.kind.startswith("send_"):
            total_s += hop_s(stage, schedule.peer_stage(stage, one))
    return total_s


def _message_key(schedule: Schedule, stage: int, one: Operation) -> tuple[bool, int, int] | None:
    """Return the key of a transfer, equal at both ends: (is forward, micro-batch, sender's virtual stage)."""
    kind = one.kind.removeprefix("wait_")
    if not kind.startswith(("send_", "receive_")):
        return None
    forward = kind.endswith("_forward")
    step = 0 if kind.startswith("send_") else -1 if forward else 1
    return forward, one.micro_batch, schedule.virtual_stage(stage, one) + step
