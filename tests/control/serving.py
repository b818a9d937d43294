"""A pool for the server's tests: clusters, a submission, a planner that needs every cluster, reports."""

from __future__ import annotations

from isthmus.control.placement import PlanRequest
from isthmus.core.job import CheckpointConfig, DataConfig, Job, TrainingConfig
from isthmus.core.messages.agent_messages import AgentReport, ObservedPart
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet, Refusal, Stage
from isthmus.core.pool import Cluster, Link, NodeGroup, Owner, Pool, VirtualChip
from isthmus.core.views.api_views import Submission


def cluster(name: str, owner: str | None = None, chips: int = 2) -> Cluster:
    """A site with one group `h20` of virtual chips; its owner is `owner-NAME` unless given."""
    group = NodeGroup(name="h20", chip="H20", nodes=1, chips_per_node=chips, virtual=VirtualChip())
    return Cluster(name=name, owner=owner or f"owner-{name}", node_groups=(group,))


EAST, WEST = cluster("east"), cluster("west")
POOL = Pool(
    owners=(Owner(name="owner-east", users=("ann",)), Owner(name="owner-west")),
    clusters=(EAST, WEST),
    links=(
        Link(source="east", target="west", bandwidth_gbps=1, delay_ms=10),
        Link(source="west", target="east", bandwidth_gbps=1, delay_ms=10),
    ),
)
MODEL = Model(path="model", architecture="LlamaForCausalLM", num_layers=4, hidden_size=8, vocab_size=8, config={})


def job(name: str = "tiny", output: str = "out/{job}", **fields: object) -> Job:
    """A job of two steps that takes the first plan by itself."""
    training = TrainingConfig(steps=2, sequence_length=8, micro_batch_size=1, global_batch_size=2)
    wanted = {
        "name": name,
        "model": "model",
        "data": DataConfig(paths=("text",)),
        "training": training,
        "checkpoints": CheckpointConfig(folder="checkpoints/{job}"),
        "output": output,
        "policy": "auto",
    }
    return Job.model_validate(wanted | fields)


def submission(key: str = "", **fields: object) -> Submission:
    """A job with its model."""
    return Submission(job=job(**fields), model=MODEL, key=key)  # type: ignore[arg-type]


def plan_across(asked: PlanRequest) -> PlanSet:
    """Plan one stage at east and one at west, or say that one of them has no free chip."""
    lacking = [name for name in ("east", "west") if asked.free_chips.get(name, {}).get("h20", 0) < 1]
    if lacking:
        return PlanSet(plans=(), refused=(Refusal(clusters=("east", "west"), reason=f"none free: {lacking}"),))
    stages = (
        Stage(cluster="east", node_group="h20", layers=(0, 2)),
        Stage(cluster="west", node_group="h20", layers=(2, 4)),
    )
    plans = tuple(
        Plan(id=name, stages=stages, micro_batches=2, micro_batch_size=1, sequence_length=8) for name in ("p1", "p2")
    )
    return PlanSet(plans=plans)


def report(site: Cluster = EAST, *parts: ObservedPart, incarnation: str = "i1", **fields: object) -> AgentReport:
    """A report of `site` with all its chips free."""
    free = {group.name: group.num_chips for group in site.node_groups}
    told = {"cluster": site, "incarnation": incarnation, "free_chips": free, "parts": parts}
    return AgentReport.model_validate(told | fields)
