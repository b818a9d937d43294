"""`Operation`, one step of a pipeline stage, and `Schedule`, one list of operations per stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

OperationKind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "receive_forward",
    "send_backward",
    "receive_backward",
    "wait_send_forward",
    "wait_receive_forward",
    "wait_send_backward",
    "wait_receive_backward",
    "update",
]
"""`forward` and `backward` compute. A schedule may split a `backward` into `backward_input`, which computes
the gradient for the previous stage, and a later `backward_weight`. `send_*` and `receive_*` start a transfer
and never block; the `wait_*` of the same name blocks until it completes. `*_forward` transfers activations to
the next stage, `*_backward` their gradients to the previous one. `update` applies the optimizer after the
last backward."""

WAIT_OF: dict[OperationKind, OperationKind] = {
    "send_forward": "wait_send_forward",
    "receive_forward": "wait_receive_forward",
    "send_backward": "wait_send_backward",
    "receive_backward": "wait_receive_backward",
}
"""The operation that waits for each transfer."""


@dataclass(frozen=True)
class Operation:
    """One operation of a stage: `kind`, for a micro-batch and a model chunk (both counted from 0)."""

    kind: OperationKind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}({self.micro_batch}{f', chunk {self.chunk}' if self.chunk else ''})"


StageChunk = tuple[int, int]
"""A chunk of a stage: (stage, chunk)."""


@dataclass(frozen=True)
class Schedule:
    """The operations of one training step: `stages[s]` lists those of stage `s`, in order.

    With `num_chunks` > 1, stage `s` holds the virtual stages `s`, `s + num_stages`, ... of the pipeline,
    unless `routes` places them: each route lists the (stage, chunk) of every virtual stage in pipeline order,
    and micro-batch `m` takes route `m % len(routes)`. All routes have a chunk at the same virtual stage. Two
    routes in opposite directions, through two copies of the model, form a bidirectional pipeline. `trains` is
    False for a forward-only schedule (evaluation): no backward, no update. Messages between an ordered pair
    of stages are first in, first out: the k-th send matches the k-th receive.
    """

    name: str
    num_micro_batches: int
    stages: tuple[tuple[Operation, ...], ...]
    num_chunks: int = 1
    trains: bool = True
    routes: tuple[tuple[StageChunk, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages that one micro-batch passes."""
        return len(self.routes[0]) if self.routes else self.num_stages * self.num_chunks

    def route(self, micro_batch: int) -> tuple[StageChunk, ...]:
        """Return the (stage, chunk) of every virtual stage of `micro_batch`, in pipeline order."""
        if self.routes:
            return self.routes[micro_batch % len(self.routes)]
        return self._default_route

    @cached_property
    def _default_route(self) -> tuple[StageChunk, ...]:
        return tuple((v % self.num_stages, v // self.num_stages) for v in range(self.num_virtual_stages))

    @cached_property
    def _virtual_stage_of(self) -> tuple[dict[StageChunk, int], ...]:
        return tuple({place: virtual for virtual, place in enumerate(route)} for route in self.routes)

    def virtual_stage(self, stage: int, operation: Operation) -> int:
        """Return the virtual stage of `operation` of `stage`, -1 if its route omits that chunk."""
        if self.routes:
            places = self._virtual_stage_of[operation.micro_batch % len(self.routes)]
            return places.get((stage, operation.chunk), -1)
        return operation.chunk * self.num_stages + stage

    def peer_stage(self, stage: int, operation: Operation) -> int:
        """Return the stage at the other end of a transfer of `stage`.

        Raises `ValueError` for a compute operation, and for a transfer beyond either end of the pipeline.
        """
        step = _PEER_OFFSET.get(operation.kind.removeprefix("wait_"))
        if step is None:
            raise ValueError(f"{operation} is not a communication operation")
        other = self.virtual_stage(stage, operation) + step
        if not 0 <= other < self.num_virtual_stages:
            raise ValueError(f"{operation} of stage {stage} has no peer: it is at the end of the pipeline")
        return self.route(operation.micro_batch)[other][0]

    def __iter__(self) -> Iterator[tuple[int, Operation]]:
        """Iterate over (stage, operation), stage by stage."""
        return ((stage, one) for stage, operations in enumerate(self.stages) for one in operations)


_PEER_OFFSET = {"send_forward": 1, "receive_forward": -1, "send_backward": -1, "receive_backward": 1}
