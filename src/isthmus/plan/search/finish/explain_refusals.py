"""`explain_refusals`: why a combination of clusters has no plan, as text with figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from isthmus.core.job import PlacementConstraints
from isthmus.core.plan import Refusal
from isthmus.core.pool import Cluster
from isthmus.core.units import format_bytes
from isthmus.plan.search.costs.job_limits import describe_degrees
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.explore.branch_and_bound import BranchAndBound
from isthmus.plan.search.pipelines.pipeline_shape import PipelineShape

MAX_CLUSTERS = 4
"""Up to this many clusters, all combinations are explained; of more, single clusters, pairs and the whole
pool.
"""

MAX_EXPLAINED = 64
"""Upper limit on the combinations explained, those of the largest clusters first, so that an answer is bounded."""

MAX_PROBES = 24
"""Pipelines to try before a combination counts as refused, most memory first."""

MAX_CHOICES = 16
"""Upper limit on the choices of one slot per cluster that are probed for a combination."""

MAX_NAMES = 5
"""Upper limit on the clusters that one reason names."""


def explained_combinations(
    clusters: Sequence[Cluster], slots: Mapping[str, Sequence[ChipSlot]]
) -> list[tuple[Cluster, ...]]:
    """Return the combinations of clusters to explain, small ones first, at most `MAX_EXPLAINED`."""
    most = MAX_CLUSTERS if len(clusters) <= MAX_CLUSTERS else 2
    if len(clusters) > MAX_CLUSTERS:
        clusters = sorted(clusters, key=lambda one: (-sum(slot.chips for slot in slots[one.name]), one.name))
    found = itertools.chain.from_iterable(itertools.combinations(clusters, size) for size in range(1, most + 1))
    whole = [tuple(clusters)] if len(clusters) > most else []
    singles = list(itertools.islice(found, min(len(clusters), MAX_EXPLAINED // 2) if whole else None))
    if not whole:
        return singles
    pairs = itertools.islice(itertools.combinations(clusters, 2), MAX_EXPLAINED // 2 - 1)
    return [*singles, *pairs, *whole]


def explain_refusals(
    search: BranchAndBound,
    clusters: Sequence[Cluster],
    slots: Mapping[str, Sequence[ChipSlot]],
    placement: PlacementConstraints,
    total: int,
) -> tuple[Refusal, ...]:
    """Return a refusal for each combination without a plan; `total` micro-batches of the requested size."""
    planned = {one.clusters for one in search.best_layouts.layouts}
    found = []
    for chosen in explained_combinations(clusters, slots):
        names = tuple(cluster.name for cluster in chosen)
        if tuple(sorted(names)) in planned:
            continue
        reason = _refusal_reason(search, chosen, slots, placement, total)
        if reason:
            found.append(Refusal(clusters=names[:MAX_EXPLAINED], reason=reason))
    return tuple(found)


def _refusal_reason(
    search: BranchAndBound,
    chosen: Sequence[Cluster],
    slots: Mapping[str, Sequence[ChipSlot]],
    placement: PlacementConstraints,
    total: int,
) -> str:
    names = [cluster.name for cluster in chosen]
    space = search.space
    layers = space.workload.profile.num_layers
    here = [slot for name in names for slot in slots[name]]
    if len({cluster.owner for cluster in chosen}) > 1 and not placement.several_owners:
        return "the job does not allow several owners (placement.several_owners)"
    if space.needed_cluster is not None and space.needed_cluster not in names:
        return f"{space.needed_cluster}, which gets the model (output_site), takes no part"
    empty = [name for name in names if not slots[name]]
    if empty:
        rules = space.limits.framework
        also = f" and {rules.name} runs on ({' or '.join(sorted(rules.collective_libraries))})" if rules else ""
        return f"{_list_names(empty)} has no free chip that the job allows{also}"
    if len(names) > layers:
        return f"the model has {layers} layers, fewer than {len(names)} clusters"
    if placement.max_chips and placement.max_chips < len(names):
        most = placement.max_chips
        return f"at most {most} chips may be used, fewer than one for each of {len(names)} clusters"
    if not placement.mixed_chips and all(
        len({slot.group.chip for slot in one}) > 1 for one in itertools.product(*(slots[n] for n in names))
    ):
        return "the job does not allow mixed chips (placement.mixed_chips)"
    if not any(slot.reads_data for slot in here):
        return "none of its clusters may read the training data (placement.data_owners, data_regions)"
    return _missing_link_reason(search, names) or _infeasible_reason(search, here, total)


def _list_names(names: Sequence[str]) -> str:
    """Return names as text, the first `MAX_NAMES` of them."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _missing_link_reason(search: BranchAndBound, names: Sequence[str]) -> str:
    """Return which link is missing, if no order of the clusters is linked."""
    routes, first = search.space.routes, None
    for order in itertools.islice(itertools.permutations(names), 24):
        missing = [ends for a, b in itertools.pairwise(order) if (ends := routes.missing_link(a, b))]
        if not missing:
            return ""
        first = first or missing[0]
    return f"no link from {first[0]} to {first[1]}" if first else ""


def _infeasible_reason(search: BranchAndBound, slots: Sequence[ChipSlot], total: int) -> str:
    """Return why no pipeline over these slots is feasible; empty if one is, but others are faster."""
    space, shapes = search.space, list[PipelineShape]()
    for chosen in itertools.islice(itertools.product(*_by_cluster(slots)), MAX_CHOICES):
        some = space.pipeline_shapes(chosen, search.requested_size, "1f1b", total)
        for one in itertools.islice(some, MAX_PROBES):
            if _first_feasible(search, (one,), total):
                return ""
            shapes.append(one)
        shapes += itertools.islice(some, 19 * MAX_PROBES)
    if not shapes:
        degrees = describe_degrees(space.limits)
        return "no pipeline over them meets the limits of the job" + (degrees and f": {degrees}")
    shapes.sort(key=lambda one: -_memory_bytes(one))
    if _first_feasible(search, shapes[:MAX_PROBES], total):
        return ""
    narrow = next((one for one in shapes[:MAX_PROBES] if one.best_split(-(-total // one.dp))), None)
    return _link_reason(narrow) if narrow else _memory_reason(shapes[0])


def _first_feasible(search: BranchAndBound, shapes: Sequence[PipelineShape], total: int) -> PipelineShape | None:
    """Return the first shape with a split that fits in memory and, where it matters, keeps its chips busy."""
    for shape in shapes:
        chain = shape.best_split(-(-total // shape.dp))
        if chain is not None and (search.allow_link_bound or not chain.link_bound):
            return shape
    return None


def _by_cluster(slots: Sequence[ChipSlot]) -> list[list[ChipSlot]]:
    found: dict[str, list[ChipSlot]] = {}
    for slot in slots:
        found.setdefault(slot.cluster, []).append(slot)
    return list(found.values())


def _memory_bytes(shape: PipelineShape) -> float:
    """Return the memory in bytes of one replica's chips."""
    return sum(float(cost_table.chip.memory_bytes * cost_table.num_chips) for cost_table in shape.cost_tables)


def _memory_reason(shape: PipelineShape) -> str:
    layers, count = shape.workload.profile.num_layers, shape.num_stages
    needed = 0.0
    for stage, cost_table in enumerate(shape.cost_tables):
        part = (layers * stage // count, layers * (stage + 1) // count)
        in_flight = shape.max_in_flight(stage)
        needed += cost_table.num_chips * cost_table.stage_bytes(
            *part, in_flight, part[1] - part[0], shape.dp, shape.zero
        )
    usable = sum(one.memory_limit_bytes * one.num_chips for one in shape.cost_tables)
    whole = needed <= usable
    return (
        f"too little memory: with all layers recomputed the model needs about {format_bytes(needed)} on "
        f"{sum(one.num_chips for one in shape.cost_tables)} chips, which have {format_bytes(_memory_bytes(shape))}, "
        f"{usable / _memory_bytes(shape):.0%} of it usable"
        + ("; enough in total, but no split into whole layers fits every chip" if whole else "")
    )


def _link_reason(shape: PipelineShape) -> str:
    """Return which link cannot keep up with the chips at its ends."""
    interval_s = max(
        shape.workload.profile.num_layers / sum(1 / cost_table.mean_layer_s for cost_table in shape.cost_tables),
        1e-12,
    )
    demand_gbps = shape.dp * shape.message_bytes * 8 / 1e9 / interval_s
    worst = None
    for a, b in itertools.pairwise(shape.segments):
        for ends in ((a.slot.cluster, b.slot.cluster), (b.slot.cluster, a.slot.cluster)):
            route = shape.routes.route(*ends)
            if route is not None and (worst is None or route.bytes_per_s < worst[0]):
                worst = (route.bytes_per_s, ends)
    if worst is None:
        return "no link between them"
    return (
        f"the link {worst[1][0]} to {worst[1][1]} carries {worst[0] * 8 / 1e9:.3g} Gbit/s; "
        f"the pipeline needs {demand_gbps:.3g} Gbit/s to keep its chips busy"
    )
