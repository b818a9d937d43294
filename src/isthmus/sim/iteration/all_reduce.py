"""The all-reduce of gradients at the end of an iteration, over replicas that may be cut differently.

Layers that the same stages hold in every replica form a segment. A segment's gradients are reduced in three
steps, as hierarchical collectives do: reduce-scatter inside each cluster, a ring all-reduce between the
clusters over their wires, all-gather inside each cluster. Source of the ring's cost: P. Patarasuk and X.
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Assumed: segments that share a stage share its local links and end together; the ring visits the clusters in
order of first use; every member of a cluster has a flow of its own on the wire.

With local steps only the replicas of one group reduce gradients so. Every H steps the groups then average
their parameters, between clusters alone; an iteration is the mean of H: it has 1/H of an average's bytes and
time, after the slowest group (A. Douillard et al., "DiLoCo: distributed low-communication training of
language models", 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from isthmus.sim.kernel import Event, Kernel, Steps, all_of
from isthmus.sim.links.link_queue import Carrier
from isthmus.sim.pipeline.pipeline_processes import Barrier, Pipeline


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A stage as holder of layers `[first, last)`: what it reduces, and how fast inside its cluster.

    `count` equal replicas of a `group` stand behind it; `local_bytes_per_s` is the rate of a collective in
    its cluster. `averaged_bytes` of the same layers are averaged over the groups.
    """

    pipeline: Pipeline
    stage: int
    cluster: str
    layers: tuple[int, int]
    gradient_bytes: float
    local_bytes_per_s: float
    count: int
    averaged_bytes: float = 0.0
    group: int = 0


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Layers `[first, last)`, held by `holders`, one per replica or class of equal replicas."""

    layers: tuple[int, int]
    holders: tuple[Holder, ...]

    @property
    def clusters(self) -> dict[str, int]:
        """Number of members per cluster, in order of first use."""
        counts: dict[str, int] = {}
        for holder in self.holders:
            counts[holder.cluster] = counts.get(holder.cluster, 0) + holder.count
        return counts

    @property
    def groups(self) -> tuple[Segment, ...]:
        """The segment as each group of replicas holds it."""
        numbers = sorted({holder.group for holder in self.holders})
        return tuple(replace(self, holders=tuple(h for h in self.holders if h.group == n)) for n in numbers)

    def num_bytes(self, *, averaged: bool = False) -> float:
        """Return the bytes of gradients, or of what is averaged: the largest share that any holder keeps."""
        first, last = self.layers
        return max(_bytes(h, averaged) * (last - first) / (h.layers[1] - h.layers[0]) for h in self.holders)

    def local_s(self, *, averaged: bool = False) -> float:
        """Return the seconds of the reduce-scatter, or of the all-gather, in the slowest cluster."""
        slowest_s, clusters = 0.0, self.clusters
        for holder in self.holders:
            members = clusters[holder.cluster]
            share = (members - 1) / members
            slowest_s = max(slowest_s, share * _bytes(holder, averaged) / holder.local_bytes_per_s)
        return slowest_s


def _bytes(holder: Holder, averaged: bool) -> float:
    return holder.averaged_bytes if averaged else holder.gradient_bytes


def segments(holders: Sequence[Holder]) -> tuple[Segment, ...]:
    """Cut the layers at every boundary of every replica; return the segments, first layers first."""
    cuts = sorted({end for holder in holders for end in holder.layers})
    found = []
    for first, last in itertools.pairwise(cuts):
        here = tuple(h for h in holders if h.layers[0] <= first and last <= h.layers[1])
        if sum(h.count for h in here) > 1:
            found.append(Segment(layers=(first, last), holders=here))
    return tuple(found)


@dataclass
class _Shard:
    """What crosses one wire of the ring: the part of one member, for all members of its cluster."""

    num_bytes: float
    weight: int
    flow: int
    event: Event
    left_s: float = 0.0
    arrives_s: float = 0.0

    def depart(self, left_s: float, arrives_s: float) -> None:
        """Learn when the last byte leaves and arrives."""
        self.left_s, self.arrives_s = left_s, arrives_s
        self.event.trigger()


class GradientExchange:
    """The reduction of all gradients of one iteration, and its part of the average over groups."""

    def __init__(
        self,
        kernel: Kernel,
        holders: Sequence[Holder],
        carrier: Callable[[str, str], Carrier],
        flow: int,
        local_steps: int = 1,
    ) -> None:
        self._kernel = kernel
        self._local_steps = local_steps
        self._carrier = carrier
        self._flow = flow
        self._barriers = {
            (h.pipeline.number, h.stage): Barrier(kernel.event(), kernel.event()) for h in holders
        }
        found = segments(holders)
        ends: dict[tuple[int, int], list[Event]] = {key: [] for key in self._barriers}
        for segment in found:
            end = kernel.start(self._reduce(segment))
            for holder in segment.holders:
                ends[holder.pipeline.number, holder.stage].append(end)
        for key, barrier in self._barriers.items():
            all_of(kernel, [*ends[key], barrier.ready]).then(barrier.done.trigger)

    def barrier(self, pipeline: int, stage: int) -> Barrier:
        """Return the barrier of a stage."""
        return self._barriers[pipeline, stage]

    def _reduce(self, segment: Segment) -> Steps:
        kernel = self._kernel
        within = [kernel.start(self._within(one)) for one in segment.groups]
        mine = [self._barriers[h.pipeline.number, h.stage] for h in segment.holders]
        order: list[Holder] = []
        for barrier, holder in zip(mine, segment.holders, strict=True):
            barrier.ready.then(lambda _, holder=holder: order.append(holder))  # type: ignore[misc]
        yield all_of(kernel, [barrier.ready for barrier in mine])
        last = order[-1]
        for barrier in mine:
            if barrier.cause is None or barrier.cause[0] < kernel.now:
                barrier.cause = (kernel.now, last.pipeline, last.stage)
        yield all_of(kernel, within)
        if len(within) > 1:
            share = 1 / self._local_steps
            yield from self._ring(segment, segment.num_bytes(averaged=True), share)
            yield kernel.now + share * segment.local_s(averaged=True)

    def _within(self, group: Segment) -> Steps:
        """Reduce the gradients of one group once all its stages are ready."""
        barriers = [self._barriers[h.pipeline.number, h.stage] for h in group.holders]
        yield all_of(self._kernel, [barrier.ready for barrier in barriers])
        local_s = group.local_s()
        yield self._kernel.now + local_s
        yield from self._ring(group, group.num_bytes())
        yield self._kernel.now + local_s

    def _ring(self, segment: Segment, num_bytes: float, share: float = 1.0) -> Steps:
        """Let `share` of a ring all-reduce of so many bytes run between the clusters."""
        clusters = segment.clusters
        if len(clusters) < 2:
            return
        kernel, names = self._kernel, list(clusters)
        steps, weight = 2 * (len(names) - 1), min(clusters.values())
        delay_s, shards = 0.0, []
        for source, target in zip(names, names[1:] + names[:1], strict=True):
            carrier = self._carrier(source, target)
            delay_s = max(delay_s, carrier.wire.delay_s)
            size = share * steps / len(names) * num_bytes / weight
            shards.append(_Shard(size, weight, self._flow, kernel.event()))
            carrier.carry(shards[-1])
        yield all_of(kernel, [shard.event for shard in shards])
        arrived_s = max(s.left_s + share * (s.arrives_s - s.left_s) for s in shards)
        yield arrived_s + share * (steps - 1) * delay_s
