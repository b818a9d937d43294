"""CPU time to place planned pipelines in stages (compute, storage, network), 10,000 and 100,000 nodes.

`python -m benchmarks.placement [--json] [--quick] [--runs N] [--seed S]`. Twenty owners; nodes of four kinds
of chips, partly in use; links between half of all pairs of clusters; little free storage. Every request
differs: 1 to 32 stages on one or two kinds of chips, 0.1 % to 30 % of all cards, bandwidth, data; a third
have their own switches. Each request asks for three candidates with their reasons; without a candidate, the
answer says what every stage refused, and the time includes it. `whole` means that the search ended by itself:
its candidates are all that exist. The peer is the report's greedy algorithm, which never backtracks, with the
same filters after it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._greedy_placement import greedy_placement
from benchmarks.table import Row, compared, print_rows
from isthmus.control.placement import (
    FreeLink,
    FreeResources,
    PipelineRequirement,
    PlacementResult,
    StageRequirement,
    WanRequirement,
    place_pipelines,
)
from isthmus.control.placement.resources.free_resources import ClusterResources, FreeNodeGroup
from isthmus.core.job import PlacementConstraints

OWNERS = 20
CHIPS = ("H20", "A100", "910B", "BI-V150")
SIZES = ((10_000, 40, 25.0), (100_000, 100, 150.0))
"""Nodes, clusters, CPU milliseconds that 99 of 100 requests may take."""

TB = 10**12


def pool(nodes: int, clusters: int, chance: random.Random) -> FreeResources:
    """Return what is free: clusters of one or two kinds of chips, a third of the nodes in use."""
    found = FreeResources()
    for number in range(clusters):
        groups = {}
        kinds = chance.sample(CHIPS, chance.choice((1, 1, 2)))
        for kind in kinds:
            group = FreeNodeGroup(name=kind, chip=kind, devices_per_node=8, price_per_device_hour=chance.uniform(1, 5))
            for _ in range(nodes // clusters // len(kinds)):
                group.move_nodes(0, chance.choice((8, 8, 8, 8, 0, chance.randint(1, 7))))
            groups[kind] = group
        found.sites[f"c{number:03d}"] = ClusterResources(
            name=f"c{number:03d}", owner=f"owner{number % OWNERS:02d}", region=f"region{number % 6}",
            groups=groups, free_storage_bytes=int(chance.uniform(5, 500) * TB),
        )  # fmt: skip
    for one, other in itertools.combinations(found.sites, 2):
        if chance.random() < 0.5:
            link = FreeLink(
                free_gbps=chance.choice((0.4, 10, 40, 100, 400)), delay_s=chance.uniform(0.002, 0.04),
                jitter_s=chance.uniform(0, 0.002),
            )  # fmt: skip
            found.links[one, other] = found.links[other, one] = link
    return found


def requirement(nodes: int, chance: random.Random) -> PipelineRequirement:
    """Return a random job of 1 to 32 stages, of which some fit nowhere."""
    count = chance.choice((1, 2, 4, 6, 8, 12, 16, 24, 32))
    kinds = chance.sample(CHIPS, chance.choice((1, 1, 1, 2)))
    cut = chance.randint(1, count) if len(kinds) == 2 else count
    cards = chance.choice((1, 2, 4, 8, 8))
    stages = tuple(
        StageRequirement(
            chip=kinds[stage >= cut], num_devices=cards, devices_per_node=8,
            checkpoint_bytes=chance.randint(1, 400) * 10**9, model_bytes=10**10,
        )
        for stage in range(count)
    )  # fmt: skip
    share = chance.choice((0.001, 0.01, 0.03, 0.1, 0.3))
    pipelines = max(1, int(share * nodes * 8 / (count * cards)))
    wan = WanRequirement(
        gbps=chance.choice((0.1, 1, 5, 20, 80)), delay_s=chance.choice((0.01, 0.03, 0.1)), jitter_s=0.005
    )
    return PipelineRequirement(
        stages=stages, num_pipelines=pipelines, boundaries=(wan,) * (count - 1),
        data_bytes=chance.randint(0, 20) * TB,
    )  # fmt: skip


def switches(chance: random.Random) -> PlacementConstraints:
    """Return a job's switches: two of three jobs leave them as they are."""
    fields: dict[str, object] = {
        "several_owners": False, "network": False, "mixed_chips": False, "regions": ("region1", "region2"),
        "data_owners": ("owner03", "owner04"), "owners": tuple(f"owner{n:02d}" for n in range(8)),
    }  # fmt: skip
    chosen = chance.sample(sorted(fields), chance.choice((0, 0, 0, 0, 1, 2)))
    return PlacementConstraints.model_validate({name: fields[name] for name in chosen})


@dataclass(frozen=True)
class Sample:
    """One request: its times and its result."""

    cpu_ms: float
    wall_ms: float
    found: PlacementResult
    greedy: bool


def measure(nodes: int, clusters: int, runs: int, seed: int) -> list[Sample]:
    """Return `runs` random requests on one pool, each timed alone."""
    chance = random.Random(seed)
    free = pool(nodes, clusters, chance)
    found = []
    for _ in range(runs):
        asked, wanted = requirement(nodes, chance), switches(chance)
        gc.collect(0)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        answer = place_pipelines(asked, free, wanted, keep=3)
        cpu_ms, wall_ms = 1e3 * (time.process_time() - cpu_s), 1e3 * (time.perf_counter() - wall_s)
        greedy = greedy_placement(asked, free, wanted) is not None
        found.append(Sample(cpu_ms, wall_ms, answer, greedy))
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def rows(samples: Sequence[Sample], nodes: int, allowed_ms: float) -> list[Row]:
    """Return the distribution of CPU time, and what the requests came to."""
    size, cpu = f"{nodes:,} nodes, {OWNERS} owners", [one.cpu_ms for one in samples]
    three = [one.cpu_ms for one in samples if len(one.found.candidates) >= 3]
    none = [one.cpu_ms for one in samples if not one.found.candidates]
    found = [
        Row(what=f"{size}: p99 of {len(samples):,} random requests", ours=quantile(cpu, 0.99), unit="CPU ms",
            target=f"at most {allowed_ms:g}", met=quantile(cpu, 0.99) <= allowed_ms),
        Row(what=f"{size}: p50", ours=quantile(cpu, 0.5), unit="CPU ms"),
        Row(what=f"{size}: p90", ours=quantile(cpu, 0.9), unit="CPU ms"),
        Row(what=f"{size}: the longest", ours=max(cpu), unit="CPU ms"),
        Row(what=f"{size}: p99, wall time", ours=quantile([one.wall_ms for one in samples], 0.99), unit="ms"),
    ]  # fmt: skip
    for what, some in (("three candidates", three), ("none, with the reasons", none)):
        if some:
            found.append(
                Row(what=f"{size}: p99 of the {len(some) / len(samples):.0%} that find {what}",
                    ours=quantile(some, 0.99), unit="CPU ms")
            )  # fmt: skip
    crossed = statistics.fmean(any(c.wan_crossings for c in one.found.candidates) for one in samples)
    whole = statistics.fmean(one.found.exhaustive for one in samples)
    placed = statistics.fmean(bool(one.found.candidates) for one in samples)
    greedy = statistics.fmean(one.greedy for one in samples)
    return [
        *found,
        compared(f"{size}: requests that are placed", 100 * placed, "%", "the report's greedy", 100 * greedy),
        Row(what=f"{size}: requests with a candidate that crosses the WAN", ours=100 * crossed, unit="%"),
        Row(what=f"{size}: searches that ended by themselves (`whole`)", ours=100 * whole, unit="%"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--runs", type=int, default=2000, help="requests on each pool")
    parser.add_argument("--seed", type=int, default=0, help="of pools and requests")
    options = parser.parse_args()
    runs = options.runs // (10 if options.quick else 1)
    found = []
    for nodes, clusters, allowed_ms in SIZES:
        found += rows(measure(nodes, clusters, runs, options.seed), nodes, allowed_ms)
    print_rows(found, options.json)


if __name__ == "__main__":
    main()
