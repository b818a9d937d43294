"""Exports of words beside the degrees: the frameworks' own options, or a refusal that names the word."""

from __future__ import annotations

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan
from isthmus.core.runs.plan_words import stated_words
from isthmus.plan import runtime_incompatibility
from isthmus.plan.export.isthmus_runtime import to_isthmus_runtime
from isthmus.plan.export.megatron import to_megatron
from isthmus.plan.export.rank_grid import rank_grid
from isthmus.plan.export.torchtitan import parallelism_values, to_torchtitan
from tests.plan.hand import model_of, pool_of
from tests.plan.plans import staged
from tests.plan.published import published

POOL = pool_of("H100", "H100", nodes=64)
WORDS: list[tuple[str, object]] = [
    ("experts", {}),
    ("sharding", {"replicas": 2}),
    ("kernels", {"loss": "fused"}),
    ("formats", {"gradients": "bf16"}),
    ("lora", {"rank": 8}),
    ("overlap_tp", True),
    ("packed_tokens", 64),
    ("offload", {}),
    ("recompute_modules", ["mlp"]),
    ("cp_kind", "ring"),
    ("cp_rates", [1.0, 0.5]),
]


def worded(name: str, value: object) -> Plan:
    """Return a plan that states one word, with the degrees that it needs."""
    more = {
        "recompute_modules": {"recompute": "selective"}, "cp_kind": {"cp": 2}, "cp_rates": {"cp": 2},
        "overlap_tp": {"tp": 2, "sp": True},
    }  # fmt: skip
    return staged((4, 4), dp=2, zero=1, **more.get(name, {}), **{name: value})


@pytest.mark.parametrize(("name", "value"), [one for one in WORDS if not one[0].startswith("cp_")])
def test_the_runtime_refuses_each_word_by_name(name, value):
    """No word is read and ignored."""
    plan = worded(name, value)
    assert name in list(stated_words(plan))
    assert runtime_incompatibility(plan)
    with pytest.raises(PlanError, match=name):
        to_isthmus_runtime(plan, model_of())


@pytest.mark.parametrize("name", ["sharding", "kernels", "lora", "packed_tokens", "offload", "cp_rates"])
def test_megatron_refuses_what_it_is_not_told(name):
    """The reason names the field."""
    with pytest.raises(PlanError, match=f"{name} is not exported"):
        to_megatron(worded(name, dict(WORDS)[name]), model_of(), POOL)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("recompute_modules", ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]),
        ("cp_kind", ["--cp-comm-type", "p2p"]),
        ("formats", ["--grad-reduce-in-bf16"]),
        ("overlap_tp", ["--tp-comm-overlap"]),
    ],
)
def test_megatron_gets_its_own_options(name, words):
    """Names of NVIDIA/Megatron-LM, megatron/training/arguments.py."""
    text = " ".join(to_megatron(worded(name, dict(WORDS)[name]), model_of(), POOL).arguments)
    assert " ".join(words) in text


@pytest.mark.parametrize(("kind", "word"), [("gather", "all_gather"), ("ring", "p2p"), ("all_to_all", "a2a")])
def test_megatron_gets_the_kind_of_context_parallelism(kind, word):
    """Each kind by name, because Megatron-LM takes p2p without one; none where no chips share a sequence."""
    words = list(to_megatron(worded("cp_kind", kind), model_of(), POOL).arguments)
    assert words[words.index("--cp-comm-type") + 1] == word
    assert "--cp-comm-type" not in to_megatron(staged((4, 4), dp=2, zero=1), model_of(), POOL).arguments


@pytest.mark.parametrize(
    ("dispatcher", "kind"), [("all_to_all", "alltoall"), ("all_gather", "allgather"), ("deepep", "flex")]
)
def test_megatron_gets_one_dispatcher(dispatcher, kind):
    """The plan's, instead of the one that experts have by default."""
    plan = staged((32,), dp=8, zero=1, ep=8, experts={"dispatcher": dispatcher})
    words = list(to_megatron(plan, published("mixtral-8x7b"), POOL).arguments)
    assert words.count("--moe-token-dispatcher-type") == 1
    assert words[words.index("--moe-token-dispatcher-type") + 1] == kind
    assert ("--moe-enable-deepep" in words) == (dispatcher == "deepep")


def test_torchtitan_gets_groups_of_replicas():
    """Hybrid sharding is its replicate and shard degrees; weights that stay gathered are `never`."""
    plan = staged((8,), clusters="a", dp=8, zero=3, sharding={"replicas": 4, "reshard": False}, micro_batches=1)
    values = parallelism_values(plan, rank_grid(plan))
    assert (values["data_parallel_replicate_degree"], values["data_parallel_shard_degree"]) == (2, 4)
    assert values["fsdp_reshard_after_forward"] == "never"
    with pytest.raises(PlanError, match="kernels is not exported"):
        to_torchtitan(worded("kernels", {"compiled": True}), model_of(), POOL)
