"""`dualpipe`: the bidirectional pipeline of DeepSeek-V3, with two copies of the model."""

from __future__ import annotations

from collections import deque

from isthmus.core.errors import PlanError
from isthmus.schedule.exchanges import lay_exchanges, require_counts
from isthmus.schedule.operation import Kind, Operation, Schedule


def dualpipe(num_stages: int, num_micro_batches: int, receive_ahead: int = 1) -> Schedule:
    """Return the DualPipe schedule: even micro-batches run down the stages in chunk 0, odd ones up in 1.

    Chunk 1 is a second copy of the model: stage `s` and stage `num_stages - 1 - s` hold the same layers.
    Where the original overlaps a forward of one direction with a backward of the other, they run one after
    the other. Requires an even number of stages, and an even number of micro-batches of at least twice that.
    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, and the eight phases of its
    published schedule.
    """
    require_counts(num_stages, num_micro_batches)
    if num_stages % 2 or num_micro_batches % 2 or num_micro_batches < 2 * num_stages:
        raise PlanError(
            f"dualpipe of {num_stages} stages and {num_micro_batches} micro-batches",
            hint="both must be even, and micro-batches at least twice the stages",
        )
    stages = tuple(_Stage(s, num_stages, num_micro_batches).order() for s in range(num_stages))
    down = tuple((s, 0) for s in range(num_stages))
    up = tuple((s, 1) for s in reversed(range(num_stages)))
    schedule = Schedule("dualpipe", num_micro_batches, stages, num_chunks=2, routes=(down, up))
    return lay_exchanges(schedule, receive_ahead)


class _Stage:
    """The operations of one stage, built phase by phase.

    `near` is the direction whose entry is closer to the stage (0 runs down, 1 runs up), `far` the other.
    """

    def __init__(self, stage: int, num_stages: int, num_micro_batches: int) -> None:
        self.depth = min(stage, num_stages - 1 - stage)
        self.inward = num_stages // 2 - 1 - self.depth
        self.main = num_micro_batches // 2 - num_stages + self.depth + 1
        self.near, self.far = (0, 1) if stage < num_stages // 2 else (1, 0)
        self.made: list[Operation] = []
        self.next: dict[tuple[Kind, int], int] = {}
        self.kept: deque[Operation] = deque()

    def order(self) -> tuple[Operation, ...]:
        """Return the compute operations of the stage, in order."""
        near, far = self.near, self.far
        # Phase 1: warm up with forwards of the near direction.
        for _ in range(2 * self.inward):
            self._take("forward", near)
        # Phase 2: forwards of both directions in turn.
        for _ in range(self.depth + 1):
            self._take("forward", near)
            self._take("forward", far)
        # Phase 3: split backwards and forwards of the far direction.
        for _ in range(self.inward):
            self._take("backward_input", far)
            self._weight()
            self._take("forward", far)
        # Phase 4, the steady state: a forward of one direction with a backward of the other.
        for _ in range(self.main):
            for ahead, back in ((near, far), (far, near)):
                self._take("forward", ahead)
                self._take("backward", back)
        # Phase 5: the last forwards, between backwards of both directions.
        for _ in range(self.inward):
            self._take("backward", far)
            self._take("forward", far)
            self._take("backward", near)
        self._drain()
        return tuple(self.made)

    def _drain(self) -> None:
        """Add phases 6 to 8, the remaining backwards; the later ones defer their weight gradients."""
        for i in range(2 * (self.depth + 1)):
            self._take("backward" if i <= self.depth else "backward_input", (self.far, self.near)[i % 2])
        for _ in range(self.inward):
            self._weight()
            self._take("backward_input", self.near)
        while self.kept:
            self._weight()

    def _take(self, kind: Kind, direction: int) -> None:
        """Append `kind` for the next micro-batch of `direction`."""
        pass_kind: Kind = "forward" if kind == "forward" else "backward"
        number = self.next.get((pass_kind, direction), 0)
        self.next[pass_kind, direction] = number + 1
        one = Operation(kind, 2 * number + direction, direction)
        self.made.append(one)
        if kind == "backward_input":
            self.kept.append(Operation("backward_weight", one.micro_batch, direction))

    def _weight(self) -> None:
        self.made.append(self.kept.popleft())
