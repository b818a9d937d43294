"""Rules of plans for another framework: what is searched for it exports, and a refusal leads somewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import PlanError
from isthmus.core.files.user_files import load_pool
from isthmus.core.job import CheckpointConfig, DataConfig, Job, ParallelDegrees, TrainingConfig
from isthmus.core.model import Model, load_model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan import SearchLimits, SearchRequest, search_plans
from isthmus.plan.export.export_plan import EXPORT_TARGETS, export_plan, framework_request
from isthmus.plan.search.costs.framework_rules import FRAMEWORKS
from isthmus.plan.search.finish.fit_framework import common_recomputation
from tests.plan.hand import model_of, pool_of
from tests.plan.plans import staged, with_stages
from tests.plan.test_export import REFUSED, recomputing

pytestmark = pytest.mark.integration

CONFIGS = Path(__file__).parent / "configs"
GUIDES = Path(__file__).parents[2] / "docs/guide"
MIXED = pool_of("H100", "910B", nodes=2)
COMMAND = re.compile(r"`isthmus (?P<words>[^`]*)`")


def job_of(parallel: ParallelDegrees | None = None, **training: object) -> Job:
    sizes = {"steps": 10, "sequence_length": 4096, "global_batch_size": 16}
    return Job(
        name="j", model="m", data=DataConfig(paths=("x",)), training=TrainingConfig.model_validate(sizes | training),
        checkpoints=CheckpointConfig(folder="c"), output="o", parallel=parallel or ParallelDegrees(),
    )  # fmt: skip


def request_of(model: Model, pool: Pool, **more: object) -> SearchRequest:
    return SearchRequest(job=more.pop("job", job_of()), model=model, pool=pool, explain=False, **more)


def plans_for(framework: str, request: SearchRequest) -> tuple[Plan, ...]:
    """Return the plans of a search that obeys the rules alone: nothing is dropped because it does not export."""
    return search_plans(replace(framework_request(request, framework), accepts=lambda _: True)).plans


POOLS = {
    "two-clusters": load_pool(GUIDES / "two-clusters/pool.yaml"),
    "example": load_pool(GUIDES / "example/pool.yaml"),
    "unlike": pool_of("H100", "910B", "MI300X", nodes=1),
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("config", "framework"),
    [
        ("llama-3.1-8b", "megatron"),
        ("llama-3.2-1b", "torchtitan"),
        ("llama-2-70b", "megatron"),
        ("llama-2-70b", "torchtitan"),
        ("mixtral-8x7b", "megatron"),
    ],
)
def test_every_plan_of_a_search_for_a_framework_exports_there(config, framework, pool):
    """Published models on the pools of the guides, and on chips of three libraries."""
    model = load_model(CONFIGS / f"{config}.json")
    for plan in plans_for(framework, request_of(model, POOLS[pool])):
        export_plan(framework, plan, model, POOLS[pool])


CHIPS = st.sampled_from(["H100", "A100", "910B", "MI300X", "V100"])


@given(
    chips=st.lists(CHIPS, min_size=1, max_size=3),
    per_node=st.sampled_from([1, 2, 4, 6]),
    layers=st.integers(1, 9),
    heads=st.sampled_from([1, 2, 3, 8]),
    batch=st.sampled_from([1, 6, 7, 16]),
    sequence=st.sampled_from([1000, 4096, 16384]),
    tied=st.booleans(),
    memory=st.sampled_from([0.02, 0.1, 1.0]),
    framework=st.sampled_from(sorted(FRAMEWORKS)),
)
@settings(max_examples=20, deadline=None)
def test_no_pool_and_no_model_lead_to_a_plan_that_does_not_export(
    chips, per_node, layers, heads, batch, sequence, tied, memory, framework
):
    """Odd nodes, few heads, odd batches, tight memory: the search obeys the rules by which exports refuse."""
    model = model_of(layers, num_key_value_heads=heads, num_attention_heads=24, tie_word_embeddings=tied)
    pool = pool_of(*chips, nodes=2, chips_per_node=per_node)
    pool = with_memory(pool, memory)
    request = request_of(model, pool, job=job_of(sequence_length=sequence, global_batch_size=batch, local_steps=4))
    if set(chips) == {"910B"}:
        with pytest.raises(PlanError, match="no cluster of the pool has any"):
            plans_for(framework, request)
        return
    plans = plans_for(framework, request)
    for plan in plans:
        export_plan(framework, plan, model, pool)


def with_memory(pool: Pool, share: float) -> Pool:
    """Return the pool with a share of its chips' memory."""
    chips = {pool.chip(group).name: pool.chip(group) for one in pool.clusters for group in one.node_groups}
    small = (one.model_copy(update={"memory_bytes": int(one.memory_bytes * share)}) for one in chips.values())
    return pool.model_copy(update={"chips": tuple(small)})


def test_a_job_is_not_spread_over_two_libraries():
    """On NVIDIA and Ascend clusters a framework's plans use the NVIDIA cluster alone; others use both."""
    request = request_of(model_of(8), MIXED)
    assert {plan.clusters for plan in plans_for("megatron", request)} == {("a",)}
    assert {name for plan in search_plans(request).plans for name in plan.clusters} == {"a", "b"}


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
@pytest.mark.parametrize(
    ("chips", "reason"),
    [
        (("H100", "910B"), r"b/g \(Huawei 910B\) communicates by hccl, it by nccl or rccl"),
        (("H100", "MI300X"), r"several collective libraries: nccl on a/g \(NVIDIA H100\), rccl on b/g"),
        (("910B", "910B"), "communicates by hccl"),
        (("CPU-core", "H100"), "communicates by gloo"),
    ],
)
def test_stages_on_devices_that_cannot_talk_are_refused(framework, chips, reason):
    """An export names the cluster, chip and library of a stage that the framework cannot run on."""
    with pytest.raises(PlanError, match=reason):
        export_plan(framework, staged((4, 4)), model_of(8), pool_of(*chips))


def test_virtual_chips_are_refused():
    """There is no device behind a virtual chip."""
    with pytest.raises(PlanError, match="virtual: no device is there"):
        export_plan("megatron", staged((4, 4)), model_of(8), pool_of("H100", "H100", virtual={"compute_scale": 1.0}))


def follow(hint: str, model: Model, pool: Pool, job: Job) -> None:
    """Do what a hint says: each command in it works; a hint without a command tells no one to run something else."""
    commands = {match["words"]: match["words"].split() for match in COMMAND.finditer(hint)}
    if not commands:
        assert not re.search(r"runtime|--to|--for|plan again|export to", hint), hint
    for words in commands.values():
        if words[0] == "plan":
            limits = SearchLimits(executable="--runnable" in words)
            request = request_of(model, pool, job=job, limits=limits)
            target = words[words.index("--for") + 1] if "--for" in words else "isthmus"
            found = search_plans(request if target == "isthmus" else framework_request(request, target)).plans
            assert found, hint
            for plan in found:
                export_plan(target, plan, model, pool)


def hint_of(framework: str, plan: Plan, model: Model, pool: Pool) -> str | None:
    """Return the hint of a refused export, after the exports that it names; None if the plan exports."""
    try:
        export_plan(framework, plan, model, pool)
    except PlanError as error:
        hint = error.hint or "none"
    else:
        return None
    for match in re.finditer(r"`isthmus export PLAN --to (\w+) --pool POOL`", hint):
        export_plan(match[1], plan, model, pool)
    return hint


PLANS = REFUSED | {
    "tp differs": with_stages(
        staged((4, 4)), [staged((4, 4)).stages[0], staged((4, 4)).stages[1].model_copy(update={"tp": 2})]
    ),
    "recomputation by stage": recomputing(4, 1),
    "selective in part": recomputing(4, 3, kind="selective"),
    "selective": staged((5, 3), recompute="selective"),
    "alone": staged((8,), dp=2, zero=1),
    "cp": staged((5, 3), cp=2),
    "ep": staged((5, 3), ep=2),
    "local": staged((8,), dp=2).model_copy(update={"local_steps": 20}),
    "sizes": staged((8,), dp=2, micro_batches=4).model_copy(
        update={"replica_micro_batch_sizes": (1, 2), "micro_batch_size": 2}
    ),
    "tp 3": staged((5, 3), tp=3),
    "blocking": staged((5, 3), transport="rendezvous"),
}
POOLS_OF_HINTS = {"alike": pool_of("H100", "H100", nodes=2), "mixed": MIXED, "none": pool_of("910B", "910B", nodes=2)}


@pytest.mark.parametrize("framework", EXPORT_TARGETS)
@pytest.mark.parametrize("pool", POOLS_OF_HINTS)
def test_the_hint_of_a_refusal_works_or_is_final(framework, pool):
    """Every hint is followed: a command in it ends in an export; without one it points to no other command."""
    model, there = model_of(8), POOLS_OF_HINTS[pool]
    hints = {hint for plan in PLANS.values() if (hint := hint_of(framework, plan, model, there))}
    assert hints
    assert "none" not in hints
    for command in {found[0] if (found := COMMAND.search(hint)) else hint for hint in hints}:
        follow(command, model, there, job_of())


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
@pytest.mark.parametrize("config", ["gpt-oss-20b", "gemma-2b", "deepseek-v2", "mixtral-8x7b", "qwen2.5-7b", "phi-2"])
def test_the_hint_for_a_model_without_words_is_final(framework, config):
    """No plan of the model exports: the hint of the export, and of the search, says so and names no command for it."""
    model, pool = load_model(CONFIGS / f"{config}.json"), POOLS["unlike"]
    hint = hint_of(framework, staged((model.num_layers,)), model, pool)
    if hint is None:
        return
    assert f"--for {framework}" not in hint
    with pytest.raises(PlanError) as caught:
        framework_request(request_of(model, pool), framework)
    follow(str(caught.value.hint), model, pool, job_of())


@pytest.mark.parametrize(
    ("limits", "job", "change"),
    [
        ({"schedule": "overlapped"}, {}, "remove --schedule"),
        ({}, {"optimizer_on_host": True}, "set training.optimizer_on_host to false"),
        ({"pp": 2}, {}, "remove pp, or set it to 1"),
    ],
)
def test_a_job_that_no_plan_for_a_framework_satisfies_says_what_to_change(limits, job, change):
    """torchtitan: schedule, host optimizer, and stages of a model with a tied embedding."""
    model = model_of(8, tie_word_embeddings=True)
    request = request_of(model, MIXED, job=job_of(**job), limits=SearchLimits(**limits))
    with pytest.raises(PlanError) as caught:
        framework_request(request, "torchtitan")
    assert str(caught.value.hint).startswith(change)
    follow(str(caught.value.hint), model, MIXED, job_of())


def test_recomputation_grows_to_what_a_framework_has_words_for():
    """First N of every stage, or all of all; none stays none; what does not fit then is dropped."""

    def anything(stage: int, count: int) -> bool:
        return True

    assert common_recomputation([0, 0], [5, 3], "first_layers", anything) == [0, 0]
    assert common_recomputation([2, 0], [5, 3], "first_layers", anything) == [2, 2]
    assert common_recomputation([4, 0], [5, 3], "first_layers", anything) == [4, 3]
    assert common_recomputation([1, 0], [5, 3], "all_or_none", anything) == [5, 3]
    assert common_recomputation([1, 0], [5, 3], "first_layers", lambda stage, count: count > 2) == [3, 3]
    assert common_recomputation([1, 0], [5, 3], "first_layers", lambda *_: False) is None
