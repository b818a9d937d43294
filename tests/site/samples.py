"""Small jobs, plans and orders for the agent's tests."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.job import CheckpointConfig, DataConfig, Job, TrainingConfig
from isthmus.core.messages.agent_messages import AgentOrders, DesiredState, PartOrder, RankMap, WorkerAddress
from isthmus.core.plan import Plan, Prediction, Stage, StageTime
from isthmus.core.pool import Cluster, NodeGroup, VirtualChip
from isthmus.site.machine import SiteMachine

EAST = Cluster(
    name="east",
    owner="owner-east",
    node_groups=(
        NodeGroup(name="h20", chip="H20", nodes=1, chips_per_node=3, virtual=VirtualChip()),
        NodeGroup(name="l40s", chip="L40S", nodes=1, chips_per_node=2),
    ),
)
INVENTORY = {"h20": ("h20/0/0", "h20/0/1", "h20/0/2"), "l40s": ("l40s/0/0", "l40s/0/1")}

JOB = Job(
    name="tiny",
    model="model",
    data=DataConfig(paths=("text",)),
    training=TrainingConfig(steps=10),
    checkpoints=CheckpointConfig(folder="checkpoints"),
    output="out",
)


def plan(places: Sequence[str] = ("east/h20", "west/h20"), timed: bool = True) -> Plan:
    """A plan of one layer per stage; `places` are `cluster/node group`."""
    stages = []
    for layer, place in enumerate(places):
        cluster, group = place.split("/")
        stages.append(Stage(cluster=cluster, node_group=group, layers=(layer, layer + 1)))
    times = tuple(StageTime(forward_s=0.1 * i, backward_s=0.2 * i) for i in range(len(stages)))
    predicted = Prediction(
        iteration_s=1,
        tgs_tokens_per_card_s=1,
        samples_per_s=1,
        peak_memory_bytes=(1,) * len(stages),
        stage_times=times,
    )
    return Plan(
        id="p1",
        stages=tuple(stages),
        micro_batches=8,
        micro_batch_size=1,
        sequence_length=64,
        predicted=predicted if timed else None,
    )


def order(
    desired: DesiredState,
    job: str = "a",
    attempt: int = 1,
    places: Sequence[str] = ("east/h20", "west/h20"),
    lease_s: float = 30,
    ranks: RankMap | None = None,
    **more: object,
) -> PartOrder:
    """An order for one part of a plan at `places`; `more` are further fields of it."""
    return PartOrder(
        job=job,
        attempt=attempt,
        desired=desired,
        lease_s=lease_s,
        spec=JOB,
        plan=plan(places),
        rank_map=ranks,
        **more,  # type: ignore[arg-type]
    )


def orders(*parts: PartOrder) -> AgentOrders:
    """What the server answers."""
    return AgentOrders(parts=parts)


def address(rank: int = 0) -> WorkerAddress:
    """Where a rank listens."""
    return WorkerAddress(rank=rank, cluster="east", host="127.0.0.1", port=9000 + rank)


def states(machine: SiteMachine) -> dict[str, str]:
    """What the machine reports to the server, as `job/attempt: state`."""
    return {f"{part.job}/{part.attempt}": part.state for part in machine.observed_parts()}
