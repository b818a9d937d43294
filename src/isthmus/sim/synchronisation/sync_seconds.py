"""`sync_seconds`: the time of a named strategy, priced from the strategy's own steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from isthmus.core.errors import InputError
from isthmus.sim.synchronisation.step_loads import Resource, StageOfPhases, step_loads
from isthmus.sim.synchronisation.sync_cluster import SyncCluster
from isthmus.strategies import find_strategy

BindingEnd = Literal["aggregator", "worker", "ring", "slots", "delay"]
"""What takes most of the time: NICs of aggregators, NICs of workers, rings inside hosts, slots of switches, delays."""

_ENDS: dict[Resource, BindingEnd] = {
    "worker": "worker", "ring": "ring", "server": "aggregator", "switch": "aggregator", "slots": "slots",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """The time of phases that stream into each other: `seconds` of the resource that binds, and delays."""

    names: tuple[str, ...]
    seconds: float
    bound: BindingEnd
    """The resource that takes longest, delays left out."""
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class SyncTime:
    """The time of one synchronisation and its phases, which follow each other."""

    strategy: str
    phases: tuple[PhaseTime, ...]

    @property
    def total_s(self) -> float:
        """Seconds from the first message to the last sum."""
        return sum(phase.seconds + phase.delay_s for phase in self.phases)

    @property
    def bound(self) -> BindingEnd:
        """The end that takes most of the time over all phases; "worker" if nothing is sent."""
        by_end: dict[BindingEnd, float] = defaultdict(float)
        for phase in self.phases:
            by_end[phase.bound] += phase.seconds
            by_end["delay"] += phase.delay_s
        return max(by_end, key=by_end.__getitem__, default="worker")


def sync_seconds(strategy: str, num_bytes: float, cluster: SyncCluster) -> SyncTime:
    """Return the time in which all chips of `cluster` sum `num_bytes` each by `strategy`.

    Phases follow each other unless one streams behind the one before it. A phase takes as long as its busiest
    resource (a NIC in one direction, a link of a ring, an aggregator, the slots of a switch), plus a delay per round.
    It is a lower bound that is met if messages are small against the total and hosts start together. Raises
    `InputError` for an unknown strategy or a number of bytes below 0.
    """
    if not num_bytes >= 0:
        raise InputError(f"num_bytes is {num_bytes}", hint="num_bytes is at least 0")
    one = find_strategy(strategy)
    share = None
    if one.fallback and cluster.slot_pool_bytes is not None and num_bytes:
        share = min(cluster.slot_pool_bytes / num_bytes, 1.0)
    loads = step_loads(
        strategy,
        cluster.num_servers,
        cluster.chips_per_server,
        cluster.num_aggregators if one.aggregator else 1,
        share,
    )
    return SyncTime(strategy=strategy, phases=tuple(_phase(stage, num_bytes, cluster) for stage in loads))


def _phase(stage: StageOfPhases, num_bytes: float, cluster: SyncCluster) -> PhaseTime:
    rates = _seconds_per_byte(cluster)
    times = [(load * num_bytes * rates[resource], _ENDS[resource]) for resource, load in stage.loads]
    longest_s, bound = max(times, key=lambda one: one[0])
    return PhaseTime(
        names=stage.names,
        seconds=longest_s,
        bound=bound,
        delay_s=stage.network_rounds * cluster.network_delay_s + stage.inside_rounds * cluster.ring_delay_s,
    )


def _seconds_per_byte(cluster: SyncCluster) -> dict[Resource, float]:
    network = cluster.network_bytes_per_s
    pool = cluster.slot_pool_bytes
    return {
        "worker": 1 / network,
        "ring": 1 / cluster.ring_bytes_per_s,
        "server": 1 / (cluster.server_bytes_per_s or network),
        "switch": 1 / cluster.switch_bytes_per_s if cluster.switch_bytes_per_s else 0.0,
        "slots": 2 * cluster.network_delay_s / pool if pool else 0.0,
    }
