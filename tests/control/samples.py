"""Small clusters, jobs and plans for the tests of the control plane."""

from __future__ import annotations

import itertools
from typing import Any

from isthmus.control.state.events import MakePlans
from isthmus.core.job import CheckpointConfig, DataConfig, Job, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet, Refusal, Stage
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.core.views.api_views import Submission

MODEL = Model(path="m", architecture="LlamaForCausalLM", num_layers=12, hidden_size=8, vocab_size=8, config={})


def cluster(name: str, chips: int = 4, **more: Any) -> Cluster:
    """A cluster of one node group `g`, owned by `owner-NAME`."""
    group = NodeGroup(name="g", chip="H20", nodes=1, chips_per_node=chips)
    return Cluster(name=name, owner=f"owner-{name}", node_groups=(group,), **more)


def submission(name: str = "job", *, policy: str = "auto", key: str = "", restarts: int = 3, **more: Any) -> Submission:
    """A small job; `more` are other fields of it. Under `root` its paths are absolute, so that sites check them."""
    root, training = more.pop("root", ""), TrainingConfig(steps=more.pop("steps", 1))
    saving = CheckpointConfig.model_validate({"folder": f"{root}c"} | more.pop("checkpoints", {}))
    model, data = more.pop("model", f"{root}m"), more.pop("data", DataConfig(paths=(f"{root}d",)))
    job = Job(
        name=name, model=model, data=data, training=training,
        checkpoints=saving, output=f"{root}o", policy=policy, max_restarts=restarts,
        **more,
    )  # fmt: skip
    return Submission(job=job, model=MODEL, key=key)


def plan(*sites: str, name: str = "p") -> Plan:
    """A plan of one single-chip stage per name in `sites`, in that order; behind a `|` the next replica's."""
    rows = [list(row) for bar, row in itertools.groupby(sites, "|".__eq__) if not bar]
    layers = max(map(len, rows))
    stages = tuple(
        Stage(
            cluster=site,
            node_group="g",
            replica=replica,
            layers=(i, layers if i + 1 == len(row) else i + 1),
        )
        for replica, row in enumerate(rows)
        for i, site in enumerate(row)
    )
    counts = tuple(range(1, len(rows) + 1)) if len(rows) > 1 else ()
    return Plan(
        id=name,
        stages=stages,
        dp=len(rows),
        micro_batches=len(rows),
        replica_micro_batches=counts,
        micro_batch_size=1,
        sequence_length=1,
    )


def plan_for(request: MakePlans, chips: int) -> PlanSet:
    """Plan greedily: fill the clusters forwards, and backwards as a second candidate."""
    found = []
    for name, order in (("fore", list(request.free_chips)), ("back", list(request.free_chips)[::-1])):
        sites = [site for site in order for _ in range(request.free_chips[site].get("g", 0))][:chips]
        if len(sites) == chips:
            found.append(plan(*sites, name=name))
    refused = () if found else (Refusal(clusters=(), reason=f"fewer than {chips} chips are free"),)
    return PlanSet(plans=tuple(found), refused=refused)
