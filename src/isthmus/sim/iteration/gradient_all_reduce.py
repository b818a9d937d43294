"""The gradient all-reduce at the end of an iteration, over replicas with possibly different layer splits.

A segment is a range of layers that lies within one stage of every replica. Its gradients are reduced by a
hierarchical all-reduce: reduce-scatter inside each cluster, ring all-reduce between the clusters over their
links, all-gather inside each cluster. Ring cost: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009.

Assumptions: segments that share a stage share its local links and end together; the ring visits the clusters
in order of first use; every member of a cluster has its own flow on the link.

With local steps, gradients are reduced only among the replicas of one group. Every H steps the groups average
their parameters between clusters. A simulated iteration is the mean of H iterations: after the slowest group,
it includes 1/H of the bytes and time of one average (A. Douillard et al., "DiLoCo: distributed
low-communication training of language models", 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from isthmus.sim.kernel import Event, Kernel, ProcessGenerator, all_of
from isthmus.sim.links.link_queue import LinkQueue
from isthmus.sim.pipeline.pipeline_processes import Barrier, Pipeline


@dataclass(frozen=True, kw_only=True)
class GradientHolder:
    """A stage as the holder of the gradients of layers `[first, last)`."""

    pipeline: Pipeline
    stage: int
    cluster: str
    layers: tuple[int, int]
    gradient_bytes: float
    local_bytes_per_s: float
    """Rate of a collective inside the cluster."""
    num_replicas: int
    """Number of equal replicas that it stands for."""
    averaged_bytes: float = 0.0
    """Bytes of the same layers that the groups average (local steps)."""
    group: int = 0
    """Number of its replica group (local steps)."""


@dataclass(frozen=True, kw_only=True)
class LayerSegment:
    """Layers `[first, last)` and their `holders`, one per replica or class of equal replicas."""

    layers: tuple[int, int]
    holders: tuple[GradientHolder, ...]

    @property
    def members_by_cluster(self) -> dict[str, int]:
        """Number of members per cluster, in order of first use."""
        counts: dict[str, int] = {}
        for holder in self.holders:
            counts[holder.cluster] = counts.get(holder.cluster, 0) + holder.num_replicas
        return counts

    @property
    def by_group(self) -> tuple[LayerSegment, ...]:
        """The segment of each group of replicas."""
        numbers = sorted({holder.group for holder in self.holders})
        return tuple(replace(self, holders=tuple(h for h in self.holders if h.group == n)) for n in numbers)

    def num_bytes(self, *, averaged: bool = False) -> float:
        """Return the bytes of gradients (or of averaged parameters) of the segment at its largest holder."""
        first, last = self.layers
        return max(_holder_bytes(h, averaged) * (last - first) / (h.layers[1] - h.layers[0]) for h in self.holders)

    def local_s(self, *, averaged: bool = False) -> float:
        """Return the time of the reduce-scatter (equally, the all-gather) in the slowest cluster."""
        slowest_s, clusters = 0.0, self.members_by_cluster
        for holder in self.holders:
            members = clusters[holder.cluster]
            share = (members - 1) / members
            slowest_s = max(slowest_s, share * _holder_bytes(holder, averaged) / holder.local_bytes_per_s)
        return slowest_s


def _holder_bytes(holder: GradientHolder, averaged: bool) -> float:
    return holder.averaged_bytes if averaged else holder.gradient_bytes


def layer_segments(holders: Sequence[GradientHolder]) -> tuple[LayerSegment, ...]:
    """Return the segments between the stage boundaries of all replicas, in order of layers."""
    cuts = sorted({end for holder in holders for end in holder.layers})
    result = []
    for first, last in itertools.pairwise(cuts):
        members = tuple(h for h in holders if h.layers[0] <= first and last <= h.layers[1])
        if sum(h.num_replicas for h in members) > 1:
            result.append(LayerSegment(layers=(first, last), holders=members))
    return tuple(result)


@dataclass
class _RingTransfer:
    """The bytes that cross one link of the ring: `num_bytes` for each of `weight` members of a cluster."""

    num_bytes: float
    weight: int
    flow: int
    event: Event
    left_s: float = 0.0
    arrives_s: float = 0.0

    def on_sent(self, left_s: float, arrives_s: float) -> None:
        """Set the times at which the last byte leaves and arrives."""
        self.left_s, self.arrives_s = left_s, arrives_s
        self.event.trigger()


class GradientAllReduce:
    """The all-reduce of one iteration's gradients, and its share of the average over groups."""

    def __init__(
        self,
        kernel: Kernel,
        holders: Sequence[GradientHolder],
        link_queue: Callable[[str, str], LinkQueue],
        flow: int,
        local_steps: int = 1,
    ) -> None:
        self._kernel = kernel
        self._local_steps = local_steps
        self._link_queue = link_queue
        self._flow = flow
        self._barriers = {(h.pipeline.index, h.stage): Barrier(kernel.event(), kernel.event()) for h in holders}
        found = layer_segments(holders)
        ends: dict[tuple[int, int], list[Event]] = {key: [] for key in self._barriers}
        for segment in found:
            end = kernel.start(self._reduce(segment))
            for holder in segment.holders:
                ends[holder.pipeline.index, holder.stage].append(end)
        for key, barrier in self._barriers.items():
            all_of(kernel, [*ends[key], barrier.ready]).add_callback(barrier.done.trigger)

    def barrier(self, pipeline: int, stage: int) -> Barrier:
        """Return the barrier of stage `stage` of pipeline `pipeline`."""
        return self._barriers[pipeline, stage]

    def _reduce(self, segment: LayerSegment) -> ProcessGenerator:
        kernel = self._kernel
        # Step 1: start the all-reduce of each group.
        reductions = [kernel.start(self._reduce_in_group(one)) for one in segment.by_group]
        # Step 2: note which holder's gradients are ready last, for the critical path.
        barriers = [self._barriers[h.pipeline.index, h.stage] for h in segment.holders]
        order: list[GradientHolder] = []
        for barrier, holder in zip(barriers, segment.holders, strict=True):
            barrier.ready.add_callback(lambda _, holder=holder: order.append(holder))  # type: ignore[misc]
        yield all_of(kernel, [barrier.ready for barrier in barriers])
        last = order[-1]
        for barrier in barriers:
            if barrier.last_arrival is None or barrier.last_arrival[0] < kernel.now_s:
                barrier.last_arrival = (kernel.now_s, last.pipeline, last.stage)
        # Step 3: wait for the groups, then average between them.
        yield all_of(kernel, reductions)
        if len(reductions) > 1:
            share = 1 / self._local_steps
            yield from self._ring_all_reduce(segment, segment.num_bytes(averaged=True), share)
            yield kernel.now_s + share * segment.local_s(averaged=True)

    def _reduce_in_group(self, group: LayerSegment) -> ProcessGenerator:
        """Reduce the gradients of one group after all its stages are ready."""
        barriers = [self._barriers[h.pipeline.index, h.stage] for h in group.holders]
        yield all_of(self._kernel, [barrier.ready for barrier in barriers])
        local_s = group.local_s()
        yield self._kernel.now_s + local_s
        yield from self._ring_all_reduce(group, group.num_bytes())
        yield self._kernel.now_s + local_s

    def _ring_all_reduce(self, segment: LayerSegment, num_bytes: float, share: float = 1.0) -> ProcessGenerator:
        """Run `share` of a ring all-reduce of `num_bytes` between the clusters."""
        clusters = segment.members_by_cluster
        if len(clusters) < 2:
            return
        kernel, names = self._kernel, list(clusters)
        steps, weight = 2 * (len(names) - 1), min(clusters.values())
        delay_s, shards = 0.0, []
        for source, target in zip(names, names[1:] + names[:1], strict=True):
            queue = self._link_queue(source, target)
            delay_s = max(delay_s, queue.link.delay_s)
            size = share * steps / len(names) * num_bytes / weight
            shards.append(_RingTransfer(size, weight, self._flow, kernel.event()))
            queue.send(shards[-1])
        yield all_of(kernel, [shard.event for shard in shards])
        arrived_s = max(s.left_s + share * (s.arrives_s - s.left_s) for s in shards)
        yield arrived_s + share * (steps - 1) * delay_s
