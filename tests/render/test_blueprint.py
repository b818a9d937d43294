"""A blueprint says what a plan's part has at a cluster, and over which wide-area path it reaches the others."""

from __future__ import annotations

import pytest

from isthmus.core.errors import InputError
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.render import make_blueprints
from tests.render.samples import make_job

PLAN = Plan.model_validate(
    {
        "id": "p1",
        "micro_batches": 4,
        "micro_batch_size": 1,
        "sequence_length": 128,
        "stages": [
            {"cluster": "a", "node_group": "h20", "layers": [0, 4], "tp": 2},
            {"cluster": "b", "node_group": "a800", "layers": [4, 8], "tp": 2},
        ],
    }
)


NICS = [{"name": "eth0", "addresses": ["10.0.0.1", "10.0.0.2"]}]


def make_pool(classes: tuple[str, str] = ("reserved", "reserved")) -> Pool:
    group = {"nodes": 2, "chips_per_node": 4, "cpus_per_node": 32, "memory_bytes_per_node": "64 GiB"}
    links = [
        {"from": "a", "to": "b", "bandwidth_gbps": 10, "delay_ms": 20, "class": classes[0]},
        {"from": "b", "to": "a", "bandwidth_gbps": 5, "delay_ms": 30, "class": classes[1]},
    ]
    return Pool.model_validate(
        {
            "clusters": [
                {"name": "a", "owner": "x", "node_groups": [{"chip": "H20", "driver": "550", "nics": NICS, **group}]},
                {"name": "b", "owner": "y", "node_groups": [{"chip": "A800", **group}]},
            ],
            "links": links,
        }
    )


def test_part_at_a_cluster() -> None:
    (made,) = make_blueprints(make_job(), "0123", PLAN, make_pool(), "a")
    assert (made.chip, made.driver, made.num_chips, made.world_size) == ("H20", "550", 1, 4)
    assert made.nics == ("eth0",)
    assert (made.cpus, made.memory_bytes) == (8.0, 16 << 30)
    assert len(made.ranks) == 2


def test_path_takes_the_slower_direction_and_the_whole_round_trip() -> None:
    (made,) = make_blueprints(make_job(), "0123", PLAN, make_pool(), "a")
    assert (made.path.kind, made.path.round_trip_s, made.path.bandwidth_gbps) == ("reserved", 0.05, 5.0)
    assert made.path.in_flight_bytes == 31_250_000


def test_one_link_without_reservation_makes_the_path_best_effort() -> None:
    (made,) = make_blueprints(make_job(), "0123", PLAN, make_pool(("reserved", "best-effort")), "b")
    assert made.path.kind == "best-effort"


def test_cluster_without_a_part() -> None:
    with pytest.raises(InputError, match="no part at cluster 'c'"):
        make_blueprints(make_job(), "0123", PLAN, make_pool(), "c")
