"""One pipeline on the kernel: stages as processes, messages over carriers, a log of what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from isthmus.schedule import Kind, Operation, Schedule
from isthmus.sim.kernel import Event, Kernel, Steps
from isthmus.sim.wire import Carrier

Transport = Literal["buffered", "rendezvous"]
"""When a message starts on its way: as soon as it is sent, or once its receive was posted as well."""

COMPUTING: frozenset[Kind] = frozenset(("forward", "backward", "backward_input", "backward_weight"))

_COMPUTE, _SEND, _POST, _WAIT_LEFT, _WAIT_ARRIVED = range(5)


class Message:
    """One exchange of one micro-batch, and of the `weight` equal replicas that its pipeline stands for.

    `sent_s` and `posted_s` are when it was handed over and when its receive was posted, `started_s` when it
    went on its wire, `left_s` and `arrives_s` when its last byte did; None until known.
    """

    __slots__ = (
        "_known", "arrives_s", "carrier", "flow", "hop_s", "kernel", "left_s", "num_bytes", "operation",
        "pipeline", "posted_s", "receiver", "rendezvous", "sender", "sent_s", "started_s", "weight",
    )  # fmt: skip

    def __init__(
        self, pipeline: Pipeline, ends: tuple[int, int], num_bytes: float, operation: Operation
    ) -> None:
        self.pipeline, self.kernel = pipeline, pipeline.kernel
        self.sender, self.receiver = ends
        self.carrier, self.hop_s = pipeline.path(*ends)
        self.num_bytes, self.weight, self.flow = num_bytes, pipeline.weight, pipeline.flow(*ends)
        self.operation = operation
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
    schedule: Schedule
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

    def flow(self, sender: int, receiver: int) -> int:
        """Return a number for the ordered pair, within which messages never overtake each other."""
        count = self.schedule.num_stages
        return (self.number * count + sender) * count + receiver

    def start(self, iterations: int = 1, barrier: Callable[[int, int], Barrier | None] | None = None) -> None:
        """Start every stage; `barrier(iteration, stage)` gives what its update waits for."""
        count = self.schedule.num_stages
        self.logs = [[] for _ in range(count)]
        self.progress = [None] * count
        steps: list[list[_Step]] = [[] for _ in range(count)]
        for iteration in range(iterations):
            known: dict[tuple[bool, int, int], Message] = {}
            for stage in range(count):
                gate = barrier(iteration, stage) if barrier else None
                steps[stage] += _compile(self, known, iteration, stage, gate)
            self.messages += known.values()
        self.ends = [self.kernel.start(_stage(self, stage, steps[stage])) for stage in range(count)]

    def stuck(self) -> list[str]:
        """Return the stages that have not ended, each with the operation it waits in."""
        return [
            f"stage {stage} at {self.progress[stage]}"
            for stage, end in enumerate(self.ends)
            if not end.happened
        ]


_EXCHANGE: dict[Kind, tuple[int, bool, bool]] = {
    "send_forward": (_SEND, True, True),
    "send_backward": (_SEND, False, True),
    "receive_forward": (_POST, True, False),
    "receive_backward": (_POST, False, False),
    "wait_send_forward": (_WAIT_LEFT, True, True),
    "wait_send_backward": (_WAIT_LEFT, False, True),
    "wait_receive_forward": (_WAIT_ARRIVED, True, False),
    "wait_receive_backward": (_WAIT_ARRIVED, False, False),
}
"""By kind: what the stage does, whether the message goes forward, whether this end sends it."""


def _compile(
    pipeline: Pipeline,
    known: dict[tuple[bool, int, int], Message],
    iteration: int,
    stage: int,
    barrier: Barrier | None,
) -> Iterator[_Step]:
    schedule = pipeline.schedule
    for one in schedule.stages[stage]:
        exchange = _EXCHANGE.get(one.kind)
        if exchange is None:
            item = barrier if one.kind == "update" else None
            yield _COMPUTE, pipeline.duration_s(stage, one), item, iteration, one
            continue
        code, forward, sends = exchange
        sender = schedule.virtual(stage, one) + (0 if sends else -1 if forward else 1)
        message = known.get((forward, one.micro_batch, sender))
        if message is None:
            receiver = sender + (1 if forward else -1)
            route = schedule.route(one.micro_batch)
            ends = route[sender][0], route[receiver][0]
            size = pipeline.bytes_of(route[min(sender, receiver)][0])
            message = Message(pipeline, ends, size, one)
            known[forward, one.micro_batch, sender] = message
        yield code, 0.0, message, iteration, one


def _stage(pipeline: Pipeline, stage: int, steps: list[_Step]) -> Steps:
    """Do the steps of one stage; return when it ended."""
    kernel, log, progress = pipeline.kernel, pipeline.logs[stage], pipeline.progress
    for code, duration_s, item, iteration, operation in steps:
        start_s = kernel.now
        if code == _SEND:
            item.send()  # type: ignore[union-attr]
        elif code == _POST:
            item.post()  # type: ignore[union-attr]
        elif isinstance(item, Message):
            if item.left_s is None:
                progress[stage] = operation
                yield item.known()
            due_s = item.left_s if code == _WAIT_LEFT else item.arrives_s
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
