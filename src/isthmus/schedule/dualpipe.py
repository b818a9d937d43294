"""`dualpipe`: the bidirectional pipeline of DeepSeek-V3, with two copies of the model."""

from __future__ import annotations

from collections import deque

from isthmus.core.errors import PlanError
from isthmus.schedule.add_communication import add_communication, require_counts
from isthmus.schedule.operation import Operation, OperationKind, Schedule


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
    stages = tuple(_StageOrder(s, num_stages, num_micro_batches).make_operations() for s in range(num_stages))
    down = tuple((s, 0) for s in range(num_stages))
    up = tuple((s, 1) for s in reversed(range(num_stages)))
    schedule = Schedule("dualpipe", num_micro_batches, stages, num_chunks=2, routes=(down, up))
    return add_communication(schedule, receive_ahead)


class _StageOrder:
    """The operations of one stage, built phase by phase.

    `near` is the direction whose entry is closer to the stage (0 runs down, 1 runs up), `far` the other.
    """

    def __init__(self, stage: int, num_stages: int, num_micro_batches: int) -> None:
        self.distance_to_end = min(stage, num_stages - 1 - stage)
        self.distance_to_middle = num_stages // 2 - 1 - self.distance_to_end
        self.num_steady_pairs = num_micro_batches // 2 - num_stages + self.distance_to_end + 1
        self.near, self.far = (0, 1) if stage < num_stages // 2 else (1, 0)
        self.operations: list[Operation] = []
        self.next_index: dict[tuple[OperationKind, int], int] = {}
        self.deferred_weights: deque[Operation] = deque()

    def make_operations(self) -> tuple[Operation, ...]:
        """Return the compute operations of the stage, in order."""
        near, far = self.near, self.far
        # Phase 1: warm up with forwards of the near direction.
        for _ in range(2 * self.distance_to_middle):
            self._add_next("forward", near)
        # Phase 2: forwards of both directions in turn.
        for _ in range(self.distance_to_end + 1):
            self._add_next("forward", near)
            self._add_next("forward", far)
        # Phase 3: split backwards and forwards of the far direction.
        for _ in range(self.distance_to_middle):
            self._add_next("backward_input", far)
            self._add_deferred_weight()
            self._add_next("forward", far)
        # Phase 4, the steady state: a forward of one direction with a backward of the other.
        for _ in range(self.num_steady_pairs):
            for ahead, back in ((near, far), (far, near)):
                self._add_next("forward", ahead)
                self._add_next("backward", back)
        # Phase 5: the last forwards, between backwards of both directions.
        for _ in range(self.distance_to_middle):
            self._add_next("backward", far)
            self._add_next("forward", far)
            self._add_next("backward", near)
        self._drain()
        return tuple(self.operations)

    def _drain(self) -> None:
        """Add phases 6 to 8, the remaining backwards; the later ones defer their weight gradients."""
        for i in range(2 * (self.distance_to_end + 1)):
            self._add_next("backward" if i <= self.distance_to_end else "backward_input", (self.far, self.near)[i % 2])
        for _ in range(self.distance_to_middle):
            self._add_deferred_weight()
            self._add_next("backward_input", self.near)
        while self.deferred_weights:
            self._add_deferred_weight()

    def _add_next(self, kind: OperationKind, direction: int) -> None:
        """Append `kind` for the next micro-batch of `direction`."""
        pass_kind: OperationKind = "forward" if kind == "forward" else "backward"
        number = self.next_index.get((pass_kind, direction), 0)
        self.next_index[pass_kind, direction] = number + 1
        one = Operation(kind, 2 * number + direction, direction)
        self.operations.append(one)
        if kind == "backward_input":
            self.deferred_weights.append(Operation("backward_weight", one.micro_batch, direction))

    def _add_deferred_weight(self) -> None:
        self.operations.append(self.deferred_weights.popleft())
