"""Impossible plans are refused by one checker, each with its reason and the nearest possible value."""

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.core.errors import FileError, PlanError
from isthmus.core.files.user_files import load_plan, load_pool
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.runs.check_plan import expert_problem, head_problem, plan_problems, require_possible
from isthmus.core.runs.planned_sizes import ModelSizes

SIZES = ModelSizes(num_layers=12, num_heads=64, num_kv_heads=8, num_experts=0)
MIXTURE = replace(SIZES, num_experts=8)
POOL = Pool.model_validate(
    {
        "clusters": [
            {
                "name": "a",
                "owner": "o",
                "node_groups": [{"name": "g", "chip": "H100", "nodes": 8, "chips_per_node": 8}],
            }
        ]
    }
)


def plan_of(stages: int = 2, layers: int = 12, **fields: object) -> Plan:
    """Return a plan of equal stages; `fields` are the plan's or, prefixed with `stage_`, the stages'."""
    own = {key.removeprefix("stage_"): fields.pop(key) for key in list(fields) if key.startswith("stage_")}
    cuts = [(i * layers // stages, (i + 1) * layers // stages) for i in range(stages)]
    rows = [{"cluster": "a", "node_group": "g", "layers": cut} | own for cut in cuts]
    sizes = {"micro_batches": 8, "micro_batch_size": 1, "sequence_length": 2048}
    return Plan.model_validate({"id": "p", "stages": rows} | sizes | fields)


@pytest.mark.parametrize(
    ("plan", "sizes", "reason", "nearest"),
    [
        (plan_of(stage_tp=3), SIZES, "tp 3 does not divide the 64 attention heads", "tp 2"),
        (plan_of(stage_tp=128), SIZES, "tp 128 does not divide the 64", "tp 64"),
        (plan_of(stage_tp=4), replace(SIZES, num_heads=12, num_kv_heads=6), "nor is a multiple", "tp 3"),
        (plan_of(stage_ep=3, stage_tp=3), replace(SIZES, num_heads=6, num_kv_heads=6), "without experts", "ep 1"),
        (plan_of(stage_ep=3, stage_tp=1), MIXTURE, "ep 3 does not divide the 8 experts", "ep 2"),
        (plan_of(stage_ep=4, stage_tp=2), MIXTURE, "ep 4 does not divide the 2 chips", "ep 2"),
        (plan_of(schedule="interleaved", chunks=9), SIZES, "9 chunks for a stage of 6 layers", "chunks 6"),
        (plan_of(stage_recompute_layers=7), SIZES, "7 recomputed layers of 6", "nearest valid: 6"),
        (plan_of(schedule="dualpipe", micro_batches=7), SIZES, "7 micro-batches", "nearest valid: 6"),
        (plan_of(schedule="dualpipe", micro_batches=2), SIZES, "2 micro-batches", "nearest valid: 4"),
        (plan_of(3, schedule="dualpipe"), SIZES, "dualpipe of 3 stages", "2 stages"),
        (plan_of(stage_cp=3), SIZES, "cp 3 does not divide the 2048 tokens", "cp 2"),
        (plan_of(layers=11), SIZES, "has 11 layers, the model 12", "layer 12"),
        (plan_of(stage_tp=16), SIZES, "tp 16 crosses the nodes of a/g, which have 8 chips", "tp 8"),
        (plan_of(stage_tp=12), replace(SIZES, num_heads=24, num_kv_heads=24), "in part", "tp 8"),
    ],
)
def test_each_impossible_plan_names_its_reason_and_the_nearest_value(plan, sizes, reason, nearest):
    """The first problem says why; its hint holds a value that would do."""
    with pytest.raises(PlanError, match=reason) as refused:
        require_possible(plan, sizes, POOL)
    assert nearest in (refused.value.hint or "")


def test_plans_that_runs_have_used_pass():
    """Heads copied within a node, tensor parallelism over whole nodes, experts over replicas."""
    require_possible(plan_of(stage_tp=8), replace(SIZES, num_kv_heads=2), POOL)
    require_possible(plan_of(stage_tp=16), replace(SIZES, num_kv_heads=16), POOL)
    rows = [{"replica": i, "cluster": "a", "node_group": "g", "layers": (0, 12), "tp": 2, "ep": 8} for i in range(4)]
    require_possible(plan_of(stages=1).model_copy(update={"stages": plan_of(stages=1).stages}), MIXTURE, POOL)
    wide = {"id": "p", "stages": rows, "dp": 4, "micro_batches": 1, "micro_batch_size": 1, "sequence_length": 2048}
    require_possible(Plan.model_validate(wide), MIXTURE, POOL)
    require_possible(plan_of(1, schedule="interleaved", chunks=9), SIZES, POOL)


@given(st.integers(1, 130), st.integers(1, 130), st.integers(1, 16))
def test_the_nearest_value_named_is_itself_possible(tp, heads_per_kv, kv_heads):
    """Whatever the degree and the heads, the degree that a hint names passes the same rule."""
    sizes = replace(SIZES, num_heads=kv_heads * heads_per_kv, num_kv_heads=kv_heads)
    for problem in head_problem("tp", tp, sizes):
        named = int(problem.hint.split("tp ")[1])
        assert named < tp
        assert not list(head_problem("tp", named, sizes))
    for problem in expert_problem("ep", tp, replace(sizes, num_experts=kv_heads)):
        named = int(problem.hint.split("ep ")[1])
        assert named < tp
        assert not list(expert_problem("ep", named, replace(sizes, num_experts=kv_heads)))


def test_equal_replicas_are_checked_once():
    """64 equal replicas with one mistake give one problem."""
    rows = [{"replica": i, "cluster": "a", "node_group": "g", "layers": (0, 12), "tp": 3} for i in range(64)]
    fields = {"id": "p", "stages": rows, "dp": 64, "micro_batches": 1, "micro_batch_size": 1, "sequence_length": 2048}
    assert len(list(plan_problems(Plan.model_validate(fields), SIZES, POOL))) == 1


def test_a_plan_file_is_refused_with_the_line_of_the_field(tmp_path):
    """What needs neither model nor pool is refused where the file is read."""
    document = plan_of(schedule="interleaved", chunks=9).model_dump(mode="json", exclude_none=True)
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    line = 1 + next(i for i, text in enumerate(file.read_text().splitlines()) if text.startswith("chunks:"))
    with pytest.raises(FileError, match=f"plan.yaml:{line}: chunks: 9 chunks for a stage of 6 layers") as refused:
        load_plan(file)
    assert refused.value.hint == "nearest valid: chunks 6"


def test_an_unknown_chip_says_which_is_nearest_and_how_to_define_one(tmp_path):
    """The name need not be similar to any."""
    for chip, nearest in (("H100-SXM", "did you mean 'H100'?"), ("zzz", "did you mean '")):
        document = {
            "clusters": [{"name": "a", "owner": "o", "node_groups": [{"chip": chip, "nodes": 1, "chips_per_node": 8}]}]
        }
        file = tmp_path / "pool.yaml"
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        with pytest.raises(FileError, match=f"unknown chip '{chip}'") as refused:
            load_pool(file)
        hint = refused.value.hint or ""
        assert "peak_flop_per_s" in hint
        assert "chips:" in hint
        assert nearest in hint


WORDS = [
    (plan_of(stage_recompute_modules=["mlp"]), SIZES, "recompute_modules with recompute 'none'", "recompute selective"),
    (
        plan_of(stage_recompute="selective", stage_recompute_modules=["mlp", "mlp"]),
        SIZES,
        "named twice",
        "nearest valid: mlp",
    ),
    (
        plan_of(stage_recompute="selective", stage_recompute_modules=["moe", "moe_act"]),
        MIXTURE,
        "moe repeats moe_act already",
        "leave out moe_act",
    ),
    (
        plan_of(stage_recompute="selective", stage_recompute_modules=["moe", "core_attn"]),
        SIZES,
        "no module 'moe'",
        "nearest valid: core_attn",
    ),
    (
        plan_of(stage_recompute="selective", stage_recompute_modules=["mla_up_proj"]),
        SIZES,
        "no module 'mla_up_proj'",
        "nearest valid: core_attn",
    ),
    (plan_of(stage_offload={"layers": 7}), SIZES, "7 layers move, of 6", "nearest valid: 6"),
    (plan_of(stage_cp_kind="ring"), SIZES, "cp_kind ring without context", "cp 2"),
    (
        plan_of(stage_cp=16, stage_cp_kind="all_to_all"),
        SIZES,
        "does not divide 64 heads and 8 key and value heads",
        "cp 8, or cp_kind ring",
    ),
    (plan_of(sharding={"replicas": 3}), SIZES, "sharding.replicas without ZeRO", "zero 1"),
    (plan_of(sharding={"replicas": 3}, zero=3), SIZES, "groups of 3 replicas do not divide dp 1", "nearest valid: 1"),
    (plan_of(sharding={"reshard": False}, zero=2), SIZES, "ZeRO 2 gathers no weights", "zero 3"),
    (plan_of(experts={}), SIZES, "the model has no experts", "leave it out"),
    (plan_of(experts={"dispatcher": "deepep"}), MIXTURE, "deepep without expert parallelism", "all_to_all"),
    (plan_of(lora={"rank": 5000}), replace(SIZES, hidden_size=4096), "rank 5000 is above", "nearest valid: 4096"),
    (plan_of(lora={"rank": 8}), replace(SIZES, has_latent=True), "no product 'k'", "q, o, gate"),
    (plan_of(packed_tokens=4096), SIZES, "documents of 4096 tokens", "nearest valid: 2048"),
    (plan_of(overlap_tp=True), SIZES, "no stage has tensor parallelism", "leave it out"),
    (plan_of(formats={"gathers": "fp8"}), SIZES, "no weights are gathered", "zero 1"),
]


@pytest.mark.parametrize(("plan", "sizes", "reason", "nearest"), WORDS)
def test_each_word_that_cannot_be_names_its_reason_and_the_nearest_value(plan, sizes, reason, nearest):
    """Words beside the degrees are refused by the same checker."""
    with pytest.raises(PlanError, match=reason) as refused:
        require_possible(plan, sizes, POOL)
    assert nearest in (refused.value.hint or "")


@pytest.mark.parametrize("value", [-1, 0, 10**30, float("nan"), float("inf"), "1e3", [], {}, True, None, "x" * 10_000])
@pytest.mark.parametrize(
    "path",
    [
        "sharding.replicas",
        "lora.rank",
        "packed_tokens",
        "stages.offload.layers",
        "stages.cp_kind",
        "experts.dispatcher",
        "kernels.attention",
        "kernels.loss",
        "formats.gradients",
        "stages.recompute_modules",
        "lora.targets",
        "overlap_tp",
    ],
)
def test_hostile_values_of_a_word_are_refused_or_harmless(path, value):
    """Negative, huge, NaN and of another kind: file or plan is refused, or the value is possible."""
    words = path.split(".")
    document = plan_of(zero=1).model_dump(mode="json", exclude_none=True)
    rows = document["stages"] if words[0] == "stages" else [document]
    names = words[1:] if words[0] == "stages" else words
    for row in rows:
        own = {"rank": 8} if names[0] == "lora" else {}
        row[names[0]] = value if len(names) == 1 else own | {names[1]: value}
    harmless = (None, True, 1, [], {}) + ((0,) if path == "overlap_tp" else ())
    try:
        require_possible(Plan.model_validate(document), SIZES, POOL)
    except (ValidationError, PlanError):
        return
    assert value in harmless


def test_a_low_rank_adapter_of_no_or_two_like_targets_is_refused():
    """An empty list would train nothing."""
    for targets in ([], ["q", "q"], ["z"]):
        with pytest.raises(ValidationError):
            plan_of(lora={"rank": 8, "targets": targets})
