"""The search by a weighted sum of time, cost and energy: what it finds, against every layout of small pools."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.core.job import PlacementConstraints
from isthmus.core.pool import Pool
from isthmus.plan.search.compose.best_layouts import BestLayouts
from isthmus.plan.search.compose.plan_layout import PlacedPipeline, PlanLayout
from isthmus.plan.search.costs.plan_value import ObjectiveWeights, PlanValue
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import cluster_slots
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.explore.branch_and_bound import BranchAndBound
from isthmus.plan.search.explore.weighted_search import WeightedSearch
from isthmus.plan.search.finish.score_plan import calibration_for
from isthmus.plan.search.pipelines.replica_groups import replica_group_sets
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.search.splits.distribute_by_value import distribute_by_value
from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming
from tests.plan.test_search_properties import PROFILE, ask, make_pool

SAMPLES = 4

site = st.fixed_dictionaries(
    {
        "count": st.integers(1, 2),
        "flops": st.floats(2e13, 2e14),
        "memory_gb": st.just(8.0),
        "price": st.floats(0.1, 5),
        "power_w": st.floats(100, 900),
        "idle_share": st.floats(0, 1),
    }
)
sites = st.lists(site, min_size=1, max_size=2)
shares = st.floats(0, 1)


def pool_of(sites, gbps=20.0):
    """A pool whose chips differ in price, power and idle power; one of each kind, so that none are pooled."""
    changed = make_pool(sites, gbps=gbps, round_trip_ms=5).model_dump(by_alias=True)
    for chip, one in zip(changed["chips"], sites, strict=True):
        watts = {"power_w": one["power_w"], "idle_power_w": one["power_w"] * one["idle_share"]}
        chip.update(watts, idle_power_source="this test")
    return Pool.model_validate(changed)


def space_of(pool):
    """The space of a small job, with its slots."""
    task = TrainingWorkload(PROFILE, 1024, "bf16", calibration_for(pool))
    limits = SearchLimits(max_micro_batch_size=2)
    space = SearchSpace(task, Routes(pool, task.calibration), limits, minimise_cost=True)
    anywhere = PlacementConstraints()
    return space, [slot for one in pool.clusters for slot in cluster_slots(pool, one, anywhere, None)]


def distributions(replicas, total):
    """Every way to give `total` micro-batches to `replicas`, at least one each."""
    for cuts in itertools.combinations(range(1, total), replicas - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def every_layout(space, slots):
    """Every layout of the space: groups, sizes, schedules, pipelines, splits, and micro-batches of each replica."""
    layers = PROFILE.num_layers
    for groups in replica_group_sets(slots, space):
        ring_s = space.ring_s(groups)
        for size, schedule in itertools.product((1, 2), space.schedules(list(itertools.chain(*groups)))):
            total = SAMPLES // size
            options = [
                [
                    (shape, chain)
                    for one in space.enumerate_pipelines(group, size, total).all_pipelines()
                    for shape in one.make(schedule).variants
                    for cuts in itertools.combinations(range(1, layers), shape.num_stages - 1)
                    if (chain := shape.with_layers(tuple(itertools.pairwise((0, *cuts, layers))), total))
                ]
                for group in groups
            ]
            for chosen in itertools.product(*options):
                copies = [shape.dp for shape, _ in chosen]
                if schedule == "overlapped" and len({shape.num_stages for shape, _ in chosen}) > 1:
                    continue
                for counts in distributions(sum(copies), total) if sum(copies) <= total else ():
                    rest = iter(counts)
                    rows = [tuple(itertools.islice(rest, number)) for number in copies]
                    placed = (PlacedPipeline(*one, row) for one, row in zip(chosen, rows, strict=True))
                    yield PlanLayout(tuple(placed), size, schedule, ring_s)


@settings(max_examples=25, deadline=None)
@given(sites, shares, shares, shares)
def test_the_best_by_any_weights_equals_exhaustive_enumeration(sites, time, cost, energy):
    """No layout of a small space has a lesser weighted sum of time, cost and energy than the one found."""
    space, slots = space_of(pool_of(sites))
    search = BranchAndBound(space, SAMPLES, 1, BestLayouts(8))
    search.run(slots)
    fastest = search.best_layouts.best
    value = ObjectiveWeights(time_weight=time + 1e-3, cost_weight=cost, energy_weight=energy).value(
        fastest.estimate_s, fastest.price_per_s * fastest.estimate_s, fastest.energy_j
    )
    weighted = WeightedSearch.continue_from(search, value)
    weighted.run(slots)
    least = min(map(weighted.value_of, every_layout(space, slots)))
    assert not weighted.left_out
    assert weighted.value_of(weighted.best_layouts.best) <= least * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 2), st.integers(1, 2)), min_size=1, max_size=3),
    st.lists(st.floats(0, 3), min_size=3, max_size=3),
    st.integers(4, 8),
    st.floats(0, 3),
)
def test_micro_batches_are_distributed_with_the_least_value(rows, values, total, per_s):
    """Against every distribution: seconds of the last replica, and what each micro-batch draws."""
    timings = [ReplicaTiming(first_s, interval_s, copies) for first_s, interval_s, copies in rows]
    values = values[: len(timings)]
    found = distribute_by_value(timings, values, total, per_s)
    copies = sum(one.num_replicas for one in timings)
    if copies > total:
        assert found is None
        return
    owner = [place for place, one in enumerate(timings) for _ in range(one.num_replicas)]

    def worth(counts):
        end_s = max(timings[place].end_s(count) for place, count in zip(owner, counts, strict=True))
        return per_s * end_s + sum(values[place] * count for place, count in zip(owner, counts, strict=True))

    flat = tuple(itertools.chain(*found))
    assert sum(flat) == total
    assert min(flat) >= 1
    assert worth(flat) == pytest.approx(min(map(worth, distributions(copies, total))))


def test_the_search_by_energy_sees_plans_that_time_prunes():
    """A slow chip that draws little is the plan of least energy, a fast one that draws much the fastest."""
    fast = {"count": 2, "flops": 2e14, "memory_gb": 8.0, "price": 1.0, "power_w": 900.0, "idle_share": 0.5}
    slow = {"count": 1, "flops": 2e13, "memory_gb": 8.0, "price": 1.0, "power_w": 20.0, "idle_share": 0.1}
    pool = pool_of([fast, slow])
    by_time, by_energy = ask(pool), ask(pool, objective="energy")
    assert by_time.plans[0].clusters[0] == "a"
    assert by_energy.plans[0].clusters == ("b",)
    assert by_energy.scored[0].energy_j < by_time.scored[0].energy_j / 2
    half = ask(pool, weights=ObjectiveWeights(time_weight=1000, energy_weight=1))
    assert half.plans[0].predicted.iteration_s == by_time.plans[0].predicted.iteration_s


def test_energy_is_split_by_utilisation():
    """Known answers: with equal idle and busy power, power times time; without idle power, that of busy chips."""
    one = {"count": 2, "flops": 1e14, "memory_gb": 8.0, "price": 1.0, "power_w": 400.0}
    same = ask(pool_of([one | {"idle_share": 1.0}]), limits=SearchLimits(pp=2, max_micro_batch_size=1)).scored[0]
    none = ask(pool_of([one | {"idle_share": 0.0}]), limits=SearchLimits(pp=2, max_micro_batch_size=1)).scored[0]
    assert same.energy_j == pytest.approx(2 * 400 * same.time_s)
    assert none.energy_j == pytest.approx(400 * sum(stage.busy_s for stage in none.result.stages))
    assert none.energy_j < same.energy_j


@pytest.mark.parametrize("text", ["speed=1", "time", "time=x", "time=1,time=2", "cost=-1", "time=1e9"])
def test_weights_that_cannot_be_read_are_refused(text):
    """Each name once, each with a number."""
    with pytest.raises(InputError, match="weight"):
        ObjectiveWeights.parse(text)


def test_weights_need_prices():
    """A cost of nothing has no proportion."""
    with pytest.raises(InputError, match="price_per_chip_hour"):
        ObjectiveWeights.parse("time=1,cost=1").value(1.0, 0.0, 5.0)
    assert ObjectiveWeights.parse("energy=3").value(1.0, 0.0, 6.0) == PlanValue(per_j=0.5)
