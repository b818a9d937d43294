"""Timing of one step (`StepTimer`), and the log of step metrics: `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isthmus.comm.transport.transport import Arrival
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import ReceivedMessage, Span, StepMetrics
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.process.steady_clock import steady_time_s
from isthmus.train.communication.device_timeline import DeviceTimeline

Clock = Callable[[], float]


@dataclass(frozen=True)
class PendingCompute:
    """A computation between two marks of a device, and when the host had queued it (s); no `kind`: no span."""

    kind: str
    micro_batch: int
    marks: tuple[Any, Any]
    queued_s: float


@dataclass
class StepTimer:
    """The time of one step by cause, in seconds, and the bytes sent to other clusters.

    A wait counts as exposed communication while its message was in transit, and as idle before (its sender
    was still computing). Messages inside a cluster do not report their transit: waits for them count as idle.
    """

    clock: Clock = steady_time_s
    # Whether this step records `spans` and `messages`.
    is_traced: bool = False
    compute_s: float = 0.0
    exposed_communication_s: float = 0.0
    idle_s: float = 0.0
    # Computing thread's time in calls that start messages or complete finished ones, without waiting.
    calls_s: float = 0.0
    # Real compute time beyond the time of the virtual chip.
    overrun_s: float = 0.0
    # Bytes sent to other clusters.
    wan_bytes: int = 0
    spans: list[Span] = field(default_factory=list)
    # Computations that the device had not executed when they were added.
    pending: list[PendingCompute] = field(default_factory=list)
    # Messages received from other clusters.
    messages: list[ReceivedMessage] = field(default_factory=list)

    @contextmanager
    def record_span(self, kind: str, micro_batch: int) -> Iterator[None]:
        """Record the block as one span, if the step is traced."""
        start_s = self.clock()
        yield
        if self.is_traced:
            self.spans.append(Span(kind=kind, micro_batch=micro_batch, start_s=start_s, end_s=self.clock()))

    def add_compute(self, kind: str, micro_batch: int, start_s: float) -> None:
        """Add the time from `start_s` to now to `compute_s`; record it as a span if the step is traced."""
        end_s = self.clock()
        self.compute_s += end_s - start_s
        if self.is_traced:
            self.spans.append(Span(kind=kind, micro_batch=micro_batch, start_s=start_s, end_s=end_s))

    def add_device_compute(self, kind: str, micro_batch: int, marks: tuple[Any, Any], timeline: DeviceTimeline) -> None:
        """Add the computation between two marks of a device; one not yet executed is added by `settle`."""
        queued_s = marks[1] if isinstance(marks[1], float) else self.clock()  # the marks of a CPU are times
        self.pending.append(PendingCompute(kind, micro_batch, marks, queued_s))
        self.settle(timeline)

    def settle(self, timeline: DeviceTimeline, anchor: tuple[Any, float] | None = None) -> None:
        """Add the pending computations that the device has executed, in order.

        `anchor` is a mark at which the device was idle, and the time of the host's clock there; the spans of a traced
        step refer to it, else to when the host had queued the work.
        """
        while self.pending:
            one = self.pending[0]
            elapsed_s = timeline.elapsed_s(*one.marks)
            if elapsed_s is None:
                return
            self.pending.pop(0)
            self.compute_s += elapsed_s
            if self.is_traced and one.kind:
                before_s = timeline.elapsed_s(one.marks[1], anchor[0]) if anchor is not None else None
                end_s = one.queued_s if anchor is None or before_s is None else anchor[1] - before_s
                span = Span(kind=one.kind, micro_batch=one.micro_batch, start_s=end_s - elapsed_s, end_s=end_s)
                self.spans.append(span)

    @contextmanager
    def measure_compute(self) -> Iterator[None]:
        """Add the time of the block to `compute_s`."""
        start_s = self.clock()
        yield
        self.compute_s += self.clock() - start_s

    def add_wait(self, start_s: float, end_s: float, under_way: tuple[float, float] | None) -> None:
        """Add a wait from `start_s` to `end_s` for a message in transit during `under_way` (start, end)."""
        exposed_s = 0.0
        if under_way is not None:
            exposed_s = max(min(end_s, under_way[1]) - max(start_s, under_way[0]), 0.0)
        self.exposed_communication_s += exposed_s
        self.idle_s += max(end_s - start_s - exposed_s, 0.0)

    def add_message(self, kind: str, micro_batch: int, source: int, num_bytes: int, arrival: Arrival) -> None:
        """Record a message from rank `source` in another cluster, if the step is traced."""
        if self.is_traced:
            times = asdict(arrival)
            self.messages.append(
                ReceivedMessage(kind=kind, micro_batch=micro_batch, source=source, num_bytes=num_bytes, **times)
            )

    def values(self) -> dict[str, float | None]:
        """Return the metrics by name."""
        return {
            "compute_s": self.compute_s,
            "exposed_communication_s": self.exposed_communication_s,
            "idle_s": self.idle_s,
            "calls_s": self.calls_s,
            "overrun_s": self.overrun_s,
            "wan_bytes": float(self.wan_bytes),
        }


class MetricsLog:
    """Context manager that appends one `StepMetrics` line per step, and scalars to TensorBoard if given.

    Raises `UnavailableError` if a file cannot be written.
    """

    def __init__(self, file: Path, spec: WorkerSpec, tensorboard: Path | None, first_step: int) -> None:
        self._spec, self._path = spec, file
        self._file = file.open("a", encoding="utf-8")
        self._tensorboard = _open_tensorboard(tensorboard, first_step) if tensorboard else None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def write(self, step: int, values: Mapping[str, float | None], timer: StepTimer | None = None) -> None:
        """Append the metrics of one step, with what `timer` recorded; values that are not finite become null."""
        known = {key: value if value is None or math.isfinite(value) else None for key, value in values.items()}
        spec = self._spec
        recorded = {"spans": tuple(timer.spans), "messages": tuple(timer.messages)} if timer else {}
        line = StepMetrics(job=spec.run, attempt=spec.attempt, rank=spec.rank, step=step, values=known, **recorded)
        try:
            self._file.write(line.model_dump_json() + "\n")
            self._file.flush()
        except OSError as error:
            raise UnavailableError(f"cannot write {self._path}: {error.strerror}") from error
        if self._tensorboard is not None:
            for key, value in known.items():
                if value is not None:
                    self._tensorboard.add_scalar(key, value, step)


def _open_tensorboard(folder: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    try:
        return SummaryWriter(str(folder), purge_step=first_step)
    except OSError as error:
        raise UnavailableError(f"cannot write to {folder}: {error.strerror}") from error
