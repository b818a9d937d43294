"""`Gradients`: what replicas at several clusters send each other in a step to add their gradients up.

As the runtime does it (`isthmus.train.update.reduce`): gradients are summed inside each cluster, and of a sum
that k clusters hold every two of them exchange 2 / k, each way.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from isthmus.control.placement.resources.free_resources import Ends
from isthmus.control.placement.resources.requirement import Range
from isthmus.core.link_physics import WIRE_OVERHEAD
from isthmus.plan import ModelProfile

GRADIENT_BYTES = 4
"""A gradient is added up in fp32, whatever the weights are."""

Span = tuple[int, int]
"""Decoder layers `[first, last)`."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The bytes of gradients by decoder layer, of the embedding, and of the head with its norm.

    They are sent once in `iteration_s`. A `tied` embedding is held by the last stages, too.
    """

    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    tied: bool
    iteration_s: float

    @classmethod
    def of(cls, profile: ModelProfile, iteration_s: float) -> Gradients:
        """Return those of a model whose iteration should take so long."""
        return cls(
            layer_bytes=tuple(layer.parameters * GRADIENT_BYTES for layer in profile.layers),
            embedding_bytes=profile.embedding.parameters * GRADIENT_BYTES,
            head_bytes=(profile.final_norm.parameters + profile.head.parameters) * GRADIENT_BYTES,
            tied=profile.tied_embeddings,
            iteration_s=iteration_s,
        )

    def crossing_bytes(self, held: Sequence[tuple[Span, str]]) -> dict[Ends, float]:
        """Return what crosses between every two clusters, given the layers and the cluster of each stage."""
        found: dict[Ends, float] = {}
        count = len(self.layer_bytes)
        for first, last in itertools.pairwise(sorted({end for span, _ in held for end in span})):
            here = {where for (a, b), where in held if a <= first and last <= b}
            _add(found, here, sum(self.layer_bytes[first:last]))
        starts = {where for (first, _), where in held if first == 0}
        ends = {where for (_, last), where in held if last == count}
        _add(found, starts | (ends if self.tied else set()), self.embedding_bytes)
        _add(found, ends, self.head_bytes)
        return found

    def gbps(self, held: Sequence[tuple[Span, str]]) -> dict[Ends, float]:
        """Return the mean rate of what crosses between every two clusters, headers counted."""
        if not self.iteration_s:
            return {}
        each = 8 * WIRE_OVERHEAD / 1e9 / self.iteration_s
        return {ends: num_bytes * each for ends, num_bytes in self.crossing_bytes(held).items()}


def held_by(spans: Sequence[Span], ranges: Iterable[Range]) -> list[tuple[Span, str]]:
    """Return the layers and the cluster of every stage of pipelines, given the layers of each stage."""
    return [(spans[stage], one.cluster) for one in ranges for stage in range(one.first, one.last)]


def _add(found: dict[Ends, float], clusters: Collection[str], num_bytes: int) -> None:
    if num_bytes:
        for ends in itertools.permutations(sorted(clusters), 2):
            found[ends] = found.get(ends, 0.0) + 2 / len(clusters) * num_bytes
