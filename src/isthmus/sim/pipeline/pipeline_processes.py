"""One simulated pipeline: a kernel process and a log per stage, messages over link queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from isthmus.schedule import Operation, Schedule
from isthmus.sim.kernel import Event, Kernel, Steps
from isthmus.sim.links.link_queue import Carrier
from isthmus.sim.pipeline.read_program import POST, SEND, WAIT_LEFT, Letter, Program

Transport = Literal["buffered", "rendezvous"]
"""When a message starts: with its send, or once its receive is posted as well."""


class Message:
    """A message of one micro-batch; it stands for the `weight` equal replicas of its pipeline.

    Times, None until known: `sent_s` of its send, `posted_s` of its receive, `started_s` of its start on the
    link, `left_s` and `arrives_s` of its last byte.
    """

    __slots__ = (
        "_known", "arrives_s", "carrier", "flow", "hop_s", "kernel", "left_s", "num_bytes", "operation",
        "posted_s", "receiver", "rendezvous", "sender", "sent_s", "started_s", "weight",
    )  # fmt: skip

    def __init__(self, pipeline: Pipeline, letter: Letter, path: Path, flow: int) -> None:
        self.kernel = pipeline.kernel
        self.sender, self.receiver = letter.ends
        self.carrier, self.hop_s = path
        self.num_bytes = pipeline.bytes_of(letter.boundary)
        self.weight, self.flow = pipeline.weight, flow
        self.operation = letter.operation
        self.rendezvous = pipeline.transport == "rendezvous"
        self.sent_s: float | None = None
        self.posted_s: float | None = None
        self.started_s: float | None = None
        self.left_s: float | None = None
        self.arrives_s: float | None = None
        self._known: Event | None = None

    def send(self) -> None:
        """Send it now."""
        self.sent_s = self.kernel.now
        if not self.rendezvous or self.posted_s is not None:
            self._start()

    def post(self) -> None:
        """Post the receive now."""
        self.posted_s = self.kernel.now
        if self.rendezvous and self.sent_s is not None:
            self._start()

    def _start(self) -> None:
        self.started_s = now = self.kernel.now
        if self.carrier is None:
            self.depart(now, now + self.hop_s)
        else:
            self.carrier.carry(self)

    def depart(self, left_s: float, arrives_s: float) -> None:
        """Set the times at which the last byte leaves and arrives."""
        self.left_s, self.arrives_s = left_s, arrives_s
        if self._known is not None:
            self._known.trigger()

    def known(self) -> Event:
        """Return an event that is triggered when `left_s` and `arrives_s` are known."""
        if self._known is None:
            self._known = self.kernel.event()
        return self._known


@dataclass
class Barrier:
    """The gradient reduction, as one stage waits for it before its update."""

    ready: Event
    """Triggered when the gradients of the stage are computed."""
    done: Event
    """Triggered when they are reduced."""
    cause: tuple[float, Pipeline, int] | None = None
    """The last stage to be ready: (time in seconds, pipeline, stage)."""

    def reach(self) -> Event:
        """Trigger `ready`; return the event of the completed reduction."""
        self.ready.trigger()
        return self.done


Entry = tuple[float, float, int, Operation, "Message | Barrier | None"]
"""A log entry of a stage: start, end, iteration, operation, and what it waited for (None: it computed)."""

Path = tuple[Carrier | None, float]
"""The path of a message: a link queue, or (None) a fixed time in seconds."""

_Step = tuple[int, float, "Message | Barrier | None", int, Operation]


@dataclass
class Pipeline:
    """A pipeline that executes a compiled schedule."""

    kernel: Kernel
    program: Program
    duration_s: Callable[[int, Operation], float]
    """Seconds of a compute operation or update, by stage."""
    bytes_of: Callable[[int], float]
    """Bytes of a micro-batch between a stage and the next, each way."""
    path: Callable[[int, int], Path]
    """Path of the messages from a sender to a receiver."""
    transport: Transport = "buffered"
    weight: int = 1
    """Number of equal replicas that it stands for."""
    number: int = 0
    """Index among the pipelines of the simulation."""
    logs: list[list[Entry]] = field(default_factory=list)
    """Log entries of each stage."""
    messages: list[Message] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    """The event of the end of each stage; its value is the time."""
    progress: list[Operation | None] = field(default_factory=list)
    """The operation that each stage waits in, or waited in last."""

    @property
    def schedule(self) -> Schedule:
        """The schedule that it executes."""
        return self.program.schedule

    def start(self, iterations: int = 1, barrier: Callable[[int, int], Barrier | None] | None = None) -> None:
        """Start every stage; its update waits for `barrier(iteration, stage)`."""
        count = self.schedule.num_stages
        self.logs = [[] for _ in range(count)]
        self.progress = [None] * count
        steps: list[list[_Step]] = [[] for _ in range(count)]
        for iteration in range(iterations):
            messages = self._messages()
            self.messages += messages
            for stage in range(count):
                steps[stage] += self._steps(stage, iteration, messages, barrier)
        self.ends = [self.kernel.start(_stage(self, stage, steps[stage])) for stage in range(count)]

    def _messages(self) -> list[Message]:
        """Return the messages of one iteration; those of an ordered pair of stages are one flow."""
        count = self.schedule.num_stages
        pairs = {planned.ends for planned in self.program.letters}
        paths = {(a, b): (self.path(a, b), (self.number * count + a) * count + b) for a, b in sorted(pairs)}
        return [Message(self, planned, *paths[planned.ends]) for planned in self.program.letters]

    def _steps(
        self,
        stage: int,
        iteration: int,
        messages: list[Message],
        barrier: Callable[[int, int], Barrier | None] | None,
    ) -> Iterator[_Step]:
        for code, number, one in self.program.stages[stage]:
            if number >= 0:
                yield code, 0.0, messages[number], iteration, one
            else:
                reduced = barrier(iteration, stage) if barrier and one.kind == "update" else None
                yield code, self.duration_s(stage, one), reduced, iteration, one

    def stuck(self) -> list[str]:
        """Return a description of each unfinished stage with the operation that it waits in."""
        return [
            f"stage {stage} at {self.progress[stage]}"
            for stage, end in enumerate(self.ends)
            if not end.happened
        ]


def _stage(pipeline: Pipeline, stage: int, steps: list[_Step]) -> Steps:
    """Execute the steps of one stage; return the time of its end."""
    kernel, log, progress = pipeline.kernel, pipeline.logs[stage], pipeline.progress
    for code, duration_s, item, iteration, operation in steps:
        start_s = kernel.now
        if code == SEND:
            item.send()  # type: ignore[union-attr]
        elif code == POST:
            item.post()  # type: ignore[union-attr]
        elif isinstance(item, Message):
            if item.left_s is None:
                progress[stage] = operation
                yield item.known()
            due_s = item.left_s if code == WAIT_LEFT else item.arrives_s
            if due_s is not None and due_s > kernel.now:
                yield due_s
            if kernel.now > start_s:
                log.append((start_s, kernel.now, iteration, operation, item))
        else:
            if isinstance(item, Barrier):
                progress[stage] = operation
                yield item.reach()
                log.append((start_s, kernel.now, iteration, operation, item))
                start_s = kernel.now
            if duration_s:
                yield start_s + duration_s
            log.append((start_s, kernel.now, iteration, operation, None))
    return kernel.now
