"""Degrees and switches that a job fixes: kept by every plan, or refused with the reason."""

from __future__ import annotations

import pytest

from benchmarks._planning import TOY, job, pool
from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.plan import SearchLimits, SearchRequest, SearchResult, search_plans
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility
from tests.plan.hand import model_of

pytestmark = pytest.mark.integration

MIXTURE = profile_model(
    model_of(6, 1024, num_local_experts=8, num_experts_per_tok=2).model_copy(
        update={"architecture": "MixtralForCausalLM"}
    )
)
TWO_SITES = pool({"a": [("H20", 16)], "b": [("H20", 16)]}, 100, 1)


def ask(limits: SearchLimits | None = None, model: ModelProfile = TOY, **fields: object) -> SearchResult:
    """Plans of the toy model of six layers and sixteen heads on two clusters of sixteen chips."""
    asked = Job.model_validate(job(16).model_dump() | fields)
    question = SearchRequest(job=asked, model=model, pool=TWO_SITES, limits=limits or SearchLimits())
    return search_plans(question)


@pytest.mark.parametrize(
    "parallel",
    [{"tp": 2}, {"pp": 5}, {"dp": 3}, {"tp": 4, "pp": 6, "dp": 1}, {"tp": 1, "pp": 2, "dp": 4}, {"cp": 2}],
)
def test_every_plan_keeps_the_degrees(parallel: dict[str, int]) -> None:
    """A degree that the job fixes is that of every stage, of every pipeline, and of all replicas together."""
    plans = ask(parallel=parallel).plans
    assert plans
    for plan in plans:
        has = {"pp": len(plan.pipeline()), "dp": plan.dp}
        for stage in plan.stages:
            has |= {"tp": stage.tp, "cp": stage.cp, "ep": stage.ep}
            assert {name: has[name] for name in parallel} == parallel


def test_a_fixed_number_of_stages_is_found_over_several_roomy_clusters() -> None:
    """Every way to deal six stages to two clusters is tried, also where there is room for sixty."""
    used = {plan.clusters for plan in ask(parallel={"tp": 1, "pp": 6, "dp": 1}).plans}
    assert any(len(clusters) == 2 for clusters in used)


@pytest.mark.parametrize(
    ("parallel", "reason", "nearest"),
    [
        ({"pp": 7}, "parallel.pp 7: the model has 6 layers", "pp 6"),
        ({"tp": 3}, "parallel.tp 3 does not divide the 16 attention heads", "tp 2"),
        ({"ep": 2}, "parallel.ep 2 for a model without experts", "ep 1"),
        ({"dp": 17}, "parallel.dp 17: a step has 16 samples", "dp 16"),
    ],
)
def test_degrees_that_no_pool_could_keep_are_refused(parallel: dict[str, int], reason: str, nearest: str) -> None:
    """They would let the job wait without end; the nearest degree that a pool could keep is named."""
    with pytest.raises(PlanError, match=reason) as caught:
        ask(parallel=parallel)
    assert caught.value.hint == f"nearest valid: parallel.{nearest}; or remove it"


def test_what_the_runtime_does_not_run_is_refused() -> None:
    """Tokens that chips cannot share equally, with the reason."""
    with pytest.raises(PlanError, match=r"parallel.cp 3 does not divide the .* parallel.cp 2"):
        ask(SearchLimits(executable=True), parallel={"cp": 3})


def test_the_runtime_gets_plans_that_share_sequences() -> None:
    """A job to be run that fixes cp gets plans of that degree, which the runtime supports."""
    plans = ask(SearchLimits(executable=True), parallel={"cp": 2}).plans
    assert {stage.cp for plan in plans for stage in plan.stages} == {2}
    assert not [plan for plan in plans if runtime_incompatibility(plan)]


def test_the_runtime_gets_plans_that_share_experts() -> None:
    """A job to be run that fixes ep gets plans of that degree, inside a stage or over like replicas of a cluster."""
    executable = SearchLimits(executable=True)
    for parallel in ({"tp": 2, "ep": 2}, {"tp": 1, "pp": 2, "dp": 4, "ep": 4}):
        plans = ask(executable, MIXTURE, parallel=parallel).plans
        assert plans
        assert {stage.ep for plan in plans for stage in plan.stages} == {parallel["ep"]}
        assert not [plan for plan in plans if runtime_incompatibility(plan)]
    with pytest.raises(PlanError, match=r"ep 3 does not divide the 8 experts"):
        ask(executable, MIXTURE, parallel={"ep": 3})


def test_the_runtime_gets_plans_with_replicas() -> None:
    """Where chips are left over, a job to be run gets replicas of like pipelines; or the number it fixes."""
    executable = SearchLimits(executable=True)
    assert max(plan.dp for plan in ask(executable).plans) > 1
    fixed = ask(executable, parallel={"dp": 2}).plans
    assert {plan.dp for plan in fixed} == {2}
    for plan in fixed:
        assert runtime_incompatibility(plan) is None
        assert plan.pipeline(0)[0].layers == plan.pipeline(1)[0].layers


def test_degrees_that_this_pool_cannot_keep_are_named_in_the_refusals() -> None:
    """Sixteen chips in one stage need a node of sixteen."""
    answer = ask(parallel={"tp": 16})
    assert not answer.plans
    assert any("limits of the job: tp 16" in one.reason for one in answer.refused)


def test_without_overlap_no_schedule_overlaps() -> None:
    """Neither the search's own choice nor a limit brings in the overlapped schedule."""
    across = {"placement": {"max_chips": 32}, "overlap": False}
    plans = ask(**across).plans
    assert plans
    assert {plan.schedule for plan in plans} == {"1f1b"}
    assert not ask(SearchLimits(schedule="overlapped"), **across).plans
