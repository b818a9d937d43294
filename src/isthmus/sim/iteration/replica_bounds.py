"""`replica_bounds`: bounds of the time that one replica's pipeline takes, in closed form, beside its simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from isthmus.core.plan import StageTime
from isthmus.schedule import Operation
from isthmus.sim.iteration.simulated_training import LinkEnds, Replica
from isthmus.sim.links.simulated_link import SimulatedLink
from isthmus.sim.pipeline.run_pipeline import operation_durations
from isthmus.sim.pipeline.schedule_bounds import critical_path_s, serial_sum_s


class ReplicaBounds(NamedTuple):
    """Seconds of a pipeline and its optimizer steps, without the reduction of gradients."""

    critical_path_s: float
    """Longest chain of dependent operations, with idle links: no execution on these links is shorter."""
    serial_s: float
    """All computations and messages, one after another."""


def replica_bounds(replica: Replica, links: Mapping[LinkEnds, SimulatedLink]) -> ReplicaBounds:
    """Return the bounds of `replica`, with the mean delay and without the cross traffic of `links`."""
    durations, loads = load_durations(replica), replica.stages

    def hop_s(sender: int, receiver: int) -> float:
        source, target = loads[sender].cluster, loads[receiver].cluster
        first = loads[min(sender, receiver)]
        if source == target:
            return first.hop_s
        link = links[source, target]
        return link.delay_s + first.boundary_bytes / link.bytes_per_s

    return ReplicaBounds(
        critical_path_s(replica.schedule, durations, hop_s), serial_sum_s(replica.schedule, durations, hop_s)
    )


def load_durations(replica: Replica) -> Callable[[int, Operation], float]:
    """Return a function from stage and compute operation (or update) to seconds."""
    loads = replica.stages
    times = [StageTime(forward_s=x.forward_s, backward_s=x.backward_s) for x in loads]
    shares = [x.weight_gradient_share for x in loads]
    usual = operation_durations(replica.schedule, times, shares, [x.update_s for x in loads])
    overrides = {(s, one): seconds for s, x in enumerate(loads) for one, seconds in x.duration_overrides}
    if not overrides:
        return usual
    return lambda stage, one: overrides.get((stage, one), usual(stage, one))
