"""What a part of a plan asks of its site: units by tensor, context and expert parallelism."""

from __future__ import annotations

from isthmus.core.plan import Plan
from isthmus.site.topology.gang_request import gang_requests


def plan(dp: int = 1, **stage: object) -> Plan:
    """Return a plan of two stages at two clusters, in `dp` replicas."""
    stages = [
        {"replica": replica, "cluster": cluster, "node_group": "g", "layers": layers, **stage}
        for replica in range(dp)
        for cluster, layers in (("east", (0, 2)), ("west", (2, 4)))
    ]
    return Plan.model_validate(
        {"id": "p", "stages": stages, "dp": dp, "micro_batches": 1, "micro_batch_size": 1, "sequence_length": 8}
    )


def test_a_stage_is_a_unit_of_its_tensor_and_context_ranks() -> None:
    """Replicas and stages are units of their own; only those of the cluster count."""
    request = gang_requests(plan(dp=2, tp=2, cp=2), "west")["g"]
    assert [dict(unit.ranks) for unit in request.units] == [
        dict.fromkeys(range(8, 12), 1),
        dict.fromkeys(range(12, 16), 1),
    ]
    assert request.num_cards == 8


def test_replicas_that_share_experts_are_one_unit() -> None:
    """Experts over 4 chips of stages with 2 join two replicas each."""
    request = gang_requests(plan(dp=4, tp=2, ep=4), "east")["g"]
    assert [sorted(unit.ranks) for unit in request.units] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_virtual_stage_is_one_rank_with_all_its_cards() -> None:
    """Its process stands for the whole stage."""
    virtual = plan(tp=4).model_copy(update={"compute": "virtual"})
    assert [dict(unit.ranks) for unit in gang_requests(virtual, "east")["g"].units] == [{0: 4}]
