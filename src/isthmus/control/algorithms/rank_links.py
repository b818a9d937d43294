"""`rank_links`: the pairs of ranks of a plan that exchange messages, with the rates that the plan predicts.

"Topology-aware planning of rank numbers" (section 4.2.8 of the report on cross-domain pooling) hands such demands to
the network controller, there between addresses: see `RankTable`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.core.plan import Plan


@dataclass(frozen=True)
class RankLink:
    """Messages from rank `source` to rank `target`, at `gbps` on average; 0: inside a cluster, or not predicted."""

    source: int
    target: int
    gbps: float = 0.0


def rank_links(plan: Plan) -> tuple[RankLink, ...]:
    """Return the links of a plan, one per direction and pair, sorted.

    They join the first tensor-parallel ranks of neighbouring stages, the ranks of a stage, and ranks of different
    clusters that hold the same layers; and always the last rank of a cluster's segment with the first of the next one.
    """
    found: dict[tuple[int, int], float] = {}
    for pair, gbps in itertools.chain(_hops(plan), _gradients(plan), _groups(plan), _boundaries(plan)):
        found[pair] = found.get(pair, 0.0) + gbps
    return tuple(RankLink(source, target, gbps) for (source, target), gbps in sorted(found.items()))


def _hops(plan: Plan) -> Iterator[tuple[tuple[int, int], float]]:
    rates = iter(plan.predicted.wan_gbps if plan.predicted else ())
    for stages in _pipelines(plan).values():
        for one, other in itertools.pairwise(stages):
            crosses = plan.stages[one].cluster != plan.stages[other].cluster
            yield from _both_ways(plan, one, other, next(rates, 0.0) if crosses else 0.0)
        if (plan.num_chunks or 1) > 1 and len(stages) > 2:
            yield from _both_ways(plan, stages[-1], stages[0], 0.0)


def _both_ways(plan: Plan, one: int, other: int, gbps: float) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the pairs of first ranks that pass hidden states; the ranks that share a sequence pass their own tokens.

    Stages of unlike degrees pass tokens between all of these ranks.
    """
    ones, others = plan.cp_ranks_of(one), plan.cp_ranks_of(other)
    is_alike = len(ones) == len(others)
    pairs = list(zip(ones, others, strict=True)) if is_alike else list(itertools.product(ones, others))
    for first, second in pairs:
        yield (first, second), gbps / len(pairs)
        yield (second, first), gbps / len(pairs)


def _gradients(plan: Plan) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the pairs that reduce gradients between clusters; a rate is shared by the layers of all pairs of clusters.

    Of the ranks that hold a layer in two clusters, the one with the i-th lowest number pairs with the other's i-th.
    """
    holders: dict[int, dict[str, list[int]]] = {}
    for stage, one in enumerate(plan.stages):
        for layer in range(*one.layers):
            holders.setdefault(layer, {}).setdefault(one.cluster, []).extend(plan.ranks_of(stage))
    layers: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for of_layer in holders.values():
        for source, target in itertools.permutations(of_layer, 2):
            pairs = _pair_in_order(sorted(of_layer[source]), sorted(of_layer[target]))
            shares = layers.setdefault((source, target), {})
            for pair in pairs:
                shares[pair] = shares.get(pair, 0.0) + 1 / len(pairs)
    rates: Mapping[str, float] = plan.predicted.gradient_gbps if plan.predicted else {}
    for (source, target), shares in layers.items():
        rate, total = rates.get(f"{source}>{target}", 0.0), sum(shares.values())
        yield from ((pair, rate * share / total) for pair, share in shares.items())


def _pair_in_order(ones: list[int], others: list[int]) -> list[tuple[int, int]]:
    size = max(len(ones), len(others))
    return [(ones[at % len(ones)], others[at % len(others)]) for at in range(size)]


def _groups(plan: Plan) -> Iterator[tuple[tuple[int, int], float]]:
    for stage in range(len(plan.stages)):
        yield from ((pair, 0.0) for pair in itertools.permutations(plan.ranks_of(stage), 2))


def _boundaries(plan: Plan) -> Iterator[tuple[tuple[int, int], float]]:
    for last in range(len(plan.ranks) - 1):
        if plan.rank_clusters[last] != plan.rank_clusters[last + 1]:
            yield (last, last + 1), 0.0
            yield (last + 1, last), 0.0


def _pipelines(plan: Plan) -> dict[int, list[int]]:
    """Return the stage indices of each replica, in the order of `Plan.all_hops`."""
    found: dict[int, list[int]] = {replica: [] for replica in range(plan.dp)}
    for at, stage in enumerate(plan.stages):
        found[stage.replica].append(at)
    return found
