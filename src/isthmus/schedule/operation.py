"""The nouns of a pipeline schedule: `Operation`, and `Schedule` as one list of operations per stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal[
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
"""`forward` and `backward` compute. A schedule may cut a `backward` into `backward_input`, which makes the
gradient that the stage before waits for, and, any time later, `backward_weight`. `send_*` and `receive_*`
start an exchange and never block; the `wait_*` of the same name blocks until it is complete. A `forward`
exchange carries activations to the next stage, a `backward` one their gradients to the stage before. `update`
applies the optimiser after the last backward."""


@dataclass(frozen=True)
class Operation:
    """One thing a stage does: `kind`, for a micro-batch (from 0) and a model chunk (0 unless interleaved)."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}({self.micro_batch}{f', chunk {self.chunk}' if self.chunk else ''})"


Place = tuple[int, int]
"""Where a piece of the model is: (stage, chunk)."""


@dataclass(frozen=True)
class Schedule:
    """What every stage does in one step, in order: `stages[s]` is the list of stage `s`.

    With `num_chunks` > 1 stage `s` holds the virtual stages `s`, `s + num_stages`, ... of the pipeline.
    `routes` places the pieces otherwise: each route lists the (stage, chunk) of every virtual stage in
    pipeline order, and micro-batch `m` takes route `m % len(routes)`. A chunk of a stage is one piece of the
    model: routes that pass it have it at the same place. Two routes through two copies of the
    model, in opposite directions, make a bidirectional pipeline. `trains` is False for a schedule of forwards
    alone (evaluation): no backward, no update. Exchanges between an ordered pair of stages are first in,
    first out: the k-th send meets the k-th receive.
    """

    name: str
    num_micro_batches: int
    stages: tuple[tuple[Operation, ...], ...]
    num_chunks: int = 1
    trains: bool = True
    routes: tuple[tuple[Place, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def num_virtual_stages(self) -> int:
        """Number of model pieces that one micro-batch passes, in pipeline order."""
        return len(self.routes[0]) if self.routes else self.num_stages * self.num_chunks

    def route(self, micro_batch: int) -> tuple[Place, ...]:
        """Return the (stage, chunk) of every virtual stage that `micro_batch` passes, in pipeline order."""
        if self.routes:
            return self.routes[micro_batch % len(self.routes)]
        return self._straight

    @cached_property
    def _straight(self) -> tuple[Place, ...]:
        return tuple((v % self.num_stages, v // self.num_stages) for v in range(self.num_virtual_stages))

    @cached_property
    def _virtual(self) -> tuple[dict[Place, int], ...]:
        return tuple({place: virtual for virtual, place in enumerate(route)} for route in self.routes)

    def virtual(self, stage: int, operation: Operation) -> int:
        """Return the virtual stage that `operation` of `stage` belongs to, -1 if its route has none there."""
        if self.routes:
            places = self._virtual[operation.micro_batch % len(self.routes)]
            return places.get((stage, operation.chunk), -1)
        return operation.chunk * self.num_stages + stage

    def peer(self, stage: int, operation: Operation) -> int:
        """Return the stage with which an exchange of `stage` takes place; computing operations have none.

        Raises `ValueError` for a computing operation, and for an exchange beyond either end of the pipeline.
        """
        step = _PEER_STEP.get(operation.kind.removeprefix("wait_"))
        if step is None:
            raise ValueError(f"{operation} is no exchange")
        other = self.virtual(stage, operation) + step
        if not 0 <= other < self.num_virtual_stages:
            raise ValueError(f"{operation} of stage {stage} has no peer: the pipeline ends there")
        return self.route(operation.micro_batch)[other][0]

    def __iter__(self) -> Iterator[tuple[int, Operation]]:
        """Iterate over (stage, operation), stage by stage."""
        return ((stage, one) for stage, operations in enumerate(self.stages) for one in operations)


_PEER_STEP = {"send_forward": 1, "receive_forward": -1, "send_backward": -1, "receive_backward": 1}
