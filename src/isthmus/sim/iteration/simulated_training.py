"""`SimulatedTraining`, the input of the simulator: replicas with stage loads and schedules, and their shared links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.core.errors import InputError
from isthmus.schedule import Operation, Schedule
from isthmus.sim.links.link_queue import Sharing
from isthmus.sim.links.simulated_link import SimulatedLink
from isthmus.sim.pipeline.pipeline_processes import SendMode
from isthmus.sim.synchronisation import SyncServers

LinkEnds = tuple[str, str]
"""One direction between two clusters: (from, to)."""


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """The time, bytes and memory of one stage of one replica.

    All bytes count either the whole stage or one chip, as the caller chooses.
    """

    cluster: str
    forward_s: float
    """Forward time of one micro-batch."""
    backward_s: float
    """Backward time of one micro-batch."""
    weight_gradient_share: float = 0.5
    """Share of a backward that computes weight gradients (split backwards)."""
    update_s: float = 0.0
    """Time of the optimizer step."""
    duration_overrides: tuple[tuple[Operation, float], ...] = ()
    """Durations in seconds of single operations, instead of the above."""
    boundary_bytes: float = 0.0
    """Activations that a micro-batch sends to the next stage; their gradients have the same size."""
    hop_s: float = 0.0
    """Time of a message to the next stage if it is in the same cluster."""
    static_bytes: float = 0.0
    """Memory held throughout."""
    activation_bytes: float = 0.0
    """Memory held per micro-batch in flight."""
    layers: tuple[int, int] = (0, 1)
    """Decoder layers `[first, last)`."""
    gradient_bytes: float = 0.0
    """Gradients reduced over the replicas."""
    averaged_bytes: float = 0.0
    """Parameters averaged over the replica groups (local steps)."""
    local_bytes_per_s: float = math.inf
    """Rate of a collective inside the cluster."""
    servers: SyncServers | None = None
    """The servers of the cluster that sum the stage's gradients; a named strategy needs them."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """`count` equal pipelines."""

    stages: tuple[StageLoad, ...]
    schedule: Schedule
    count: int = 1

    def __post_init__(self) -> None:
        if len(self.stages) != self.schedule.num_stages or self.count < 1:
            raise InputError(
                f"{self.count} replicas of {len(self.stages)} stages with a schedule of "
                f"{self.schedule.num_stages} stages",
                hint="give as many stages as the schedule has, and a count of at least 1",
            )


@dataclass(frozen=True, kw_only=True)
class SimulatedTraining:
    """The input of the simulator."""

    replicas: tuple[Replica, ...]
    links: Mapping[LinkEnds, SimulatedLink] = field(default_factory=dict)
    """Links by direction; all messages between two clusters share one."""
    transport: SendMode = "buffered"
    sharing: Sharing = "fair"
    iterations: int = 1
    seed: int = 0
    """Seed of the link jitter."""
    local_steps: int = 1
    """Above 1, only replicas that share a cluster reduce gradients every iteration, and all replicas average
    parameters every `local_steps` iterations; a simulated iteration is the mean of these."""
    synchronisation: str | None = None
    """Name of the strategy that sums gradients; None: inside each cluster first, then a ring of the clusters."""
