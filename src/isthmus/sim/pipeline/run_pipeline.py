"""`run_pipeline`: let a schedule run on a virtual clock, over wires that have a rate and a delay.

Computation takes the stage's time. A message occupies its wire for its bytes over the wire's rate, after
the messages handed to that wire before it, and arrives a delay later; its sender's wait ends when the last
byte has left, its receiver's when the last byte has arrived. Stages start together at time 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.core.plan import StageTime
from isthmus.schedule import Operation, Schedule
from isthmus.sim.kernel import Kernel
from isthmus.sim.links.link_queue import CARRIERS, Carrier, Sharing
from isthmus.sim.links.wire import Wire
from isthmus.sim.pipeline.pipeline_processes import Path, Pipeline, Transport
from isthmus.sim.pipeline.read_program import read_program


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


def run_pipeline(
    schedule: Schedule,
    stage_times: Sequence[StageTime],
    wires: Mapping[tuple[int, int], Wire],
    message_bytes: float,
    *,
    transport: Transport = "buffered",
    sharing: Sharing = "fifo",
    seed: int = 0,
) -> PipelineRun:
    """Return what one step of `schedule` takes.

    `stage_times` holds one entry per stage (seconds per micro-batch). `wires` maps (from stage, to stage) to
    the wire between them; a missing pair exchanges in no time. Each exchange carries `message_bytes`. A
    backward cut in two has half its time in each part. The schedule must have passed `check_schedule`: one
    that waits for ever raises `RuntimeError`.
    """
    kernel = Kernel()
    carriers = make_carriers(kernel, [(wire.name, wire) for wire in wires.values()], sharing, seed)

    def path(sender: int, receiver: int) -> Path:
        wire = wires.get((sender, receiver))
        return (None if wire is None else carriers[wire.name]), 0.0

    pipeline = Pipeline(
        kernel=kernel,
        program=read_program(schedule),
        duration_s=durations(schedule, stage_times),
        bytes_of=lambda _: message_bytes,
        path=path,
        transport=transport,
    )
    pipeline.start()
    kernel.run()
    if stuck := pipeline.stuck():
        raise RuntimeError(f"schedule {schedule.name} waits for ever: {'; '.join(stuck)}")
    logs = pipeline.logs
    finish_s = [float(end.value) for end in pipeline.ends]
    return PipelineRun(
        step_s=max(finish_s),
        finish_s=tuple(finish_s),
        busy_s=tuple(sum(e[1] - e[0] for e in log if e[4] is None) for log in logs),
        waiting_s=tuple(sum(e[1] - e[0] for e in log if e[4] is not None) for log in logs),
        wire_bytes={name: one.carried_bytes for name, one in carriers.items() if one.carried_bytes},
    )


def make_carriers(
    kernel: Kernel, wires: Sequence[tuple[str, Wire]], sharing: Sharing, seed: int
) -> dict[str, Carrier]:
    """Return a carrier per name; its chance depends on `seed` and its place in the list, not its name."""
    carriers: dict[str, Carrier] = {}
    for name, wire in wires:
        if name not in carriers:
            carriers[name] = CARRIERS[sharing](kernel, wire, f"{seed}/{len(carriers)}")
    return carriers


def durations(
    schedule: Schedule,
    stage_times: Sequence[StageTime],
    weight_share: Sequence[float] | None = None,
    update_s: Sequence[float] | None = None,
) -> Callable[[int, Operation], float]:
    """Return the seconds of every computing operation, by stage.

    A chunk takes its part of the stage's time. `weight_share[s]` of a backward of stage `s` is
    `backward_weight` (half, without it). With two routes each chunk is a whole copy of the stage.
    """
    chunks = 1 if schedule.routes and len(schedule.routes) > 1 else schedule.num_chunks
    table = []
    for stage, time in enumerate(stage_times):
        weight_s = time.backward_s * (0.5 if weight_share is None else weight_share[stage])
        table.append(
            {
                "forward": time.forward_s / chunks,
                "backward": time.backward_s / chunks,
                "backward_input": (time.backward_s - weight_s) / chunks,
                "backward_weight": weight_s / chunks,
                "update": 0.0 if update_s is None else update_s[stage],
            }
        )
    return lambda stage, one: table[stage][one.kind]
