"""What `suggest_changes` tries and lists, with a search whose answer is a rule on the request."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.job import CheckpointConfig, DataConfig, Job, ParallelDegrees, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import Plan, Prediction, Stage
from isthmus.core.pool import Cluster, NodeGroup, Pool
from isthmus.plan import SearchRequest, SearchResult, suggest_changes

MODEL = Model(path="m", architecture="LlamaForCausalLM", num_layers=2, hidden_size=8, vocab_size=8, config={})
JOB = Job(
    name="j", model="m", data=DataConfig(paths=("t",)), training=TrainingConfig(steps=2),
    checkpoints=CheckpointConfig(folder="c"), output="o",
)  # fmt: skip
GROUPS = tuple(NodeGroup(name=name, chip="H20", nodes=nodes, chips_per_node=2) for name, nodes in (("s", 1), ("l", 3)))
POOL = Pool(clusters=(Cluster(name="a", owner="x", node_groups=GROUPS),))
PLAN = Plan(
    id="p", stages=(Stage(cluster="a", node_group="s", layers=(0, 2)),), micro_batches=1, micro_batch_size=1,
    sequence_length=8,
    predicted=Prediction(iteration_s=2.5, tgs_tokens_per_card_s=1, samples_per_s=1, peak_memory_bytes=(1,)),
)  # fmt: skip


def suggestions(fits: Callable[[SearchRequest], bool], job: Job = JOB, **fields: object) -> list[str]:
    """Return the texts of the changes with which `fits` holds."""

    def search(request: SearchRequest) -> SearchResult:
        assert request.num_plans == 1
        plans = (PLAN,) if fits(request) else ()
        return SearchResult(
            plans=plans, refused=(), evaluated=1, pruned=0, optimal=False, bound_s=0.0, estimate_s=math.inf
        )

    request = SearchRequest(job=job, model=MODEL, pool=POOL, **fields)  # type: ignore[arg-type]
    found = suggest_changes(request, search)
    assert all(one.iteration_s == 2.5 for one in found)
    return [one.text for one in found]


def num_nodes(request: SearchRequest, group: str) -> int:
    return request.pool.cluster("a").group(group).nodes


def test_changes_of_the_training_are_combined_only_where_none_is_enough() -> None:
    """One that fits alone is listed alone; two that fit only together are listed together."""
    assert suggestions(lambda r: r.job.training.optimizer_on_host) == ["training.optimizer_on_host: true"]
    both = suggestions(lambda r: r.job.training.optimizer_on_host and r.job.training.precision == "fp32")
    assert both == ["training.optimizer_on_host: true and precision: fp32"]


def test_what_the_job_has_already_is_no_suggestion() -> None:
    """The optimizer is on the host already: only the rest is tried; the other precision of fp32 is bf16."""
    training = JOB.training.model_copy(update={"optimizer_on_host": True, "precision": "fp32", "micro_batch_size": 2})
    job = JOB.model_copy(update={"training": training})
    assert suggestions(lambda r: num_nodes(r, "s") == 1 and num_nodes(r, "l") == 3, job) == [
        "training.precision: bf16", "training.micro_batch_size: 1",
    ]  # fmt: skip


@pytest.mark.parametrize("least", [4, 5, 11, 64, 3 * 64])
def test_the_fewest_nodes_are_found(least: int) -> None:
    """Of each group on its own, by doubling and halving: one node less would not do."""
    expected = [f"{least} nodes ({2 * least} chips) of l at a instead of 3"]
    assert suggestions(lambda r: num_nodes(r, "l") >= least) == expected


def test_a_limit_that_excludes_every_plan_is_listed() -> None:
    """Fixed degrees, a placement's switch and a budget, each lifted alone."""
    placement = JOB.placement.model_copy(update={"max_chips": 1, "several_owners": False})
    job = JOB.model_copy(update={"parallel": ParallelDegrees(tp=2), "placement": placement})
    unbound = suggestions(lambda r: r.job.parallel == ParallelDegrees(), job)
    assert unbound == ["no fixed degrees, micro-batch size or schedule"]
    assert suggestions(lambda r: r.job.placement.max_chips is None, job) == ["no placement.max_chips"]
    assert suggestions(lambda r: r.job.placement.several_owners, job) == ["placement.several_owners: true"]
    assert suggestions(lambda r: r.budget is None, job, budget=1.0) == ["no deadline and no budget"]


def test_nothing_that_does_not_help_is_listed() -> None:
    """No change fits, or the changed request contradicts itself: no suggestion, and no error."""
    assert suggestions(lambda _: False) == []

    def contradicts(_: SearchRequest) -> bool:
        raise PlanError("parallel.tp 2 does not divide")

    assert suggestions(contradicts) == []


def test_the_caller_ends_the_search() -> None:
    """Once `should_continue` is false nothing more is searched."""
    request = SearchRequest(job=JOB, model=MODEL, pool=POOL)
    searched: list[SearchRequest] = []

    def search(asked: SearchRequest) -> SearchResult:
        searched.append(asked)
        raise AssertionError

    assert suggest_changes(request, search, lambda: False) == ()
    assert searched == []
