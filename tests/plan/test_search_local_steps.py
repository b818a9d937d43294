"""Rules of the search with local steps: offered only where asked for, within memory, never slower for it."""

import pytest
from hypothesis import given, settings

from isthmus.core.job import CheckpointConfig, DataConfig, Job, TrainingConfig
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility
from isthmus.plan.search.search_plans import SearchRequest, search_plans
from tests.plan.test_search_properties import PROFILE, check_plan, links, make_pool, sites

THIN = {"gbps": 0.5, "round_trip_ms": 100}
PAIR = [{"count": 2, "flops": 1e14, "memory_gb": 8.0, "price": 1.0}] * 2


def ask(pool, local_steps, limits=None, **more):
    """Plans for 16 samples a step."""
    training = {"steps": 1, "sequence_length": 1024, "global_batch_size": 16, "local_steps": local_steps}
    job = Job(
        name="j", model="m", data=DataConfig(paths=("x",)), training=TrainingConfig(**training),
        checkpoints=CheckpointConfig(folder="c"), output="o",
    )  # fmt: skip
    limits = limits or SearchLimits(max_micro_batch_size=2)
    return search_plans(SearchRequest(job=job, model=PROFILE, pool=pool, limits=limits, explain=False, **more))


def best_s(answer, local=False):
    times = [p.predicted.iteration_s for p in answer.plans if local or p.local_steps == 1]
    return min(times, default=float("inf"))


def test_a_thin_link_makes_averaging_pay_and_the_plan_says_what_it_costs():
    """Without local steps one site trains alone; with them both do, and `why` says what changes."""
    pool = make_pool(PAIR, **THIN)
    every, few = ask(pool, 1), ask(pool, 500)
    assert len(every.plans[0].clusters) == 1
    best = few.plans[0]
    assert (set(best.clusters), best.local_steps) == ({"a", "b"}, 500)
    assert best.predicted.iteration_s < 0.8 * best_s(every)
    assert "average their parameters every 500 steps" in best.why
    assert "changes the training result" in best.why
    assert any(plan.local_steps == 1 for plan in few.plans)  # the other kind stays a candidate


def test_limits_that_admit_one_chain_have_no_local_steps():
    """A fixed dp is that of one pipeline."""
    answer = ask(make_pool(PAIR, **THIN), 500, SearchLimits(dp=2))
    assert answer.plans
    assert all(plan.local_steps == 1 for plan in answer.plans)


def test_plans_with_local_steps_are_offered_to_the_runtime():
    """Restricted to what the runtime executes, the search finds them too, and the runtime says so of each plan."""
    answer = ask(make_pool(PAIR, **THIN), 500, SearchLimits(executable=True))
    assert {plan.local_steps for plan in answer.plans} == {1, 500}
    assert [runtime_incompatibility(plan) for plan in answer.plans] == [None] * len(answer.plans)


def test_planning_near_a_plan_with_local_steps_keeps_to_its_branch():
    """The branch of the old plan is searched again, as it was: with local steps."""
    pool = make_pool(PAIR, **THIN)
    whole = ask(pool, 500)
    again = ask(pool, 500, warm_start=whole.layouts[:1])
    assert again.plans[0] == whole.plans[0]
    assert {plan.local_steps for plan in again.plans} == {500}


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(sites, links)
def test_every_plan_fits_runs_and_changes_nothing_for_others(sites, links):
    """Memory with the outer optimizer, schedules, the bound; plans without local steps are as they were."""
    pool = make_pool(sites, **links)
    answer, plain = ask(pool, 64, num_plans=50), ask(pool, 1, num_plans=50)
    assert best_s(answer) == best_s(plain)
    assert best_s(answer, local=True) <= best_s(plain)
    for plan in answer.plans:
        assert plan.local_steps in (1, 64)
        assert plan.num_samples == 16
        check_plan(plan, pool, answer.bound_s)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(sites, links)
def test_more_bandwidth_or_local_steps_are_never_slower(sites, links):
    """Fourfold bandwidth, and eightfold steps between averages (1 % for the refinement)."""
    before = best_s(ask(make_pool(sites, **links), 16), local=True)
    wider = best_s(ask(make_pool(sites, **links | {"gbps": 4 * links["gbps"]}), 16), local=True)
    rarer = best_s(ask(make_pool(sites, **links), 128), local=True)
    assert max(wider, rarer) <= before * 1.01
