"""Rules of micro-batch sizes that differ by replica: dealt exactly, found where they gain, within memory."""

import itertools
import math
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._planning import TOY, job
from benchmarks.unlike_sizes import LENGTH, SAMPLES, compared, near_pool, space_of, unlike_layouts
from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.search.bound.prove_bound import Refutation
from isthmus.plan.search.bound.relaxations import Relaxations
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility
from isthmus.plan.search.finish.score_plan import score_plan
from isthmus.plan.search.finish.write_plan import write_plan
from isthmus.plan.search.search_plans import SearchRequest, search_plans
from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming
from isthmus.plan.search.splits.distribute_samples import SizedReplicas, distribute_samples
from isthmus.plan.time.predict import predict
from isthmus.schedule import check_schedule, make_schedule

kinds = st.lists(
    st.builds(
        SizedReplicas,
        st.builds(ReplicaTiming, st.floats(0.1, 5), st.floats(0.05, 2), st.integers(1, 2)),
        st.sampled_from((1, 2, 4)),
    ),
    min_size=1,
    max_size=3,
)


@settings(deadline=None)
@given(kinds, st.integers(1, 12))
def test_samples_are_dealt_so_that_the_last_replica_ends_earliest(kinds, samples):
    """Equations (3) and (4): all are dealt, each replica has some, and no other way ends earlier."""
    replicas = [one for one in kinds for _ in range(one.timing.num_replicas)]
    choices = [range(1, samples // one.micro_batch_size + 1) for one in replicas]
    ways = math.prod(map(len, choices))
    if ways > 20_000:
        return
    best = min(
        (
            max(one.timing.end_s(m) for one, m in zip(replicas, counts, strict=True))
            for counts in itertools.product(*choices)
            if sum(m * one.micro_batch_size for one, m in zip(replicas, counts, strict=True)) == samples
        ),
        default=math.inf,
    )
    found = distribute_samples(kinds, samples)
    if found is None:
        assert best == math.inf
        return
    each = [(one, m) for one, row in zip(kinds, found, strict=True) for m in row]
    assert sum(one.micro_batch_size * m for one, m in each) == samples
    assert min(m for _, m in each) >= 1
    assert max(one.timing.end_s(m) for one, m in each) == pytest.approx(best, rel=1e-6)


def test_the_slower_of_two_takes_half():
    """Figure 6 of the report: A half as fast as B, and a micro-batch of B is twice that of A."""
    slow, fast = SizedReplicas(ReplicaTiming(1.0, 1.0, 1), 4), SizedReplicas(ReplicaTiming(1.0, 1.0, 1), 8)
    assert distribute_samples([slow, fast], 24) == ((2,), (2,))


def chosen(pool, **limits):
    question = SearchRequest(
        job=job(SAMPLES, LENGTH),
        model=TOY,
        pool=pool,
        explain=False,
        limits=SearchLimits(**limits),
        num_plans=20,
    )
    return search_plans(question)


@cache
def gaining(count):
    """Pools in which the fastest plan has unlike sizes; most pools have none, so the search for them takes long."""
    chance, found = random.Random(5), []
    while len(found) < count:
        pool = near_pool(chance)
        answer = chosen(pool)
        if answer.plans and answer.plans[0].replica_micro_batch_sizes:
            found.append((pool, answer))
    return found


@pytest.mark.slow
def test_plans_of_unlike_sizes_fit_run_and_are_told():
    """Schedule, memory, samples, the simulator's own word, the bound; `why` names the sizes."""
    for pool, answer in gaining(3):
        plan = answer.plans[0]
        assert plan.num_samples == SAMPLES
        assert plan.micro_batch_size == max(plan.replica_micro_batch_sizes)
        assert predict(plan, pool, TOY).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-9)
        assert answer.bound_s * (1 - 1e-9) <= plan.predicted.iteration_s
        assert all(f"micro-batches of {size}" in plan.why for size in plan.replica_micro_batch_sizes)
        assert (runtime_incompatibility(plan) is None) == all(stage.cp == stage.ep == 1 for stage in plan.stages)
        for replica in range(plan.dp):
            check_replica(plan, pool, replica)
        near = SearchRequest(
            job=job(SAMPLES, LENGTH), model=TOY, pool=pool, explain=False, warm_start=answer.layouts[:1]
        )
        assert plan.id in {one.id for one in search_plans(near).plans}
        for limits in ({"equal_micro_batches": True}, {"micro_batch_size": 2}, {"executable": True}):
            assert not any(one.replica_micro_batch_sizes for one in chosen(pool, **limits).plans)


def check_replica(plan, pool, replica):
    """Check schedule and memory of a replica, by the models themselves."""
    stages = plan.pipeline(replica)
    alive = check_schedule(make_schedule(plan.schedule, len(stages), plan.micro_batches_of(replica)))
    for index, stage in enumerate(stages):
        memory = stage_memory(
            TOY, stage.layers, is_first=index == 0, is_last=index == len(stages) - 1,
            micro_batch_size=plan.micro_batch_size_of(replica), sequence_length=LENGTH,
            in_flight=alive[index], tp=stage.tp, dp=plan.dp, sp=stage.sp, zero=plan.zero,
            recompute=stage.recompute, recompute_layers=stage.recompute_layers,
        )  # fmt: skip
        group = pool.node_group(stage.cluster, stage.node_group)
        assert memory.total_bytes <= pool.chip(group).memory_bytes


@pytest.mark.slow
def test_the_search_finds_what_enumeration_finds(whole):
    """Every layout of 4 small spaces, or 12 with `--whole`, of one size and of unlike ones; the gap is at most 1 %."""
    chance, seen = random.Random(3), 0
    while seen < (12 if whole else 4):
        found = compared(near_pool(chance))
        if found is not None:
            alike, unlike, ours = found
            assert ours == pytest.approx(min(alike, unlike), rel=0.01)
            seen += 1


@pytest.mark.slow
def test_the_time_of_the_best_unlike_plan_is_never_refuted():
    """Every plan of unlike sizes is simulated; the proof behind the bound does not pass the fastest."""
    for pool, _ in gaining(3):
        space, spots = space_of(pool)
        best = sorted(unlike_layouts(space, spots), key=lambda one: one.estimate_s)[:40]
        best_s = min(
            score_plan(write_plan(one, job(SAMPLES, LENGTH), space.workload, executable=False), pool, space.workload)
            .iteration_s
            for one in best
        )  # fmt: skip
        sizes = [Relaxations(space, spots, size, SAMPLES // size) for size in space.micro_batch_sizes(1, SAMPLES)]
        limits = range(2, 5), spots, SAMPLES, best_s * (1 + 1e-7), 1 << 40
        assert not Refutation(sizes, *limits).holds()
