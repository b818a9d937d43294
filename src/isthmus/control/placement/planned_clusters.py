"""`planned_clusters`: the clusters that a request to the planner carries, at most `MAX_PLANNED_CLUSTERS`.

A search reads all clusters and links of its request and tries every cluster alone. Of more clusters, owners take turns,
each with the clusters on which a step takes least time, and no owner gets more places than all others together beyond
those that one plan can combine. So one owner's clusters neither displace those of others nor make their jobs' planning
longer. Times are estimates from peak speeds; the search ranks what is left exactly.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from isthmus.core.chip import Chip, chip_catalogue
from isthmus.core.job import Job
from isthmus.core.model import Model
from isthmus.core.pool import Cluster, Link

MAX_PLANNED_CLUSTERS = 64
"""Largest number of clusters of one request to the planner: the clusters that one owner may register."""

MAX_BESIDE_OTHERS = 24
"""Clusters of an owner for which the places of all others do not count: as many as a search combines."""

EFFICIENCY = 0.4
"""Share of the chips' peak speed that the estimate assumes."""


def planned_clusters(
    clusters: Sequence[Cluster],
    links: Iterable[Link],
    free_chips: Mapping[str, Mapping[str, int]],
    job: Job,
    model: Model,
    chips: Iterable[Chip] = (),
) -> tuple[Cluster, ...]:
    """Return the clusters to plan a job on, in the order given: all of few, of many those of owners in turns.

    `free_chips` is by cluster and node group; `chips` are defined beside the catalogue. Clusters without a free chip
    that the job allows come last, those that its placement excludes are left out. If only some may read the training
    data, these take the first turns, up to half of the places: no plan goes without one.
    """
    if len(clusters) <= MAX_PLANNED_CLUSTERS or job.engine == "command":
        return tuple(clusters)
    named = {**chip_catalogue(), **{chip.name: chip for chip in chips}}
    allowed = [one for one in clusters if job.placement.admits(one.name, one.owner, one.region)]
    rates = {one.name: _flop_per_s(one, free_chips.get(one.name, {}), job, named) for one in allowed}
    tokens = job.training.global_batch_size * job.training.sequence_length
    flops, message_bytes = 72.0 * model.num_layers * model.hidden_size**2 * tokens, 2.0 * model.hidden_size * tokens
    least_s = _least_seconds(rates, links, flops, message_bytes)
    readers = [one for one in allowed if job.placement.may_read_data(one.owner, one.region)]
    first = [] if len(readers) == len(allowed) else _ranked(readers, least_s)[: MAX_PLANNED_CLUSTERS // 2]
    ranked = dict.fromkeys(one.name for one in (*first, *_ranked(allowed, least_s)))
    kept = {*itertools.islice(ranked, MAX_PLANNED_CLUSTERS), job.output_site}
    return tuple(one for one in allowed if one.name in kept)


def _ranked(clusters: Iterable[Cluster], least_s: Mapping[str, float]) -> list[Cluster]:
    """Return `clusters` with free chips and then the others, owners of each taking turns with their fastest ones.

    Beside other owners, an owner has at most as many as all of them together, or `MAX_BESIDE_OTHERS` if that is more.
    """
    by_owner: dict[tuple[bool, str], list[Cluster]] = defaultdict(list)
    ordered = sorted(clusters, key=lambda one: (least_s[one.name], one.name))
    counts = Counter(one.owner for one in ordered)
    places = {owner: max(MAX_BESIDE_OTHERS, len(ordered) - count) for owner, count in counts.items()}
    for one in ordered:
        if places[one.owner] or len(counts) == 1:
            places[one.owner] -= 1
            by_owner[least_s[one.name] == math.inf, one.owner].append(one)
    usable, full = ([some for (none, _), some in by_owner.items() if none is one] for one in (False, True))
    return [*_in_turns(usable), *_in_turns(full)]


def _flop_per_s(cluster: Cluster, free: Mapping[str, int], job: Job, chips: Mapping[str, Chip]) -> float:
    """Return the rate of a cluster's free chips that the job allows."""
    return EFFICIENCY * sum(
        min(free.get(group.name, 0), group.num_chips) * chips[group.chip].flop_per_s("bf16")
        for group in cluster.node_groups
        if group.chip in chips and (not job.placement.chips or group.chip in job.placement.chips)
    )


def _least_seconds(
    rates: Mapping[str, float], links: Iterable[Link], flops: float, message_bytes: float
) -> dict[str, float]:
    """Return a step's seconds at each cluster: alone, or with the best neighbour and the messages between them."""
    least_s = {name: flops / rate if rate else math.inf for name, rate in rates.items()}
    gbps: dict[str, dict[str, float]] = {name: {} for name, rate in rates.items() if rate}
    for link in links:
        source, target = link.source, link.target
        if source in gbps and target in gbps:
            gbps[source][target] = link.bandwidth_gbps
    for a, by_target in gbps.items():
        for b, there in by_target.items():
            back = gbps[b].get(a) if a < b else None
            if back:
                message_s = message_bytes / (min(there, back) * 1e9 / 8)
                pair_s = max(flops / (rates[a] + rates[b]), message_s)
                least_s[a], least_s[b] = min(least_s[a], pair_s), min(least_s[b], pair_s)
    return least_s


def _in_turns(queues: Sequence[Sequence[Cluster]]) -> Iterator[Cluster]:
    """Yield the first of every queue, then the second of every queue, and on."""
    for turn in itertools.zip_longest(*queues):
        yield from (one for one in turn if one is not None)
