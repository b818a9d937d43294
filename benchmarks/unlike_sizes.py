"""Micro-batch sizes that differ by replica: how often they are best, by how much, and whether they are found.

`python -m benchmarks.unlike_sizes [--json] [--quick]`. Instances are seeded random pools of two or three unlike
groups in one cluster, and a small model: fast chips gain much from large micro-batches there, slow ones little.
Every layout of the space is scored, with one size for all and with one size per replica group, by the closed
form that the search uses for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import resource
from collections.abc import Iterator, Sequence

from benchmarks._planning import TOY, TOY_BYTES, job
from benchmarks.search_quality import layouts, splits
from benchmarks.table import Row, print_rows
from isthmus.core.pool import Pool
from isthmus.plan.search.compose.plan_layout import PlanLayout
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import ChipSlot, cluster_slots
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.explore.mixed_size_search import make_mixed_size_layout
from isthmus.plan.search.finish.score_plan import calibration_for
from isthmus.plan.search.pipelines.replica_groups import replica_group_sets
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.search.search_plans import SearchRequest, search_plans

SAMPLES, LENGTH, MOST_LAYOUTS = 16, 1024, 20_000


def near_pool(chance: random.Random) -> Pool:
    """Return a cluster of two or three groups of unlike chips, some a hundred times as fast as others."""
    count = chance.choice((2, 2, 3))
    sizes = [chance.randint(1, 2) if count == 2 else 1 for _ in range(count)]
    chips = [
        {
            "name": f"chip{i}",
            "peak_flop_per_s": {"bf16": 10 ** chance.uniform(13.3, 15)},
            "memory_bytes": round(TOY_BYTES * chance.uniform(0.9, 3)),
            "memory_bandwidth_bytes_per_s": chance.uniform(5e11, 3e12),
            "in_node_link": {"name": "link", "bandwidth_bytes_per_s": chance.uniform(1e11, 9e11)},
            "power_w": 400,
        }
        for i in range(count)
    ]
    groups = [{"name": f"g{i}", "chip": f"chip{i}", "nodes": 1, "chips_per_node": size} for i, size in enumerate(sizes)]
    return Pool.model_validate({"chips": chips, "clusters": [{"name": "a", "owner": "bench", "node_groups": groups}]})


def space_of(where: Pool) -> tuple[SearchSpace, list[ChipSlot]]:
    """Return the space of an instance, and its node groups."""
    task = TrainingWorkload(TOY, LENGTH, "bf16", calibration_for(where))
    space = SearchSpace(task, Routes(where, task.calibration), SearchLimits())
    return space, list(cluster_slots(where, where.clusters[0], job(SAMPLES).placement, None))


def unlike_layouts(space: SearchSpace, spots: Sequence[ChipSlot]) -> Iterator[PlanLayout]:
    """Yield every layout with sizes that differ: every shape and split of every size for each replica group."""
    for islands in replica_group_sets(spots, space):
        if len(islands) < 2:
            continue
        ring_s = space.ring_s(islands)
        options = [
            [
                (shape, chain)
                for size in space.micro_batch_sizes(1, SAMPLES)
                for shape in space.pipeline_shapes(island, size, "1f1b", SAMPLES // size)
                for chain in splits(shape, -(-SAMPLES // size // shape.dp))
            ]
            for island in islands
        ]
        for chosen in itertools.product(*options):
            layout = make_mixed_size_layout(chosen, SAMPLES, ring_s)
            if layout is not None:
                yield layout


def compared(where: Pool) -> tuple[float, float, float] | None:
    """Return the least seconds with one size for all, with unlike ones, and of the search; None: too many."""
    space, spots = space_of(where)
    alike, unlike = (
        [one.estimate_s for one in itertools.islice(some, MOST_LAYOUTS + 1)]
        for some in (layouts(space, spots, SAMPLES), unlike_layouts(space, spots))
    )
    if not alike or max(len(alike), len(unlike)) > MOST_LAYOUTS:
        return None
    question = SearchRequest(job=job(SAMPLES, LENGTH), model=TOY, pool=where, explain=False)
    return min(alike), min(unlike, default=math.inf), search_plans(question).estimate_s


def rows(instances: int) -> list[Row]:
    """Compare on `instances` instances."""
    chance, found = random.Random(2), []
    while len(found) < instances:
        one = compared(near_pool(chance))
        if one is not None:
            found.append(one)
    better = [alike / unlike for alike, unlike, _ in found if unlike < alike * (1 - 1e-9)]
    gaps = [(ours / min(alike, unlike) - 1) * 100 for alike, unlike, ours in found]
    exact = sum(gap <= 1e-3 for gap in gaps) / len(gaps) * 100
    cpu_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    what = f"{len(found)} instances in one cluster"
    return [
        Row(what=f"unlike sizes are best in, of {what}", ours=len(better) / len(found) * 100, unit="%"),
        Row(what="most that they gain over one size", ours=(max(better, default=1) - 1) * 100, unit="%"),
        Row(what="search equal to every layout of the space, closed form", ours=exact, unit="%",
            target="at least 95", met=exact >= 95),
        Row(what="worst gap of the search to that", ours=max(gaps), unit="%", target="at most 1",
            met=max(gaps) <= 1),
        Row(what="CPU time of all of this", ours=cpu_s, unit="s"),
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="30 instances instead of 300")
    given = parser.parse_args()
    print_rows(rows(30 if given.quick else 300), given.json)


if __name__ == "__main__":
    main()
