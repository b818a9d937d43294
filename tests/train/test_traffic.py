"""Rules of connections: many where tensors go, one elsewhere, and both of a pair agree."""

from __future__ import annotations

from isthmus.core.plan import Plan
from isthmus.train.communication.connection_counts import num_connections


def plan_of(replicas: int, stages: int) -> Plan:
    """Return a plan of `replicas` replicas of `stages` stages, each stage in a cluster of its own."""
    cuts = [(s, s + 1) for s in range(stages)]
    return Plan.model_validate(
        {
            "id": "p",
            "dp": replicas,
            "stages": [
                {"cluster": f"c{r}{s}", "node_group": "cpu", "layers": cut, "replica": r}
                for r in range(replicas)
                for s, cut in enumerate(cuts)
            ],
            "micro_batches": 2 * replicas,
            "replica_micro_batches": (2,) * replicas,
            "micro_batch_size": 1,
            "sequence_length": 8,
        }
    )


def test_lanes_are_where_tensors_go() -> None:
    """Neighbours in a pipeline, and its two ends, have all connections; the other pairs of a replica have one."""
    plan = plan_of(1, 5)
    table = [[num_connections(plan, a, b, 4) for b in range(5)] for a in range(5)]
    assert table[0] == [4, 4, 1, 1, 4]
    assert table[2] == [1, 4, 4, 4, 1]


def test_replicas_exchange_gradients() -> None:
    """Ranks of different replicas have all connections; what one of a pair counts, the other does."""
    plan = plan_of(2, 4)
    pairs = [(a, b) for a in range(8) for b in range(8)]
    assert all(num_connections(plan, a, b, 4) == num_connections(plan, b, a, 4) for a, b in pairs)
    assert all(num_connections(plan, a, b, 4) == 4 for a, b in pairs if a // 4 != b // 4)
    assert num_connections(plan, 4, 6, 4) == 1
