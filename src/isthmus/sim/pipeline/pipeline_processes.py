"""One pipeline on the kernel: stages as processes, messages over carriers, a log of what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from isthmus.schedule import Operation, Schedule
from isthmus.sim.kernel import Event, Kernel, Steps
from isthmus.sim.links.link_queue import Carrier
from isthmus.sim.pipeline.read_program import POST, SEND, WAIT_LEFT, Letter, Program

Transport = Literal["buffered", "rendezvous"]
"""When a message starts on its way: as soon as it is sent, or once its receive was posted as well."""


class Message:
    """One exchange of one micro-batch, and of the `weight` equal replicas that its pipeline stands for.

    `sent_s` and `posted_s` are when it was handed over and when its receive was posted, `started_s` when it
    went on its wire, `left_s` and `arrives_s` when its last byte did; None until known.
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
        """Hand it over now."""
        self.sent_s = self.kernel.now
        if not self.rendezvous or self.posted_s is not None:
            self._start()

    def post(self) -> None:
        """Post its receive now."""
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
        """Learn when the last byte left and when it arrives."""
        self.left_s, self.arrives_s = left_s, arrives_s
        if self._known is not None:
            self._known.trigger()

    def known(self) -> Event:
        """Return the event of `left_s` and `arrives_s` being known."""
        if self._known is None:
            self._known = self.kernel.event()
        return self._known


@dataclass
class Barrier:
    """What one stage does at its update: say that its gradients are there, and wait for everybody's.

    `ready` happens at the first, `done` at the last; `cause` is what the stage then waited for: when the
    last gradient was there, and whose it was.
    """

    ready: Event
    done: Event
    cause: tuple[float, Pipeline, int] | None = None

    def reach(self) -> Event:
        """Say that the stage's gradients are there; return the event of all being reduced."""
        self.ready.trigger()
        return self.done


Entry = tuple[float, float, int, Operation, "Message | Barrier | None"]
"""A line of a stage's log: start, end, iteration, operation, and what it waited for (None: it computed)."""

Path = tuple[Carrier | None, float]
"""How a message travels: over a carrier, or (None) in a fixed number of seconds."""

_Step = tuple[int, float, "Message | Barrier | None", int, Operation]


@dataclass
class Pipeline:
    """A schedule at work. `weight` equal replicas run as one; `number` tells pipelines apart.

    `duration_s(stage, operation)` is that of computing operations and updates, `bytes_of(stage)` the bytes
    of a micro-batch between `stage` and the next, each way, `path(sender, receiver)` how messages travel.
    """

    kernel: Kernel
    program: Program
    duration_s: Callable[[int, Operation], float]
    bytes_of: Callable[[int], float]
    path: Callable[[int, int], Path]
    transport: Transport = "buffered"
    weight: int = 1
    number: int = 0
    logs: list[list[Entry]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    progress: list[Operation | None] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule:
        """The schedule that runs."""
        return self.program.schedule

    def start(self, iterations: int = 1, barrier: Callable[[int, int], Barrier | None] | None = None) -> None:
        """Start every stage; `barrier(iteration, stage)` gives what its update waits for."""
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
        """Return a message per letter; those of an ordered pair of stages are one flow."""
        count = self.schedule.num_stages
        pairs = {letter.ends for letter in self.program.letters}
        ways = {(a, b): (self.path(a, b), (self.number * count + a) * count + b) for a, b in sorted(pairs)}
        return [Message(self, letter, *ways[letter.ends]) for letter in self.program.letters]

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
                gate = barrier(iteration, stage) if barrier and one.kind == "update" else None
                yield code, self.duration_s(stage, one), gate, iteration, one

    def stuck(self) -> list[str]:
        """Return the stages that have not ended, each with the operation it waits in."""
        return [
            f"stage {stage} at {self.progress[stage]}"
            for stage, end in enumerate(self.ends)
            if not end.happened
        ]


def _stage(pipeline: Pipeline, stage: int, steps: list[_Step]) -> Steps:
    """Do the steps of one stage; return when it ended."""
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
