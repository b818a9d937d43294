"""Rules of plans whose stages are shared by several chips of a node, for our own runtime."""

from __future__ import annotations

import pytest

from benchmarks._planning import TOY, job, pool
from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.core.plan import Plan
from isthmus.plan import SearchLimits, SearchRequest, search_plans
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility

pytestmark = pytest.mark.integration

SITES = pool({"a": [("H20", 16)], "b": [("H20", 16)]}, 100, 1)


def plans(tp: int, sequence_length: int = 4096) -> tuple[Plan, ...]:
    """Return the plans of a job that fixes `tp`, as the runtime is to run them."""
    asked = job(64, sequence_length)
    fixed = Job.model_validate(asked.model_dump() | {"parallel": {"tp": tp}})
    return search_plans(SearchRequest(job=fixed, model=TOY, pool=SITES, limits=SearchLimits(executable=True))).plans


def test_a_job_that_is_run_gets_the_degree_it_fixes() -> None:
    """Stages of four chips that share tensors and tokens; tokens that four do not divide stay whole."""
    for tokens, sp in ((4096, True), (4098, False)):
        found = plans(4, tokens)
        assert found
        for plan in found:
            assert {(stage.tp, stage.sp, stage.cp, stage.ep) for stage in plan.stages} == {(4, sp, 1, 1)}
            assert runtime_incompatibility(plan) is None
            assert len(plan.ranks) == 4 * len(plan.stages)


def test_heads_are_dealt_out_whole() -> None:
    """A degree that does not divide the key and value heads is refused for every pool."""
    with pytest.raises(PlanError, match="3 does not divide the 16"):
        plans(3)
