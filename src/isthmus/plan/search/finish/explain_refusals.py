"""`refusals`: why a combination of clusters has no plan, as text with figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from isthmus.core.job import Placement
from isthmus.core.plan import Refusal
from isthmus.core.pool import Cluster
from isthmus.core.units import format_bytes
from isthmus.plan.search.chains.chain_shape import Shape
from isthmus.plan.search.costs.fixed_degrees import degrees_in_words
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.stage_costs import MEMORY_FRACTION
from isthmus.plan.search.explore.branch_and_bound import Explorer

MAX_CLUSTERS = 4
"""Up to this many clusters, all combinations are explained; of more, single clusters, pairs and the whole
pool.
"""

PROBES = 24
"""Pipelines to try before a combination counts as refused, most memory first."""


def combinations(clusters: Sequence[Cluster]) -> list[tuple[Cluster, ...]]:
    """Return the combinations of clusters to explain, small ones first."""
    most = MAX_CLUSTERS if len(clusters) <= MAX_CLUSTERS else 2
    found = [one for size in range(1, most + 1) for one in itertools.combinations(clusters, size)]
    return found if len(clusters) <= most or len(clusters) == 0 else [*found, tuple(clusters)]


def refusals(
    explorer: Explorer,
    clusters: Sequence[Cluster],
    spots: Mapping[str, Sequence[Spot]],
    placement: Placement,
    total: int,
) -> tuple[Refusal, ...]:
    """Return a refusal for each combination without a plan; `total` micro-batches of the requested size."""
    planned = {one.clusters for one in explorer.found.layouts}
    found = []
    for chosen in combinations(clusters):
        names = tuple(cluster.name for cluster in chosen)
        if tuple(sorted(names)) in planned:
            continue
        reason = _reason(explorer, chosen, spots, placement, total)
        if reason:
            found.append(Refusal(clusters=names, reason=reason))
    return tuple(found)


def _reason(
    explorer: Explorer,
    chosen: Sequence[Cluster],
    spots: Mapping[str, Sequence[Spot]],
    placement: Placement,
    total: int,
) -> str:
    names = [cluster.name for cluster in chosen]
    space = explorer.space
    layers = space.task.profile.num_layers
    here = [slot for name in names for slot in spots[name]]
    if len({cluster.owner for cluster in chosen}) > 1 and not placement.several_owners:
        return "the job does not allow several owners (placement.several_owners)"
    empty = [name for name in names if not spots[name]]
    if empty:
        return f"{', '.join(empty)} has no free chip that the job allows"
    if len(names) > layers:
        return f"the model has {layers} layers, fewer than {len(names)} clusters"
    if placement.max_chips and placement.max_chips < len(names):
        most = placement.max_chips
        return f"at most {most} chips may be used, fewer than one for each of {len(names)} clusters"
    if not placement.mixed_chips and all(
        len({slot.group.chip for slot in one}) > 1 for one in itertools.product(*(spots[n] for n in names))
    ):
        return "the job does not allow mixed chips (placement.mixed_chips)"
    if not any(slot.reads_data for slot in here):
        return "none of its clusters may read the training data (placement.data_owners, data_regions)"
    return _unjoined(explorer, names) or _infeasible(explorer, here, total)


def _unjoined(explorer: Explorer, names: Sequence[str]) -> str:
    """Return which link is missing, if no order of the clusters is linked."""
    routes, first = explorer.space.ways, None
    for order in itertools.islice(itertools.permutations(names), 24):
        missing = [ends for a, b in itertools.pairwise(order) if (ends := routes.missing(a, b))]
        if not missing:
            return ""
        first = first or missing[0]
    return f"no link from {first[0]} to {first[1]}" if first else ""


def _infeasible(explorer: Explorer, spots: Sequence[Spot], total: int) -> str:
    """Return why no pipeline over these slots is feasible; empty if one is, but others are faster."""
    space, shapes = explorer.space, []
    for chosen in itertools.product(*_by_cluster(spots)):
        shapes += list(
            itertools.islice(space.shapes(chosen, explorer.asked_size, "1f1b", total), 20 * PROBES)
        )
    if not shapes:
        degrees = degrees_in_words(space.limits)
        return "no pipeline over them meets the limits of the job" + (degrees and f": {degrees}")
    shapes.sort(key=lambda one: -_memory(one))
    narrow = ""
    for shape in shapes[:PROBES]:
        chain = shape.cut(-(-total // shape.dp))
        if chain is None:
            continue
        if explorer.link_bound or not chain.link_bound:
            return ""
        narrow = narrow or _narrow(shape)
    return narrow or _too_little(shapes[0])


def _by_cluster(spots: Sequence[Spot]) -> list[list[Spot]]:
    found: dict[str, list[Spot]] = {}
    for slot in spots:
        found.setdefault(slot.cluster, []).append(slot)
    return list(found.values())


def _memory(shape: Shape) -> float:
    """Return the memory in bytes of one replica's chips."""
    return sum(float(cost_table.chip.memory_bytes * cost_table.num_chips) for cost_table in shape.seats)


def _too_little(shape: Shape) -> str:
    layers, count = shape.task.profile.num_layers, shape.num_stages
    needed = 0.0
    for stage, cost_table in enumerate(shape.seats):
        part = (layers * stage // count, layers * (stage + 1) // count)
        in_flight = shape.in_flight(stage)
        needed += cost_table.num_chips * cost_table.stage_bytes(
            *part, in_flight, part[1] - part[0], shape.dp, shape.zero
        )
    whole = needed <= MEMORY_FRACTION * _memory(shape)
    return (
        f"too little memory: with all layers recomputed the model needs about {format_bytes(needed)} on "
        f"{sum(one.num_chips for one in shape.seats)} chips, which have {format_bytes(_memory(shape))}, "
        f"{MEMORY_FRACTION:.0%} of it usable"
        + ("; enough in total, but no split into whole layers fits every chip" if whole else "")
    )


def _narrow(shape: Shape) -> str:
    """Return which link cannot keep up with the chips at its ends."""
    interval_s = max(
        shape.task.profile.num_layers / sum(1 / cost_table.least_layer_s for cost_table in shape.seats), 1e-12
    )
    demand_gbps = shape.dp * shape.message_bytes * 8 / 1e9 / interval_s
    worst = None
    for a, b in itertools.pairwise(shape.segments):
        for ends in ((a.spot.cluster, b.spot.cluster), (b.spot.cluster, a.spot.cluster)):
            route = shape.ways.way(*ends)
            if route is not None and (worst is None or route.bytes_per_s < worst[0]):
                worst = (route.bytes_per_s, ends)
    if worst is None:
        return "no link between them"
    return (
        f"the link {worst[1][0]} to {worst[1][1]} carries {worst[0] * 8 / 1e9:.3g} Gbit/s; "
        f"the pipeline needs {demand_gbps:.3g} Gbit/s to keep its chips busy"
    )
