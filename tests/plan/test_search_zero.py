"""The search proposes ZeRO 3 (FSDP) where nothing else fits, and only there; what it offers fits when simulated."""

from __future__ import annotations

import pytest

from benchmarks._planning import job, llama, pool
from isthmus.core.job import ParallelDegrees
from isthmus.core.pool import Pool
from isthmus.plan import SearchLimits, SearchRequest, SearchResult, predict, runtime_incompatibility, search_plans

LARGE = llama(64, 5120, 13824, 40, 40)
MIDDLE = llama(40, 5120, 13824, 40, 40)
SMALL = llama(16, 2048, 5632, 16, 16)
NODE = {"a": [("H100", 8)]}


def searched(model, stack: str = "isthmus", *, executable: bool = False, pp: int = 1) -> tuple[SearchResult, Pool]:
    """Search a node of eight chips for a job whose replicas are single chips, unless `pp` is more."""
    where = pool(NODE, 10.0, 20.0)
    asked = job(16).model_copy(update={"parallel": ParallelDegrees(tp=1, pp=pp), "stack": stack})
    request = SearchRequest(job=asked, model=model, pool=where, limits=SearchLimits(executable=executable))
    return search_plans(request), where


@pytest.mark.parametrize("stack", ["isthmus", "torchtitan", "deepspeed", "hf-fsdp", "megatron"])
def test_zero_3_is_proposed_where_weights_do_not_fit_one_chip(stack):
    """20 billion parameters take at least 4 bytes each whole, beside a share of the optimizer: 80 GB and more."""
    found, where = searched(LARGE, stack)
    assert found.plans
    for plan in found.plans:
        assert plan.zero == 3
        assert plan.dp > 1
        forecast = predict(plan, where, LARGE)
        limits = [cost.memory_limit_bytes for cost in forecast.stages]
        assert all(one.total_bytes <= most for one, most in zip(forecast.memory, limits, strict=True))
        assert forecast.iteration_s >= found.bound_s * (1 - 1e-6)


def test_what_fits_without_it_keeps_its_weights_whole():
    """Gathers in each pass buy nothing where memory suffices."""
    found, _ = searched(SMALL)
    assert {plan.zero for plan in found.plans} <= {0, 1}


def test_the_runtime_is_offered_what_it_can_run():
    """Replicas of one cluster that share weights, and work alike."""
    found, _ = searched(LARGE, executable=True)
    assert found.plans
    assert {plan.zero for plan in found.plans} == {3}
    assert not [plan for plan in found.plans if runtime_incompatibility(plan)]


def test_the_runtime_is_offered_gradients_in_shards_before_weights():
    """Where weights fit whole, and gradients beside them do not."""
    found, _ = searched(MIDDLE, executable=True)
    assert {plan.zero for plan in found.plans} == {2}
    assert not [plan for plan in found.plans if runtime_incompatibility(plan)]
