"""`run_pipeline`: let a schedule run on a virtual clock, over wires that have a rate and a delay.

Computation takes the stage's time. A message occupies its wire for its bytes over the wire's rate, after
the messages handed to that wire before it, and arrives a delay later; its sender's wait ends when the last
byte has left, its receiver's when the last byte has arrived. Stages start together at time 0.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.core.plan import StageTime
from isthmus.schedule import Operation, Schedule


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One direction of a path between stages. Boundaries that name the same wire share its rate."""

    name: str
    bytes_per_s: float
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """One step: its length, and per stage when it ended, how long it computed, and how long it waited.

    `wire_bytes` is what each wire carried.
    """

    step_s: float
    finish_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    wire_bytes: dict[str, float]


@dataclass
class _State:
    """Where each stage is, which messages are under way, and when each wire is free."""

    clock_s: list[float]
    place: list[int]
    busy_s: list[float]
    waiting_s: list[float]
    sent: dict[tuple[int, int, str, int], float] = field(default_factory=dict)
    arrived: dict[tuple[int, int, str, int], float] = field(default_factory=dict)
    free_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    wire_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def run_pipeline(
    schedule: Schedule,
    stage_times: Sequence[StageTime],
    wires: Mapping[tuple[int, int], Wire],
    message_bytes: float,
) -> PipelineRun:
    """Return what one step of `schedule` takes.

    `stage_times` holds one entry per stage (seconds per micro-batch). `wires` maps (from stage, to stage) to
    the wire between them; a missing pair exchanges in no time. Each exchange carries `message_bytes`. The
    schedule must have passed `check_schedule`: one that waits for ever raises `RuntimeError`.
    """
    count = schedule.num_stages
    state = _State([0.0] * count, [0] * count, [0.0] * count, [0.0] * count)
    ready = [(0.0, stage) for stage in range(count)]
    blocked: dict[tuple[int, int, str, int], int] = {}
    while ready:
        _, stage = heapq.heappop(ready)
        while state.place[stage] < len(schedule.stages[stage]):
            operation = schedule.stages[stage][state.place[stage]]
            if ready and operation.kind.startswith("send_") and ready[0][0] < state.clock_s[stage]:
                heapq.heappush(ready, (state.clock_s[stage], stage))  # wires serve in order of time
                break
            missing = _step(schedule, state, stage, operation, stage_times[stage], wires, message_bytes)
            if missing is not None:
                blocked[missing] = stage
                break
            state.place[stage] += 1
            if operation.kind.startswith("send_"):
                woken = blocked.pop(_message(schedule, stage, operation), None)
                if woken is not None:
                    heapq.heappush(ready, (state.clock_s[woken], woken))
    if blocked:
        raise RuntimeError(f"schedule {schedule.name} waits for ever at stages {sorted(blocked.values())}")
    return PipelineRun(
        step_s=max(state.clock_s),
        finish_s=tuple(state.clock_s),
        busy_s=tuple(state.busy_s),
        waiting_s=tuple(state.waiting_s),
        wire_bytes=dict(state.wire_bytes),
    )


def _message(schedule: Schedule, stage: int, one: Operation) -> tuple[int, int, str, int]:
    """Name an exchange alike at both ends: (sender, receiver, direction, micro-batch and chunk)."""
    peer = schedule.peer(stage, one)
    sends, forward = "send_" in one.kind, one.kind.endswith("forward")
    sender = schedule.virtual(stage, one) + (0 if sends else -1 if forward else 1)
    chunk = sender // schedule.num_stages
    direction = "forward" if forward else "backward"
    ends = (stage, peer) if sends else (peer, stage)
    return (*ends, direction, one.micro_batch * schedule.num_chunks + chunk)


def _step(
    schedule: Schedule,
    state: _State,
    stage: int,
    one: Operation,
    time: StageTime,
    wires: Mapping[tuple[int, int], Wire],
    message_bytes: float,
) -> tuple[int, int, str, int] | None:
    """Do one operation; return the message it still waits for, if any."""
    if one.kind in ("forward", "backward"):
        duration_s = (time.forward_s if one.kind == "forward" else time.backward_s) / schedule.num_chunks
        state.clock_s[stage] += duration_s
        state.busy_s[stage] += duration_s
    elif one.kind.startswith("send_"):
        key = _message(schedule, stage, one)
        wire = wires.get((stage, key[1]))
        left_s = arrived_s = state.clock_s[stage]
        if wire is not None:
            left_s = max(left_s, state.free_s[wire.name]) + message_bytes / wire.bytes_per_s
            arrived_s = left_s + wire.delay_s
            state.free_s[wire.name] = left_s
            state.wire_bytes[wire.name] += message_bytes
        state.sent[key], state.arrived[key] = left_s, arrived_s
    elif one.kind.startswith("wait_"):
        key = _message(schedule, stage, one)
        known = state.sent if "send_" in one.kind else state.arrived
        if key not in known:
            return key
        waited_s = max(0.0, known[key] - state.clock_s[stage])
        state.clock_s[stage] += waited_s
        state.waiting_s[stage] += waited_s
    return None
