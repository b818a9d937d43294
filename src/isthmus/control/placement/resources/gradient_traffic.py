"""`GradientTraffic`: the traffic of the gradient all-reduce between replicas at different clusters.

As in the runtime (`isthmus.train.update.gradient_reducer`): gradients are summed inside each cluster; of a sum that k
clusters hold, each pair exchanges 2 / k in each direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from isthmus.control.placement.resources.free_resources import ClusterPair
from isthmus.control.placement.resources.pipeline_requirement import StageRange
from isthmus.core.link_throughput import WIRE_OVERHEAD
from isthmus.plan import ModelProfile

GRADIENT_BYTES = 4
"""Gradients are summed in fp32, independent of the precision of the weights."""

LayerSpan = tuple[int, int]
"""Decoder layers `[first, last)`."""


@dataclass(frozen=True, kw_only=True)
class GradientTraffic:
    """Gradient bytes of a model, sent once per `iteration_s`."""

    # By decoder layer.
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    # Head and final norm.
    head_bytes: int
    # The last stages hold the embedding too.
    tied: bool
    iteration_s: float

    @classmethod
    def from_profile(cls, profile: ModelProfile, iteration_s: float) -> GradientTraffic:
        """Return the traffic of a model whose iteration takes `iteration_s`."""
        return cls(
            layer_bytes=tuple(layer.parameters * GRADIENT_BYTES for layer in profile.layers),
            embedding_bytes=profile.embedding.parameters * GRADIENT_BYTES,
            head_bytes=(profile.final_norm.parameters + profile.head.parameters) * GRADIENT_BYTES,
            tied=profile.tied_embeddings,
            iteration_s=iteration_s,
        )

    def bytes_by_pair(self, locations: Sequence[tuple[LayerSpan, str]]) -> dict[ClusterPair, float]:
        """Return the bytes sent by directed pair of clusters, given (layers, cluster) of each stage."""
        found: dict[ClusterPair, float] = {}
        count = len(self.layer_bytes)
        for first, last in itertools.pairwise(sorted({end for span, _ in locations for end in span})):
            here = {where for (a, b), where in locations if a <= first and last <= b}
            _add_exchange(found, here, sum(self.layer_bytes[first:last]))
        starts = {where for (first, _), where in locations if first == 0}
        ends = {where for (_, last), where in locations if last == count}
        _add_exchange(found, starts | (ends if self.tied else set()), self.embedding_bytes)
        _add_exchange(found, ends, self.head_bytes)
        return found

    def gbps_by_pair(self, locations: Sequence[tuple[LayerSpan, str]]) -> dict[ClusterPair, float]:
        """Return the mean Gbit/s by directed pair of clusters, including headers."""
        if not self.iteration_s:
            return {}
        each = 8 * WIRE_OVERHEAD / 1e9 / self.iteration_s
        return {ends: num_bytes * each for ends, num_bytes in self.bytes_by_pair(locations).items()}


def stage_locations(spans: Sequence[LayerSpan], ranges: Iterable[StageRange]) -> list[tuple[LayerSpan, str]]:
    """Return (layers, cluster) of every stage of a pipeline, given the layers of each stage."""
    return [(spans[stage], one.cluster) for one in ranges for stage in range(one.first, one.last)]


def _add_exchange(found: dict[ClusterPair, float], clusters: Collection[str], num_bytes: int) -> None:
    if num_bytes:
        for ends in itertools.permutations(sorted(clusters), 2):
            found[ends] = found.get(ends, 0.0) + 2 / len(clusters) * num_bytes
