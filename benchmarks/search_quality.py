"""How good the planner's plans are: against every plan of small spaces, random plans, and even splits.

`python -m benchmarks.search_quality [--json] [--quick]`. All plans are compared by simulated time. Instances
are seeded random pools of unlike chips whose memory is hardly enough for the model; some have equal chips in
several clusters.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence

from benchmarks._planning import TOY, job, small_pool
from benchmarks.table import Row, print_rows
from isthmus.core.job import Job
from isthmus.core.pool import Pool
from isthmus.plan.search.compose.plan_layout import PlanLayout, make_layout
from isthmus.plan.search.costs.gradient_ring import gradient_ring_s
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import ChipSlot, cluster_slots
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.finish.score_plan import calibration_for, score_plan
from isthmus.plan.search.finish.write_plan import write_plan
from isthmus.plan.search.pipelines.pipeline_shape import PipelineShape, PipelineSplit
from isthmus.plan.search.pipelines.replica_groups import replica_group_sets
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.search.search_plans import SearchRequest, search_plans

SAMPLES = 6
LENGTH = 1024
MOST_LAYOUTS = 4000
LIMITS = SearchLimits(max_micro_batch_size=2)


def space_of(where: Pool) -> tuple[SearchSpace, Job]:
    """Return the space of an instance."""
    asked = job(SAMPLES, LENGTH)
    task = TrainingWorkload(TOY, LENGTH, "bf16", calibration_for(where))
    return SearchSpace(task, Routes(where, task.calibration), LIMITS), asked


def spots_in(where: Pool) -> list[ChipSlot]:
    """Return the node groups of an instance."""
    placement = job(SAMPLES).placement
    return [spot for cluster in where.clusters for spot in cluster_slots(where, cluster, placement, None)]


def splits(shape: PipelineShape, micro_batches: int) -> Iterator[PipelineSplit]:
    """Yield every split of a shape that fits."""
    layers, count = shape.workload.profile.num_layers, shape.num_stages
    for cuts in itertools.combinations(range(1, layers), count - 1):
        ends = list(itertools.pairwise((0, *cuts, layers)))
        chain = shape.with_layers(ends, micro_batches)
        if chain is not None:
            yield chain


def branches(
    space: SearchSpace, spots: Sequence[ChipSlot], samples: int
) -> Iterator[tuple[float, int, list[list[PipelineShape]]]]:
    """Yield (ring seconds, micro-batch size, shapes per replica group) of the whole space."""
    for islands in replica_group_sets(spots, space):
        ring = gradient_ring_s(space.workload, space.routes, islands, space.limits.zero)
        for schedule in space.schedules(list(itertools.chain(*islands))):
            for size in space.micro_batch_sizes(1, samples):
                total = samples // size
                shapes = [
                    [one for shape in space.pipeline_shapes(island, size, schedule, total) for one in shape.variants]
                    for island in islands
                ]
                if all(shapes) and ring < float("inf"):
                    yield ring, size, shapes


def layouts(space: SearchSpace, spots: Sequence[ChipSlot], samples: int) -> Iterator[PlanLayout]:
    """Yield every layout: every shape, every split, micro-batches dealt by speed."""
    for ring, size, shapes in branches(space, spots, samples):
        total = samples // size
        for chosen in itertools.product(*shapes):
            dp = sum(shape.dp for shape in chosen)
            if dp > total or len({s.num_stages for s in chosen if s.schedule == "overlapped"}) > 1:
                continue
            each = [list(splits(shape, -(-total // shape.dp))) for shape in chosen]
            for chains in itertools.product(*each):
                layout = make_layout(list(zip(chosen, chains, strict=True)), total, size, ring)
                if layout is not None:
                    yield layout


def seconds(layout: PlanLayout, asked: Job, where: Pool, task: TrainingWorkload) -> float:
    """Return the simulated iteration of a layout."""
    return score_plan(write_plan(layout, asked, task, executable=False), where, task).iteration_s


def chosen_s(where: Pool) -> tuple[float | None, bool, float]:
    """Return the planner's simulated time, whether it recomputes for lack of memory, and its bound."""
    question = SearchRequest(job=job(SAMPLES, LENGTH), model=TOY, pool=where, limits=LIMITS, explain=False)
    answer = search_plans(question)
    if not answer.plans or answer.plans[0].predicted is None:
        return None, False, answer.bound_s
    best = answer.plans[0]
    recomputes = any(stage.recompute != "none" for stage in best.stages)
    return best.predicted.iteration_s, recomputes, answer.bound_s


def first_fails(space: SearchSpace, where: Pool) -> bool:
    """Say whether the first leaf fails: all chips in one pipeline, split evenly, nothing recomputed."""
    shapes = [one[0] for _, size, one in branches(space, spots_in(where), SAMPLES) if len(one) == 1 and size == 1]
    largest = max(itertools.chain(*shapes), key=lambda one: one.num_chips, default=None)
    if largest is None:
        return True
    layers, count = TOY.num_layers, largest.num_stages
    ends = [(layers * i // count, layers * (i + 1) // count) for i in range(count)]
    cuts = largest.fit_stages(ends, -(-SAMPLES // largest.dp))
    return cuts is None or any(cut.recomputed for cut in cuts)


def even_s(space: SearchSpace, where: Pool, asked: Job) -> float:
    """Return the best time with layers split evenly over the stages of one pipeline."""
    best = float("inf")
    for ring, size, shapes in branches(space, spots_in(where), SAMPLES):
        if len(shapes) > 1:
            continue
        for shape in shapes[0]:
            layers, count = TOY.num_layers, shape.num_stages
            ends = [(layers * i // count, layers * (i + 1) // count) for i in range(count)]
            total = SAMPLES // size
            chain = shape.with_layers(ends, -(-total // shape.dp))
            layout = None if chain is None else make_layout([(shape, chain)], total, size, ring)
            if layout is not None:
                best = min(best, seconds(layout, asked, where, space.workload))
    return best


def with_like_chips(where: Pool) -> Pool:
    """Return a pool with the first cluster's chips in two or more clusters, each on a node of its own."""
    fields = where.model_dump(by_alias=True)
    for number, cluster in enumerate(fields["clusters"]):
        for group in cluster["node_groups"]:
            group |= {"nodes": group["chips_per_node"], "chips_per_node": 1}
            group["chip"] = "chip0" if number < 2 or group["nodes"] == 1 else group["chip"]
    return Pool.model_validate(fields)


def exhaustive_rows(instances: int, *, like_chips: bool = False) -> list[Row]:
    """Compare with every plan of the same space; `like_chips`: in several clusters, which may be pooled."""
    chance, gaps, tight, binding, missed, proven = random.Random(1), list[float](), 0, 0, 0, list[float]()
    while len(gaps) < instances:
        where = small_pool(chance, chips=3)
        if like_chips:
            if len(where.clusters) < 2:
                continue
            where = with_like_chips(where)
        space, asked = space_of(where)
        every = list(itertools.islice(layouts(space, spots_in(where), SAMPLES), MOST_LAYOUTS + 1))
        if not every or len(every) > MOST_LAYOUTS:
            continue
        best = min(seconds(one, asked, where, space.workload) for one in every)
        ours, recomputes, bound_s = chosen_s(where)
        proven.append((bound_s / best - 1) * 100)
        tight += first_fails(space, where)
        binding += recomputes
        missed += ours is None
        gaps.append(0.0 if ours is None else (ours / best - 1) * 100)
    exact = sum(gap <= 1e-6 for gap in gaps) / len(gaps) * 100
    kind = "small instances with like chips in several clusters" if like_chips else "small instances"
    what = f"{len(gaps)} {kind} (memory binds in {binding}, the first leaf fails in {tight})"
    return [
        Row(what=f"simulated time equal to that of exhaustive search: {what}", ours=exact, unit="%",
            target="at least 95", met=exact >= 95),
        Row(what=f"worst gap to exhaustive search, {kind}", ours=max(gaps), unit="%", target="at most 1",
            met=max(gaps) <= 1),
        Row(what=f"{kind} with a plan in which none was found", ours=float(missed), unit="", target="0",
            met=missed == 0),
        Row(what=f"proven bound over the optimum of {kind} (median {statistics.median(proven):.0f} %)",
            ours=max(proven), unit="%", target="never above 0", met=max(proven) <= 1e-6),
    ]  # fmt: skip


def random_layouts(space: SearchSpace, where: Pool, chance: random.Random, count: int) -> Sequence[PlanLayout]:
    """Return random feasible layouts: a random branch, shapes and splits."""
    every, found = list(branches(space, spots_in(where), SAMPLES)), []
    for _ in range(50 * count):
        if len(found) == count or not every:
            break
        ring, size, shapes = chance.choice(every)
        chosen, total = [chance.choice(options) for options in shapes], SAMPLES // size
        if sum(s.dp for s in chosen) > total or len({s.num_stages for s in chosen}) > 1:
            continue
        parts = []
        for shape in chosen:
            cuts = sorted(chance.sample(range(1, TOY.num_layers), shape.num_stages - 1))
            ends = list(itertools.pairwise((0, *cuts, TOY.num_layers)))
            parts.append(shape.with_layers(ends, -(-total // shape.dp)))
        if all(parts):
            layout = make_layout(list(zip(chosen, parts, strict=True)), total, size, ring)  # type: ignore[arg-type]
            found += [layout] if layout else []
    return found


def random_rows(pools: int, plans: int) -> list[Row]:
    """Compare with random feasible plans, and with even splits."""
    chance, worst, worst_even, compared = random.Random(2), 0.0, 0.0, 0
    while compared < pools:
        where = small_pool(chance, chips=4)
        space, asked = space_of(where)
        some = random_layouts(space, where, chance, plans)
        ours, _, _ = chosen_s(where)
        if not some or ours is None:
            continue
        compared += 1
        best = min(seconds(one, asked, where, space.workload) for one in some)
        worst = max(worst, (ours / best - 1) * 100)
        worst_even = max(worst_even, (ours / even_s(space, where, asked) - 1) * 100)
    return [
        Row(what=f"slower than the best of {plans} random feasible plans, worst of {pools} pools", ours=worst,
            unit="%", target="never", met=worst <= 1e-6),
        Row(what=f"slower than the best even split, worst of {pools} pools", ours=worst_even, unit="%",
            target="never", met=worst_even <= 1e-6),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="few instances")
    options = parser.parse_args()
    rows = exhaustive_rows(8 if options.quick else 1000)
    rows += exhaustive_rows(4 if options.quick else 300, like_chips=True)
    rows += random_rows(6, 50) if options.quick else random_rows(200, 200)
    print_rows(rows, options.json)


if __name__ == "__main__":
    main()
