"""Rules of plans whose schedule was searched: they keep its orders, and are never slower than with a named one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks._planning import TOY, job, pool
from isthmus.core.errors import PlanError
from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.plan import SearchLimits, SearchRequest, predict, search_plans, with_searched_schedule
from isthmus.plan.export.isthmus_runtime import to_isthmus_runtime
from isthmus.plan.export.megatron import to_megatron
from isthmus.plan.export.torchtitan import to_torchtitan
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility
from isthmus.schedule import SEARCHED, check_schedule, make_schedule
from tests.cli.fake_server import FakeServer, run
from tests.plan.hand import model_of, pool_of
from tests.plan.plans import staged

pytestmark = pytest.mark.integration

FAR = pool({"a": [("H20", 16)], "b": [("H20", 16)]}, 10, 60)


def ask(schedule: str) -> tuple[Plan, ...]:
    """Return the plans of one pipeline of four stages over two far sites, under a schedule."""
    limits = SearchLimits(executable=True, pp=4, dp=1, tp=1, schedule=schedule)
    return search_plans(SearchRequest(job=job(16), model=TOY, pool=FAR, limits=limits)).plans


def test_a_searched_plan_is_never_slower_and_keeps_its_orders() -> None:
    """Planned for two sites, against each schedule that the planner names; the file holds what the ranks execute."""
    found = ask(SEARCHED)
    assert found
    for plan in found:
        assert plan.schedule == SEARCHED
        assert runtime_incompatibility(plan) is None
        peaks = check_schedule(make_schedule(SEARCHED, 4, plan.micro_batches, orders=plan.orders_of(0)))
        assert max(peaks) <= plan.micro_batches
        assert Plan.model_validate_json(plan.model_dump_json()) == plan
    for name in ("1f1b", "overlapped", "zero_bubble"):
        for plan in ask(name):
            again = with_searched_schedule(plan, FAR, TOY)
            assert predict(again, FAR, TOY).iteration_s <= predict(plan, FAR, TOY).iteration_s * (1 + 1e-6), name


def test_the_same_plan_gets_the_same_orders() -> None:
    """The search has no chance in it, and searching a searched plan again changes nothing."""
    plan = staged((2, 1, 1, 2), micro_batches=8, sequence_length=4096)
    far = pool_of("H100", "H100", nodes=1)
    model = model_of(6)
    first = with_searched_schedule(plan, far, model)
    assert first == with_searched_schedule(plan, far, model)
    assert first.orders == with_searched_schedule(first, far, model).orders
    assert (
        predict(first, far, model).iteration_s
        == predict(plan.model_copy(update={"schedule": SEARCHED}), far, model).iteration_s
    )


def test_unlike_replicas_keep_orders_of_their_own() -> None:
    """Replicas with other numbers of micro-batches get other orders, equal ones share them."""
    plan = staged((3, 3), dp=3, replica_micro_batches=(8, 6, 8), micro_batches=8)
    made = with_searched_schedule(plan, pool_of("H100", "H100", nodes=3), model_of(6))
    assert [one.replicas for one in made.orders] == [(0, 2), (1,)]
    assert make_schedule(SEARCHED, 2, 6, orders=made.orders_of(1)).num_micro_batches == 6
    assert made.orders_of(0) == made.orders_of(2) != made.orders_of(1)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"schedule": "1f1b", "orders": [{"stages": ["F B", "F B"]}]}, "orders belong to schedule searched"),
        ({"orders": [{"stages": ["8F 8B"]}]}, "orders of 1 stages for replica 0, which has 2"),
        ({"orders": [{"stages": ["8F 8B"] * 2, "replicas": [1]}]}, "orders list the replicas"),
        ({"orders": [{"stages": ["8F 8B"] * 2}] * 2}, "orders list the replicas"),
        ({"orders": [{"stages": []}]}, "at least 1 item"),
    ],
)
def test_orders_that_fit_no_stage_are_refused(fields: dict[str, object], problem: str) -> None:
    """A plan's orders are those of its stages and replicas, and of schedule searched alone."""
    with pytest.raises(ValidationError, match=problem):
        staged((3, 3), **({"schedule": SEARCHED} | fields))  # type: ignore[arg-type]


def test_orders_of_other_micro_batches_are_refused() -> None:
    """A plan whose batch was edited does not run half an order."""
    plan = staged((3, 3), schedule=SEARCHED, micro_batches=6, orders=[{"stages": ["8F 8B", "8(F B)"]}])
    with pytest.raises(PlanError, match="8 F, 0 I, 0 W, 8 B for 6 micro-batches"):
        predict(plan, pool_of("H100", "H100", nodes=1), model_of(6))


def test_other_frameworks_refuse_it_by_name() -> None:
    """They choose among schedules of their own; the Isthmus runtime takes the orders."""
    plan = with_searched_schedule(staged((3, 3), zero=1), pool_of("H100", "H100", nodes=1), model_of(6))
    model: Model = model_of(6)
    for export in (to_megatron, to_torchtitan):
        with pytest.raises(PlanError, match="no schedule 'searched', which lists the order"):
            export(plan, model, pool_of("H100", "H100", nodes=1))
    assert "orders:" in to_isthmus_runtime(plan, model).text


def test_the_command_line_searches_saves_and_explains(tmp_path: Path) -> None:
    """`simulate --schedule searched --save` makes the plan that `explain` describes and the runtime can execute."""
    example = Path(__file__).parents[2] / "docs" / "guide" / "example"
    plan, pools, saved = example / "plan.yaml", example / "pool.yaml", tmp_path / "searched.json"
    usual = run(FakeServer(), "simulate", plan, "--pool", pools, "--json")
    words = ("simulate", plan, "--pool", pools, "--schedule", "searched", "--save", saved, "--json")
    made = run(FakeServer(), *words)
    assert (usual.status, made.status) == (0, 0), made.err
    assert json.loads(made.out)["iteration_s"] <= json.loads(usual.out)["iteration_s"]
    assert Plan.model_validate_json(saved.read_text()).orders
    told = run(FakeServer(), "explain", saved, "--pool", pools)
    assert "schedule was searched" in told.out.replace("\n", " ")
    lost = run(FakeServer(), "simulate", plan, "--pool", pools, "--save", saved)
    assert lost.status != 0
    assert "--save without --schedule" in lost.err
