"""One simulated pipeline: a kernel process and a log per stage, messages over link queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from isthmus.schedule import Operation, Schedule
from isthmus.sim.kernel import Event, Kernel, ProcessGenerator
from isthmus.sim.links.link_queue import LinkQueue
from isthmus.sim.pipeline.compile_schedule import POST_RECEIVE, SEND, WAIT_SENT, CompiledSchedule, PlannedMessage

SendMode = Literal["buffered", "rendezvous"]
"""When a message starts: with its send, or once its receive is posted as well."""


class SimulatedMessage:
    """A message of one micro-batch; it stands for the `weight` equal replicas of its pipeline.

    Times, None until known: `sent_s` of its send, `posted_s` of its receive, `started_s` of its start on the
    link, `left_s` and `arrives_s` of its last byte.
    """

    __slots__ = (
        "_times_known",
        "arrives_s",
        "flow",
        "hop_s",
        "kernel",
        "left_s",
        "link_queue",
        "num_bytes",
        "operation",
        "posted_s",
        "receiver",
        "rendezvous",
        "sender",
        "sent_s",
        "started_s",
        "weight",
    )  # fmt: skip

    def __init__(self, pipeline: Pipeline, planned: PlannedMessage, path: MessagePath, flow: int) -> None:
        self.kernel = pipeline.kernel
        self.sender, self.receiver = planned.endpoints
        self.link_queue, self.hop_s = path
        self.num_bytes = pipeline.boundary_bytes(planned.boundary)
        self.weight, self.flow = pipeline.weight, flow
        self.operation = planned.operation
        self.rendezvous = pipeline.transport == "rendezvous"
        self.sent_s: float | None = None
        self.posted_s: float | None = None
        self.started_s: float | None = None
        self.left_s: float | None = None
        self.arrives_s: float | None = None
        self._times_known: Event | None = None

    def send(self) -> None:
        """Send it now."""
        self.sent_s = self.kernel.now_s
        if not self.rendezvous or self.posted_s is not None:
            self._start()

    def post_receive(self) -> None:
        """Post the receive now."""
        self.posted_s = self.kernel.now_s
        if self.rendezvous and self.sent_s is not None:
            self._start()

    def _start(self) -> None:
        self.started_s = now = self.kernel.now_s
        if self.link_queue is None:
            self.on_sent(now, now + self.hop_s)
        else:
            self.link_queue.send(self)

    def on_sent(self, left_s: float, arrives_s: float) -> None:
        """Set the times at which the last byte leaves and arrives."""
        self.left_s, self.arrives_s = left_s, arrives_s
        if self._times_known is not None:
            self._times_known.trigger()

    def times_known(self) -> Event:
        """Return an event that is triggered when `left_s` and `arrives_s` are known."""
        if self._times_known is None:
            self._times_known = self.kernel.event()
        return self._times_known


@dataclass
class Barrier:
    """The gradient reduction, as one stage waits for it before its update."""

    ready: Event
    """Triggered when the gradients of the stage are computed."""
    done: Event
    """Triggered when they are reduced."""
    last_arrival: tuple[float, Pipeline, int] | None = None
    """The last stage to be ready: (time in seconds, pipeline, stage)."""

    def arrive(self) -> Event:
        """Trigger `ready`; return the event of the completed reduction."""
        self.ready.trigger()
        return self.done


LogEntry = tuple[float, float, int, Operation, "SimulatedMessage | Barrier | None"]
"""A log entry of a stage: start, end, iteration, operation, and what it waited for (None: it computed)."""

MessagePath = tuple[LinkQueue | None, float]
"""The path of a message: a link queue, or (None) a fixed time in seconds."""

_StageStep = tuple[int, float, "SimulatedMessage | Barrier | None", int, Operation]


@dataclass
class Pipeline:
    """A pipeline that executes a compiled schedule."""

    kernel: Kernel
    compiled: CompiledSchedule
    duration_s: Callable[[int, Operation], float]
    """Seconds of a compute operation or update, by stage."""
    boundary_bytes: Callable[[int], float]
    """Bytes of a micro-batch between a stage and the next, each way."""
    path: Callable[[int, int], MessagePath]
    """Path of the messages from a sender to a receiver."""
    transport: SendMode = "buffered"
    weight: int = 1
    """Number of equal replicas that it stands for."""
    index: int = 0
    """Index among the pipelines of the simulation."""
    logs: list[list[LogEntry]] = field(default_factory=list)
    """Log entries of each stage."""
    messages: list[SimulatedMessage] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    """The event of the end of each stage; its value is the time."""
    waiting_in: list[Operation | None] = field(default_factory=list)
    """The operation that each stage waits in, or waited in last."""

    @property
    def schedule(self) -> Schedule:
        """The schedule that it executes."""
        return self.compiled.schedule

    def start(self, iterations: int = 1, barrier: Callable[[int, int], Barrier | None] | None = None) -> None:
        """Start every stage; its update waits for `barrier(iteration, stage)`."""
        count = self.schedule.num_stages
        self.logs = [[] for _ in range(count)]
        self.waiting_in = [None] * count
        steps: list[list[_StageStep]] = [[] for _ in range(count)]
        for iteration in range(iterations):
            messages = self._make_messages()
            self.messages += messages
            for stage in range(count):
                steps[stage] += self._stage_steps(stage, iteration, messages, barrier)
        self.ends = [self.kernel.start(_run_stage(self, stage, steps[stage])) for stage in range(count)]

    def _make_messages(self) -> list[SimulatedMessage]:
        """Return the messages of one iteration; those of an ordered pair of stages are one flow."""
        count = self.schedule.num_stages
        pairs = {planned.endpoints for planned in self.compiled.messages}
        paths = {(a, b): (self.path(a, b), (self.index * count + a) * count + b) for a, b in sorted(pairs)}
        return [SimulatedMessage(self, planned, *paths[planned.endpoints]) for planned in self.compiled.messages]

    def _stage_steps(
        self,
        stage: int,
        iteration: int,
        messages: list[SimulatedMessage],
        barrier: Callable[[int, int], Barrier | None] | None,
    ) -> Iterator[_StageStep]:
        for code, number, one in self.compiled.stages[stage]:
            if number >= 0:
                yield code, 0.0, messages[number], iteration, one
            else:
                reduced = barrier(iteration, stage) if barrier and one.kind == "update" else None
                yield code, self.duration_s(stage, one), reduced, iteration, one

    def blocked_stages(self) -> list[str]:
        """Return a description of each unfinished stage with the operation that it waits in."""
        return [
            f"stage {stage} at {self.waiting_in[stage]}" for stage, end in enumerate(self.ends) if not end.triggered
        ]


def _run_stage(pipeline: Pipeline, stage: int, steps: list[_StageStep]) -> ProcessGenerator:
    """Execute the steps of one stage; return the time of its end."""
    kernel, log, progress = pipeline.kernel, pipeline.logs[stage], pipeline.waiting_in
    for code, duration_s, item, iteration, operation in steps:
        start_s = kernel.now_s
        if code == SEND:
            item.send()  # type: ignore[union-attr]
        elif code == POST_RECEIVE:
            item.post_receive()  # type: ignore[union-attr]
        elif isinstance(item, SimulatedMessage):
            if item.left_s is None:
                progress[stage] = operation
                yield item.times_known()
            due_s = item.left_s if code == WAIT_SENT else item.arrives_s
            if due_s is not None and due_s > kernel.now_s:
                yield due_s
            if kernel.now_s > start_s:
                log.append((start_s, kernel.now_s, iteration, operation, item))
        else:
            if isinstance(item, Barrier):
                progress[stage] = operation
                yield item.arrive()
                log.append((start_s, kernel.now_s, iteration, operation, item))
                start_s = kernel.now_s
            if duration_s:
                yield start_s + duration_s
            log.append((start_s, kernel.now_s, iteration, operation, None))
    return kernel.now_s
