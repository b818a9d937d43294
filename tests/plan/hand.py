"""Pools, models and plans written by hand, small and regular, for the tests of time and calibration."""

from isthmus.core.model import Model
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Pool


def pool_of(*chips: str, gbps: float = 10.0, round_trip_ms: float = 20.0, **group: object) -> Pool:
    """Return a cluster per chip, named a, b, ..., each joined to each."""
    names = "abcdefgh"[: len(chips)]
    groups = [{"name": "g", "chip": chip, "nodes": 8, "chips_per_node": 8} | group for chip in chips]
    return Pool.model_validate(
        {
            "clusters": [
                {"name": name, "owner": "o", "node_groups": [one]} for name, one in zip(names, groups, strict=True)
            ],
            "links": [
                {"between": [a, b], "bandwidth_gbps": gbps, "round_trip_ms": round_trip_ms}
                for i, a in enumerate(names)
                for b in names[i + 1 :]
            ],
        }
    )


def model_of(layers: int = 8, hidden: int = 2048, **config: object) -> Model:
    """Return a small Llama."""
    known = {
        "hidden_size": hidden,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "vocab_size": 32000,
    }
    return Model(
        path="here",
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=32000,
        config=known | config,
    )


def plan_of(layers: int = 8, clusters: str = "ab", dp: int = 1, **fields: object) -> Plan:
    """Return a plan of equal stages, one per cluster in turn; `fields` are the plan's or, known there, a
    stage's.
    """
    count = len(clusters)
    own = {key: fields.pop(key) for key in list(fields) if key in Stage.model_fields and key not in Plan.model_fields}
    stages = tuple(
        Stage(
            replica=replica,
            cluster=cluster,
            layers=(i * layers // count, (i + 1) * layers // count),
            **{"node_group": "g"} | own,
        )
        for replica in range(dp)
        for i, cluster in enumerate(clusters)
    )
    sizes = {"micro_batches": 8, "micro_batch_size": 1, "sequence_length": 2048}
    return Plan(id="by-hand", stages=stages, dp=dp, **(sizes | fields))
