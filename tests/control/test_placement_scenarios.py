"""Tasks 1 to 3, 6, 7 and 11 of the report's evaluation (cross-domain pooling, 5.2): what is offered, and not.

Three owners with one cluster of H20 nodes each, 2,000 km of fibre apart; Mixtral 8x7B of 70 layers on three
nodes of eight chips, TP=4, PP=6. No cluster has three nodes free; two together have.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import pytest

from isthmus.control.placement import PlanRequest
from isthmus.control.placement.propose_plans import propose_plans
from isthmus.core.job import CheckpointConfig, DataConfig, Job, ParallelDegrees, PlacementConstraints, TrainingConfig
from isthmus.core.model import Model, load_model
from isthmus.core.plan import PlanSet
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool

CONFIG = Path(__file__).parent.parent / "plan" / "configs" / "mixtral-8x7b.json"
CLUSTERS = ("cluster1", "cluster2", "cluster3")
FREE = {"cluster1": {"h20": 16}, "cluster2": {"h20": 8}, "cluster3": {"h20": 8}}


@cache
def mixtral() -> Model:
    """The published model with the report's 70 layers."""
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": 70}
    known = load_model(CONFIG)
    return known.model_copy(update={"num_layers": 70, "config": config})


def pool(slow_gbps: float = 10.0, storage: str = "10 TB") -> Pool:
    """The three clusters; the link between 1 and 2 is as slow as is said."""
    group = {"name": "h20", "chip": "H20", "nodes": 3, "chips_per_node": 8}
    clusters = tuple(
        Cluster(
            name=name,
            owner=f"owner{i}",
            storage_bytes=storage,
            node_groups=(NodeGroup.model_validate(group),),
        )
        for i, name in enumerate(CLUSTERS, start=1)
    )
    links = tuple(
        Link(source=a, target=b, bandwidth_gbps=slow_gbps if {a, b} == set(CLUSTERS[:2]) else 10, delay_ms=10)
        for a, b in itertools.permutations(CLUSTERS, 2)
    )
    return Pool(clusters=clusters, links=links)


def answer(
    where: Pool,
    free: dict[str, dict[str, int]] = FREE,
    left: dict[str, float] | None = None,
    tp: int = 4,
    overlap: bool = False,
    **placement: object,
) -> PlanSet:
    """What the planner answers to the job on 24 chips, or 32 with `tp` 8; `left` of links by `FROM>TO`."""
    switches = {"several_owners": False, "network": False, "mixed_chips": False} | placement
    job = Job(
        name="task", model="m", data=DataConfig(paths=("d",), max_bytes=10**12), output="o", overlap=overlap,
        training=TrainingConfig(steps=1, sequence_length=16384, micro_batch_size=2, global_batch_size=30),
        checkpoints=CheckpointConfig(folder="c"), placement=PlacementConstraints.model_validate(switches),
        parallel=ParallelDegrees(tp=tp, pp=24 // tp + tp // 8, dp=1, cp=1, ep=1),
    )  # fmt: skip
    asked = PlanRequest(job=job, model=mixtral(), pool=where, free_chips=free, free_gbps=left or {}, executable=False)
    return propose_plans(asked)


def combinations(found: PlanSet) -> set[frozenset[str]]:
    """Which clusters are offered together."""
    return {frozenset(plan.clusters) for plan in found.plans}


@pytest.mark.slow
def test_task_1_one_cluster_with_room_is_enough() -> None:
    """Three nodes of eight chips free at cluster 1: the job runs there, owners not mixed."""
    found = answer(pool(), FREE | {"cluster1": {"h20": 24}})
    assert combinations(found) == {frozenset({"cluster1"})}


def test_task_2_owners_may_not_mix_and_no_cluster_is_large_enough() -> None:
    """The job waits; its reason says that several owners are not allowed, and how many nodes each cluster lacks."""
    found = answer(pool())
    assert found.plans == ()
    whole, *each = [one for one in found.refused if one.stage == "compute"]
    assert "no single owner has enough nodes" in whole.reason
    assert [(one.clusters, one.owner, one.lacking_nodes) for one in each] == [
        (("cluster1",), "owner1", 1),
        (("cluster2",), "owner2", 2),
        (("cluster3",), "owner3", 2),
    ]
    assert each[0].reason == "compute: cluster1 (owner1) lacks 1 node with 8 free H20"


@pytest.mark.slow
def test_task_3_allowed_to_mix_it_is_offered_several_explained_plans() -> None:
    """Two nodes at cluster 1 and one at another hold four and two stages; each plan says why."""
    found = answer(pool(), several_owners=True)
    assert len(found.plans) >= 3
    assert all(plan.why and plan.predicted for plan in found.plans)
    stored = [sum(plan.predicted.storage_bytes) for plan in found.plans if plan.predicted]
    whole = 101e9 * (14 * 3 + 2)
    assert all(whole < one < 1.02 * whole + 2e12 for one in stored), "checkpoints, model files, data at the ends"
    assert {frozenset(CLUSTERS[:2]), frozenset(CLUSTERS[::2])} <= combinations(found)


@pytest.mark.slow
def test_task_6_without_the_network_a_slow_pair_is_offered() -> None:
    """At 400 Mbit/s clusters 1 and 2 are still offered, and predicted to be slow."""
    found = answer(pool(0.4), several_owners=True)
    slow = [plan for plan in found.plans if set(plan.clusters) == set(CLUSTERS[:2])]
    assert slow
    assert slow[0].predicted is not None
    assert found.plans[0].predicted is not None
    assert slow[0].predicted.iteration_s > 2 * found.plans[0].predicted.iteration_s


def test_task_7_with_the_network_it_never_is() -> None:
    """No plan has neighbouring stages at clusters 1 and 2; the network stage says which link lacks what."""
    found = answer(pool(0.4), several_owners=True, network=True)
    assert len(found.plans) >= 3
    slow = {CLUSTERS[:2], CLUSTERS[1::-1]}
    assert not any(slow & set(plan.hops()) for plan in found.plans)
    refused = [one for one in found.refused if one.stage == "network"]
    assert {frozenset(one.clusters) for one in refused} == {frozenset(CLUSTERS[:2])}
    assert all(0.1 < one.lacking_gbps < 0.2 and "0.4 Gbit/s is left" in one.reason for one in refused)


@pytest.mark.slow
def test_what_others_have_left_of_a_link_counts_and_not_what_it_could_carry() -> None:
    """A link of 10 Gbit/s of which other jobs left 0.4 is as slow as one of 0.4."""
    left = dict.fromkeys(("cluster1>cluster2", "cluster2>cluster1"), 0.4)
    found = answer(pool(), left=left, several_owners=True, network=True)
    assert found.plans
    assert not any({CLUSTERS[:2], CLUSTERS[1::-1]} & set(plan.hops()) for plan in found.plans)


def test_a_cluster_without_storage_for_its_stages_is_refused_by_the_storage_stage() -> None:
    """A terabyte of data, checkpoints of 100 B parameters: less than that is no place for the job."""
    found = answer(pool(storage="900 GB"), FREE | {"cluster1": {"h20": 24}})
    assert found.plans == ()
    refused = [one for one in found.refused if one.stage == "storage"]
    assert refused
    assert refused[0].owner == "owner1"
    assert refused[0].lacking_bytes > 10**12


@pytest.mark.slow
def test_task_11_unlike_chips_where_the_job_allows_them_and_overlap_where_it_does() -> None:
    """Four stages of eight chips, three of them on H20, one on BI-V150. Without `mixed_chips` there is no
    plan, and that is why; without `overlap` no schedule overlaps.
    """
    h20 = pool().clusters[0]
    group = NodeGroup(name="bi", chip="BI-V150", nodes=1, chips_per_node=8)
    bi = Cluster(name="cluster4", owner="owner4", node_groups=(group,))
    both = (h20.name, bi.name)
    links = tuple(Link(source=a, target=b, bandwidth_gbps=10, delay_ms=10) for a, b in (both, both[::-1]))
    where, free = Pool(clusters=(h20, bi), links=links), {"cluster1": {"h20": 24}, "cluster4": {"bi": 8}}
    switches = {"several_owners": True, "network": True, "mixed_chips": True}
    found = answer(where, free, tp=8, overlap=True, **switches)
    assert combinations(found) == {frozenset(both)}
    assert {plan.schedule for plan in found.plans} > {"overlapped"}
    plain = answer(where, free, tp=8, **switches)
    assert plain.plans
    assert "overlapped" not in {plan.schedule for plan in plain.plans}
    alike = answer(where, free, tp=8, overlap=True, **switches | {"mixed_chips": False})
    assert alike.plans == ()
    reasons = {one.reason for one in alike.refused}
    assert "the job does not allow mixed chips (placement.mixed_chips)" in reasons
