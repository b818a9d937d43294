"""`run_pipeline`: simulates one step of a schedule over links with a rate and a delay.

Computation takes the stage's time. A message occupies its link for its bytes over the link's rate, after the
messages queued before it, and arrives a delay later; the sender's wait ends when the last byte has left, the
receiver's when the last byte has arrived. All stages start at time 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.core.plan import StageTime
from isthmus.schedule import Operation, Schedule
from isthmus.sim.kernel import Kernel
from isthmus.sim.links.link_queue import LINK_QUEUES, LinkQueue, Sharing
from isthmus.sim.links.simulated_link import SimulatedLink
from isthmus.sim.pipeline.compile_schedule import compile_schedule
from isthmus.sim.pipeline.pipeline_processes import MessagePath, Pipeline, SendMode


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """The times of one step, and the bytes sent over each link."""

    step_s: float
    finish_s: tuple[float, ...]
    """End of each stage."""
    busy_s: tuple[float, ...]
    """Compute time of each stage."""
    waiting_s: tuple[float, ...]
    """Waiting time of each stage."""
    link_bytes: dict[str, float]


def run_pipeline(
    schedule: Schedule,
    stage_times: Sequence[StageTime],
    links: Mapping[tuple[int, int], SimulatedLink],
    message_bytes: float,
    *,
    transport: SendMode = "buffered",
    sharing: Sharing = "fifo",
    seed: int = 0,
) -> PipelineResult:
    """Return the times of one step of `schedule`.

    `stage_times` has one entry per stage (seconds per micro-batch). `links` maps (sending stage, receiving
    stage) to the link between them; messages of missing pairs take no time. Each message has `message_bytes`.
    A split backward spends half its time in each part. Raises `RuntimeError` for a schedule that deadlocks,
    which `check_schedule` would have rejected.
    """
    kernel = Kernel()
    queues = make_link_queues(kernel, [(link.name, link) for link in links.values()], sharing, seed)

    def path(sender: int, receiver: int) -> MessagePath:
        link = links.get((sender, receiver))
        return (None if link is None else queues[link.name]), 0.0

    pipeline = Pipeline(
        kernel=kernel,
        compiled=compile_schedule(schedule),
        duration_s=operation_durations(schedule, stage_times),
        boundary_bytes=lambda _: message_bytes,
        path=path,
        transport=transport,
    )
    pipeline.start()
    kernel.run()
    if stuck := pipeline.blocked_stages():
        raise RuntimeError(f"schedule {schedule.name} deadlocks: {'; '.join(stuck)}")
    logs = pipeline.logs
    finish_s = [float(end.value) for end in pipeline.ends]
    return PipelineResult(
        step_s=max(finish_s),
        finish_s=tuple(finish_s),
        busy_s=tuple(sum(e[1] - e[0] for e in log if e[4] is None) for log in logs),
        waiting_s=tuple(sum(e[1] - e[0] for e in log if e[4] is not None) for log in logs),
        link_bytes={name: queue.sent_bytes for name, queue in queues.items() if queue.sent_bytes},
    )


def make_link_queues(
    kernel: Kernel, links: Sequence[tuple[str, SimulatedLink]], sharing: Sharing, seed: int
) -> dict[str, LinkQueue]:
    """Return a link queue for each name; its random delays depend on `seed` and its position in the list."""
    queues: dict[str, LinkQueue] = {}
    for name, link in links:
        if name not in queues:
            queues[name] = LINK_QUEUES[sharing](kernel, link, f"{seed}/{len(queues)}")
    return queues


def operation_durations(
    schedule: Schedule,
    stage_times: Sequence[StageTime],
    weight_share: Sequence[float] | None = None,
    update_s: Sequence[float] | None = None,
) -> Callable[[int, Operation], float]:
    """Return a function from stage and compute operation (or update) to seconds.

    Chunks take equal shares of the stage's time; with several routes each chunk is a whole copy of the stage.
    `weight_share[s]` of a backward of stage `s` is `backward_weight` (default one half).
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
