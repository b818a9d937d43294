"""Ranks: a segment for each cluster, in it one for each node group and each stage; plans of earlier releases differ."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.agent.service.part_table import SavedParts, dump_parts, parse_parts
from isthmus.control.state.events import PlansMade, decode_event, encode_event
from isthmus.core.plan import Plan, PlanSet, Stage
from isthmus.site import SitePart

FORMATS = Path(__file__).parent / "formats"


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of one to four replicas whose pipelines visit clusters in any order, also one twice."""
    dp, rows = draw(st.integers(1, 4)), []
    for replica in range(dp):
        cuts = draw(st.lists(st.integers(1, 5), max_size=3, unique=True))
        ends = [0, *sorted(cuts), 6]
        for layers in itertools.pairwise(ends):
            rows.append(
                Stage(
                    replica=replica,
                    cluster=draw(st.sampled_from("abc")),
                    node_group=draw(st.sampled_from("gh")),
                    layers=layers,
                    tp=draw(st.integers(1, 3)),
                )
            )
    return Plan(
        id="p", stages=tuple(rows), dp=dp, micro_batches=1, micro_batch_size=1, sequence_length=1,
        compute=draw(st.sampled_from(["real", "virtual"])),
    )  # fmt: skip


def is_contiguous(numbers: list[int]) -> bool:
    return sorted(numbers) == list(range(min(numbers), max(numbers) + 1))


@settings(max_examples=200, deadline=None)
@given(plan=plans())
def test_clusters_node_groups_and_stages_have_contiguous_ranks(plan: Plan) -> None:
    """Every rank from 0 on belongs to one shard of one stage, and no two clusters interleave."""
    size = sum(1 if plan.compute == "virtual" else stage.tp for stage in plan.stages)
    assert len(plan.ranks) == len(set(plan.ranks)) == len(plan.rank_clusters) == size
    for stage in range(len(plan.stages)):
        assert [plan.ranks[rank] for rank in plan.ranks_of(stage)] == [one for one in plan.ranks if one.stage == stage]
    by_place: dict[tuple[str, ...], list[int]] = {}
    for rank in range(size):
        stage = plan.stage_of(rank)
        by_place.setdefault((stage.cluster,), []).append(rank)
        by_place.setdefault((stage.cluster, stage.node_group), []).append(rank)
    assert all(map(is_contiguous, by_place.values()))
    assert sorted(rank for part in plan.parts() for rank in part.ranks) == list(range(size))
    assert all(part.ranks == tuple(by_place[part.cluster,]) for part in plan.parts())
    assert list(dict.fromkeys(plan.rank_clusters)) == list(plan.clusters)
    assert plan.ranks[0].stage == 0


def two_replicas(**more: str) -> Plan:
    stages = [
        {"replica": replica, "cluster": cluster, "node_group": "g", "layers": layers}
        for replica in range(2)
        for cluster, layers in (("a", (0, 1)), ("b", (1, 2)))
    ]
    fixed = {"id": "p", "dp": 2, "micro_batches": 1, "micro_batch_size": 1, "sequence_length": 1}
    return Plan.model_validate({"stages": stages, **fixed, **more})


def test_replicas_over_two_clusters_do_not_interleave() -> None:
    """Two pipelines from a to b have ranks a, a, b, b; in stage order, as earlier releases numbered, a, b, a, b."""
    assert two_replicas().rank_clusters == ("a", "a", "b", "b")
    old = two_replicas(rank_order="stage")
    assert old.rank_clusters == ("a", "b", "a", "b")
    assert [list(old.ranks_of(stage)) for stage in range(4)] == [[0], [1], [2], [3]]
    assert [part.ranks for part in old.parts()] == [(0, 2), (1, 3)]


def test_plans_in_an_event_log_of_an_earlier_release_keep_their_numbers() -> None:
    """A job that runs across the upgrade has workers with the old numbers; new plans are logged with the new ones."""
    event = PlansMade(now_s=1.0, job_id="j", round=1, plans=PlanSet(plans=(two_replicas(),)))
    line = encode_event(event)
    assert decode_event(line) == event
    old = json.loads(line)
    del old["plans"]["plans"][0]["rank_order"]
    for text in (json.dumps(old), json.dumps(old, separators=(",", ":"))):
        found = decode_event(text)
        assert isinstance(found, PlansMade)
        assert found.plans.plans[0] == two_replicas(rank_order="stage")
        assert decode_event(encode_event(found)) == found


def test_parts_in_the_table_of_an_earlier_agent_keep_their_numbers() -> None:
    """An agent of this release finds the worker folders of the one before by rank."""
    table = SavedParts(parts=[SitePart(job="j", attempt=1, plan=two_replicas()), SitePart(job="k", attempt=0)])
    data = json.loads(dump_parts(table))
    assert [part.plan for part in parse_parts(json.dumps(data).encode()).parts] == [two_replicas(), None]
    del data["parts"][0]["plan"]["rank_order"]
    assert parse_parts(json.dumps(data).encode()).parts[0].plan == two_replicas(rank_order="stage")


def test_a_plan_file_of_an_earlier_release_is_numbered_by_cluster() -> None:
    """No worker depends on the numbers of a file; one that names its order keeps it."""
    text = (FORMATS / "plan-v1-replicas.yaml").read_text(encoding="utf-8")
    assert Plan.model_validate(yaml.safe_load(text)).rank_order == "cluster"
    kept = (FORMATS / "plan-v1-stage-order.yaml").read_text(encoding="utf-8")
    assert Plan.model_validate(yaml.safe_load(kept)).rank_clusters == ("qingyang", "hangzhou", "qingyang", "hangzhou")
