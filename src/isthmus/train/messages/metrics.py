"""What a stage measures in a step (`Account`), and where it is written: `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import Span, StepMetrics
from isthmus.core.messages.worker_folder import WorkerSpec

Clock = Callable[[], float]


@dataclass
class Account:
    """Where the time of one step went, in seconds, and the bytes sent to other clusters.

    Waiting is *exposed communication* while the awaited message was under way, and *idle* otherwise (its
    sender was still computing). Inside a cluster nobody knows when a message was under way: that waiting
    counts as idle. `calls_s` is what the calls took that start exchanges, and those that end sends or what
    had come: what communication takes from the computing thread, waiting apart. `overrun_s` is what
    real computing took beyond the time of the virtual chip.
    """

    clock: Clock = time.time
    traced: bool = False
    compute_s: float = 0.0
    exposed_communication_s: float = 0.0
    idle_s: float = 0.0
    calls_s: float = 0.0
    overrun_s: float = 0.0
    wan_bytes: int = 0
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def span(self, kind: str, micro_batch: int) -> Iterator[None]:
        """Record what happens inside as one span, if this step is traced."""
        start_s = self.clock()
        yield
        if self.traced:
            self.spans.append(Span(kind=kind, micro_batch=micro_batch, start_s=start_s, end_s=self.clock()))

    def computed(self, kind: str, micro_batch: int, start_s: float) -> None:
        """Count what was computed from `start_s` to now, and record it as a span, if this step is traced."""
        end_s = self.clock()
        self.compute_s += end_s - start_s
        if self.traced:
            self.spans.append(Span(kind=kind, micro_batch=micro_batch, start_s=start_s, end_s=end_s))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time inside as computing."""
        start_s = self.clock()
        yield
        self.compute_s += self.clock() - start_s

    def waited(self, start_s: float, end_s: float, under_way: tuple[float, float] | None) -> None:
        """Count a wait from `start_s` to `end_s` for a message that was under way in the given interval."""
        exposed_s = 0.0
        if under_way is not None:
            exposed_s = max(min(end_s, under_way[1]) - max(start_s, under_way[0]), 0.0)
        self.exposed_communication_s += exposed_s
        self.idle_s += max(end_s - start_s - exposed_s, 0.0)

    def values(self) -> dict[str, float | None]:
        """Return the figures by name."""
        return {
            "compute_s": self.compute_s,
            "exposed_communication_s": self.exposed_communication_s,
            "idle_s": self.idle_s,
            "calls_s": self.calls_s,
            "overrun_s": self.overrun_s,
            "wan_bytes": float(self.wan_bytes),
        }


class MetricsLog:
    """Appends one `StepMetrics` a line to `metrics.jsonl`, and scalars to TensorBoard, given its folder.

    A context manager. Raises `UnavailableError` where the disk is full.
    """

    def __init__(self, file: Path, spec: WorkerSpec, board: Path | None, first_step: int) -> None:
        self._spec, self._path = spec, file
        self._file = file.open("a", encoding="utf-8")
        self._board = _open_board(board, first_step) if board else None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, step: int, values: Mapping[str, float | None], spans: tuple[Span, ...] = ()) -> None:
        """Append the figures of one step; what is not finite is written as unknown."""
        known = {
            key: value if value is None or math.isfinite(value) else None for key, value in values.items()
        }
        spec = self._spec
        line = StepMetrics(
            job=spec.run, attempt=spec.attempt, rank=spec.rank, step=step, values=known, spans=spans
        )
        try:
            self._file.write(line.model_dump_json() + "\n")
            self._file.flush()
        except OSError as error:
            raise UnavailableError(f"cannot write {self._path}: {error.strerror}") from error
        if self._board is not None:
            for key, value in known.items():
                if value is not None:
                    self._board.add_scalar(key, value, step)


def _open_board(folder: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    try:
        return SummaryWriter(str(folder), purge_step=first_step)
    except OSError as error:
        raise UnavailableError(f"cannot write to {folder}: {error.strerror}") from error
