"""Rules of expert groups: which ranks share experts, and which degrees no group can have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan
from isthmus.core.runs.runnable.expert_groups import expert_groups


def plan_of(replicas: list[list[dict[str, Any]]], **changes: Any) -> Plan:
    """Return a plan of replicas, each a list of stages of two layers, with what differs from cluster a."""
    stages = [
        {"replica": replica, "cluster": "a", "node_group": "cpu", "layers": (2 * place, 2 * place + 2), **stage}
        for replica, of_replica in enumerate(replicas)
        for place, stage in enumerate(of_replica)
    ]
    fields = {"id": "p", "dp": len(replicas), "micro_batches": 2, "micro_batch_size": 1, "sequence_length": 8}
    return Plan.model_validate(fields | {"stages": stages} | changes)


def test_a_plan_without_ep_has_no_group() -> None:
    """Nor has virtual training, where a stage is one process for any degrees."""
    assert expert_groups(plan_of([[{"tp": 2}]])) == {}
    assert expert_groups(plan_of([[{"tp": 2, "ep": 2}]], compute="virtual")) == {}


def test_a_group_stays_inside_its_stage_where_it_can() -> None:
    """Four chips and ep 2: two groups in each stage, whatever the other replica is."""
    plan = plan_of([[{"tp": 2, "cp": 2, "ep": 2}], [{"cluster": "b"}]])
    assert expert_groups(plan) == {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def test_a_group_takes_the_ranks_of_like_replicas_of_its_cluster() -> None:
    """Stage by stage, across node groups and micro-batch sizes; replicas of another cluster are apart."""
    two = [{"ep": 2}, {"ep": 2}]
    far = [{"ep": 2, "cluster": "b"}, {"ep": 2, "cluster": "b"}]
    other = [{**stage, "node_group": "old"} for stage in two]
    plan = plan_of([two, other, far, far], replica_micro_batch_sizes=(1, 2, 1, 1), micro_batch_size=2)
    stage_of = [one.stage for one in plan.ranks]
    by_stage = {stage_of[rank]: [stage_of[one] for one in group] for rank, group in expert_groups(plan).items()}
    assert by_stage == {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3], 4: [4, 6], 6: [4, 6], 5: [5, 7], 7: [5, 7]}


@pytest.mark.parametrize(
    ("replicas", "changes", "reason"),
    [
        ([[{"ep": 4}], [{"ep": 4}]], {}, r"stage 0 has ep 4, which does not divide the 2 chips of cluster a"),
        ([[{"ep": 2}], [{"ep": 2, "cluster": "b"}]], {}, r"ep 2, which does not divide the 1 chips of cluster a"),
        ([[{"ep": 2}], [{"ep": 2}]], {"replica_micro_batches": (2, 1)}, r"does not divide the 1 chips"),
        ([[{"ep": 2}], [{"ep": 2, "recompute": "full"}]], {}, r"does not divide the 1 chips"),
        ([[{"tp": 2, "ep": 2}], [{"tp": 2}]], {}, r"stage 1 has tp 2 and ep 1, .* layer 0 by ep 2"),
    ],
)
def test_degrees_that_no_group_can_have_are_refused(
    replicas: list[list[dict[str, Any]]], changes: dict[str, Any], reason: str
) -> None:
    """Too few chips, chips of another cluster, unlike schedules or settings, and experts cut in two ways."""
    with pytest.raises(PlanError, match=reason) as caught:
        expert_groups(plan_of(replicas, **changes))
    assert caught.value.hint


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4, 8]))
def test_groups_part_the_ranks(dp: int, tp: int, cp: int, ep: int) -> None:
    """Each rank is in one group, of ep ranks that hold the same layers, or the plan is refused."""
    plan = plan_of([[{"tp": tp, "cp": cp, "ep": ep}, {"tp": tp, "cp": cp, "ep": ep}]] * dp)
    try:
        groups = expert_groups(plan)
    except PlanError:
        assert dp * tp * cp % ep
        return
    assert ep == 1 or sorted(groups) == list(range(len(plan.ranks)))
    for rank, group in groups.items():
        assert rank in group
        assert len(set(group)) == ep
        assert {plan.stage_of(one).layers for one in group} == {plan.stage_of(rank).layers}
