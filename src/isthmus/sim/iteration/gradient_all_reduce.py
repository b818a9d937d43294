"""The gradient all-reduce at the end of an iteration, over replicas with possibly different layer splits.

A segment is a range of layers that lies within one stage of every replica. Its gradients are reduced by a
hierarchical all-reduce: reduce-scatter inside each cluster, ring all-reduce between the clusters over their
links, all-gather inside each cluster. Ring cost: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009.

Assumptions: segments that share a stage share its local links and end together; the ring visits the clusters
in order of first use; every member of a cluster has its own flow on the link.

A training with a named strategy (`SimulatedTraining.synchronisation`) runs the phases of its steps instead; inside one
cluster they have the closed form of `isthmus.sim.synchronisation`.

With local steps, gradients are reduced only among the replicas of one group. Every H steps the groups average
their parameters between clusters. A simulated iteration is the mean of H iterations: after the slowest group,
it includes 1/H of the bytes and time of one average (A. Douillard et al., "DiLoCo: distributed
low-communication training of language models", 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.sim.iteration.layer_segment import GradientHolder, LayerSegment, layer_segments
from isthmus.sim.iteration.strategy_reduction import segment_servers, strategy_time
from isthmus.sim.kernel import Event, Kernel, ProcessGenerator, all_of
from isthmus.sim.links.link_queue import LinkQueue
from isthmus.sim.links.simulated_link import SimulatedLink
from isthmus.sim.pipeline.pipeline_processes import Barrier, Pipeline
from isthmus.sim.synchronisation import step_loads


@dataclass
class _LinkTransfer:
    """The bytes that cross one link: `num_bytes` for each of `weight` members of a cluster."""

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
        pipelines: Sequence[Pipeline],
        holders: Sequence[GradientHolder],
        link_queue: Callable[[str, str], LinkQueue],
        flow: int,
        local_steps: int = 1,
        strategy: str | None = None,
    ) -> None:
        self._kernel = kernel
        self._pipelines = pipelines
        self._strategy = strategy
        self._local_steps = local_steps
        self._link_queue = link_queue
        self._flow = flow
        self._barriers = {(h.replica, h.stage): Barrier(kernel.event(), kernel.event()) for h in holders}
        found = layer_segments(holders)
        ends: dict[tuple[int, int], list[Event]] = {key: [] for key in self._barriers}
        for segment in found:
            end = kernel.start(self._reduce(segment))
            for holder in segment.holders:
                ends[holder.replica, holder.stage].append(end)
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
        barriers = [self._barriers[h.replica, h.stage] for h in segment.holders]
        order: list[GradientHolder] = []
        for barrier, holder in zip(barriers, segment.holders, strict=True):
            barrier.ready.add_callback(lambda _, holder=holder: order.append(holder))  # type: ignore[misc]
        yield all_of(kernel, [barrier.ready for barrier in barriers])
        last = order[-1]
        for barrier in barriers:
            if barrier.last_arrival is None or barrier.last_arrival[0] < kernel.now_s:
                barrier.last_arrival = (kernel.now_s, self._pipelines[last.replica], last.stage)
        # Step 3: wait for the groups, then average between them.
        yield all_of(kernel, reductions)
        if len(reductions) > 1:
            share = 1 / self._local_steps
            yield from self._ring_all_reduce(segment, segment.num_bytes(averaged=True), share)
            yield kernel.now_s + share * segment.local_s(averaged=True)

    def _reduce_in_group(self, group: LayerSegment) -> ProcessGenerator:
        """Reduce the gradients of one group after all its stages are ready."""
        barriers = [self._barriers[h.replica, h.stage] for h in group.holders]
        yield all_of(self._kernel, [barrier.ready for barrier in barriers])
        if self._strategy is not None and sum(group.members_by_cluster.values()) > 1:
            yield from self._reduce_by_strategy(group, self._strategy)
            return
        local_s = group.local_s()
        yield self._kernel.now_s + local_s
        yield from self._ring_all_reduce(group, group.num_bytes())
        yield self._kernel.now_s + local_s

    def _reduce_by_strategy(self, group: LayerSegment, strategy: str) -> ProcessGenerator:
        """Run the phases of `strategy`; what crosses between clusters shares their links with other messages."""
        kernel, names = self._kernel, list(group.members_by_cluster)
        if len(names) < 2:
            yield kernel.now_s + strategy_time(group, strategy, self._link_of).total_s
            return
        where = segment_servers(group, self._link_of).for_strategy(strategy)
        num_bytes, weight = group.num_bytes(), min(group.members_by_cluster.values())
        for stage in step_loads(strategy, where.num_servers, where.chips_per_server, where.num_aggregators):
            ring_s = num_bytes * dict(stage.loads).get("ring", 0.0) / where.ring_bytes_per_s
            end_s, sent = kernel.now_s + ring_s, []
            for source, target, load in stage.between_hosts:
                sent.append(_LinkTransfer(load * num_bytes / weight, weight, self._flow, kernel.event()))
                self._link_queue(names[source], names[target]).send(sent[-1])
            if sent:
                yield all_of(kernel, [one.event for one in sent])
                rounds_s = (stage.network_rounds - 1) * where.network_delay_s
                end_s = max(end_s, max(one.arrives_s for one in sent) + rounds_s)
            yield end_s

    def _link_of(self, source: str, target: str) -> SimulatedLink:
        return self._link_queue(source, target).link

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
            shards.append(_LinkTransfer(size, weight, self._flow, kernel.event()))
            queue.send(shards[-1])
        yield all_of(kernel, [shard.event for shard in shards])
        arrived_s = max(s.left_s + share * (s.arrives_s - s.left_s) for s in shards)
        yield arrived_s + share * (steps - 1) * delay_s
