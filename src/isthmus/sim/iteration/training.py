"""What is simulated (`Training`): replicas of stages, with loads and schedules, and the wires they share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.core.errors import InputError
from isthmus.schedule import Operation, Schedule
from isthmus.sim.links.link_queue import Sharing
from isthmus.sim.links.wire import Wire
from isthmus.sim.pipeline.pipeline_processes import Transport

Ends = tuple[str, str]
"""A direction between clusters: (from, to)."""


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What one stage of one replica costs, in numbers alone.

    `forward_s` and `backward_s` are of one micro-batch; `weight_share` of a backward makes the weights'
    gradient where the schedule cuts it in two. `overrides` gives single operations another duration.
    `boundary_bytes` is what a micro-batch carries to the next stage, and its gradient back; inside a cluster
    that takes `hop_s`. `activation_bytes` is kept per micro-batch in flight, `static_bytes` always.
    `gradient_bytes` of layers `[first, last)` are reduced over the replicas, inside a cluster at
    `local_bytes_per_s`; with local steps `averaged_bytes` of them are averaged over the groups. All bytes are
    those of the whole stage, or all per chip: the unit is the caller's.
    """

    cluster: str
    forward_s: float
    backward_s: float
    weight_share: float = 0.5
    update_s: float = 0.0
    overrides: tuple[tuple[Operation, float], ...] = ()
    boundary_bytes: float = 0.0
    hop_s: float = 0.0
    static_bytes: float = 0.0
    activation_bytes: float = 0.0
    layers: tuple[int, int] = (0, 1)
    gradient_bytes: float = 0.0
    averaged_bytes: float = 0.0
    local_bytes_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One pipeline, `count` times over."""

    stages: tuple[StageLoad, ...]
    schedule: Schedule
    count: int = 1

    def __post_init__(self) -> None:
        if len(self.stages) != self.schedule.num_stages or self.count < 1:
            raise InputError(
                f"{self.count} replicas of {len(self.stages)} stages under a schedule of "
                f"{self.schedule.num_stages}",
                hint="a schedule has as many stages as its replica, and a replica exists at least once",
            )


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is simulated. `wires` are the directions between clusters, shared by all that crosses them.

    With `local_steps` above 1 only replicas that share a cluster reduce their gradients every iteration; an
    iteration is then the mean of so many, after which those of all clusters average.
    """

    replicas: tuple[Replica, ...]
    wires: Mapping[Ends, Wire] = field(default_factory=dict)
    transport: Transport = "buffered"
    sharing: Sharing = "fair"
    iterations: int = 1
    seed: int = 0
    local_steps: int = 1
