"""Rules of the nouns: chips, plans, parts, models, links."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.core.chip import chip_catalogue
from isthmus.core.errors import IsthmusError, ModelError
from isthmus.core.link_throughput import WIRE_OVERHEAD, cubic_bytes_per_s, effective_bytes_per_s, transfer_time_s
from isthmus.core.model import load_model, require_trainable
from isthmus.core.plan import Plan, RankAssignment, Stage, group_replicas_by_cluster
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool, VirtualChip
from isthmus.core.units import format_bytes, format_seconds, parse_bytes


def test_the_catalogue_knows_each_named_chip_and_where_its_figures_come_from():
    """Every chip has plausible figures and a source."""
    named = {"H20", "H100", "H200", "A100", "A800", "L40S", "910B", "BI-V150", "BR106B", "MI300X", "CPU-core"}
    assert named <= set(chip_catalogue())
    for chip in chip_catalogue().values():
        assert chip.source != "user"
        assert chip.flop_per_s("bf16") >= chip.flop_per_s("fp64") > 0
        assert chip.memory_bytes >= 10**9


def test_a_chip_without_a_format_computes_in_the_nearest_wider_one():
    """V100 has no bf16: it falls back to fp16; A100 has no fp8: bf16 or fp16."""
    chips = chip_catalogue()
    assert chips["V100"].flop_per_s("bf16") == chips["V100"].peak_flop_per_s["fp16"]
    assert chips["A100"].flop_per_s("fp8") == chips["A100"].peak_flop_per_s["fp16"]


def test_a_virtual_chip_is_the_real_one_scaled():
    """Compute and memory bandwidth by `compute_scale`, memory by `memory_scale`."""
    group = NodeGroup(
        name="g",
        chip="H20",
        nodes=1,
        chips_per_node=1,
        virtual=VirtualChip(compute_scale=0.1, memory_scale=0.5),
    )
    pool = Pool(clusters=(Cluster(name="c", owner="o", node_groups=(group,)),))
    scaled, real = pool.chip(group), chip_catalogue()["H20"]
    assert math.isclose(scaled.flop_per_s("fp32"), 0.1 * real.flop_per_s("fp32"))
    assert scaled.memory_bytes == real.memory_bytes // 2


def stage(cluster, first, last, **rest):
    return Stage(cluster=cluster, node_group="g", layers=(first, last), **rest)


def plan(*stages, **rest):
    return Plan(id="p", stages=stages, micro_batches=1, micro_batch_size=1, sequence_length=8, **rest)


def test_parts_hold_every_rank_once_and_count_chips_by_node_group():
    """A plan falls into one part per cluster."""
    made = plan(stage("a", 0, 1), stage("b", 1, 2, tp=2), stage("a", 2, 4))
    parts = {part.cluster: part for part in made.parts()}
    assert parts["a"].ranks == (0, 1)
    assert parts["b"].ranks == (2, 3)
    assert parts["a"].chips == {"g": 2}
    assert parts["b"].chips == {"g": 2}
    assert made.hops() == (("a", "b"), ("b", "a"))
    assert made.num_layers == 4
    assert made.ranks == (RankAssignment(0), RankAssignment(2), RankAssignment(1, 0), RankAssignment(1, 1))
    assert [list(made.ranks_of(stage)) for stage in range(3)] == [[0], [2, 3], [1]]
    assert [made.stage_of(rank).cluster for rank in range(4)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    "stages",
    [
        [stage("a", 1, 2)],
        [stage("a", 0, 2), stage("b", 3, 4)],
        [stage("a", 0, 2), stage("b", 2, 2)],
        [stage("a", 0, 2, replica=1)],
    ],
)
def test_a_plan_whose_layers_do_not_follow_is_refused(stages):
    """Layers start at 0, follow one another, and no stage is empty."""
    with pytest.raises(ValidationError):
        plan(*stages)


def test_replicas_may_cut_layers_differently_but_end_together():
    """Unlike replicas are one plan only if they train the same model."""
    assert plan(stage("a", 0, 4), stage("b", 0, 1, replica=1), stage("b", 1, 4, replica=1), dp=2).dp == 2
    with pytest.raises(ValidationError, match="end at different layers"):
        plan(stage("a", 0, 4), stage("b", 0, 3, replica=1), dp=2)


def config(**changes):
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "vocab_size": 10,
    }
    return {key: value for key, value in (fields | changes).items() if value is not None}


def test_a_model_is_a_folder_or_its_config(tmp_path):
    """Both name the same model; `require_trainable` is about the runtime only."""
    (tmp_path / "config.json").write_text(json.dumps(config(tie_word_embeddings=True)))
    folder, file = load_model(tmp_path), load_model(tmp_path / "config.json")
    assert folder.model_copy(update={"path": file.path}) == file
    assert folder.tied_embeddings
    require_trainable(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "not contain a JSON object"),
        (json.dumps(config(hidden_size=None)), "hidden_size"),
        (json.dumps(config(num_hidden_layers=0)), "num_hidden_layers"),
        (json.dumps(config(architectures=None)), "architectures"),
        (json.dumps(config(architectures={"a": 1})), "architectures"),
        (json.dumps(config(text_config="decoder")), "text_config is 'decoder'"),
        (json.dumps(config(num_hidden_layers=True)), "num_hidden_layers is True"),
        (json.dumps(config(num_hidden_layers=10**9)), "from 1 to 10,000"),
        (json.dumps(config(vocab_size=10**30)), "vocab_size"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_model_that_cannot_be_read_says_why(tmp_path, text, words):
    """The file and the field are named."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="no model at"):
        load_model(tmp_path / "elsewhere")


@pytest.mark.parametrize("text_config", [None, config()])
def test_a_decoder_may_be_one_level_down(tmp_path, text_config):
    """A multimodal folder keeps it in `text_config`; a null there says that it is where others have it."""
    (tmp_path / "config.json").write_text(json.dumps(config(text_config=text_config)))
    assert load_model(tmp_path).num_layers == config()["num_hidden_layers"]


def test_an_architecture_the_runtime_cannot_cut_is_refused_before_training(tmp_path):
    """It can still be profiled and planned."""
    (tmp_path / "config.json").write_text(json.dumps(config(architectures=["GPTNeoForCausalLM"])))
    with pytest.raises(ModelError, match="GPTNeoForCausalLM"):
        require_trainable(load_model(tmp_path))


def link(**fields):
    return Link(source="a", target="b", **({"bandwidth_gbps": 1, "delay_ms": 20} | fields))


@given(st.floats(1e-6, 0.05), st.floats(0.001, 0.3))
def test_loss_and_distance_never_make_a_flow_faster(loss, round_trip_s):
    """CUBIC's rate falls with loss and with the round trip; BBR's only by what is lost."""
    assert cubic_bytes_per_s(round_trip_s, loss * 2) < cubic_bytes_per_s(round_trip_s, loss)
    assert cubic_bytes_per_s(round_trip_s * 2, loss) < cubic_bytes_per_s(round_trip_s, loss)
    delay_ms = round_trip_s * 500
    cubic = effective_bytes_per_s(link(loss=loss, delay_ms=delay_ms, congestion_control="cubic"))
    bbr = effective_bytes_per_s(link(loss=loss, delay_ms=delay_ms))
    assert cubic <= bbr <= link().bandwidth_bytes_per_s


def test_a_transfer_takes_its_bytes_and_one_delay():
    """125 MB on 1 Gbit/s at 20 ms one way: the delay, and a second for payload that fills the wire."""
    assert math.isclose(transfer_time_s(link(), 125e6), 0.02 + WIRE_OVERHEAD)


def test_units_are_read_and_shown():
    """Sizes with units are bytes; what is no size is left for validation to refuse."""
    assert [parse_bytes(x) for x in ("64 MiB", "96GB", "1e9", 5, 2.0)] == [2**26, 96 * 10**9, 10**9, 5, 2]
    assert parse_bytes("many") == "many"
    assert (format_bytes(2**20), format_bytes(3 * 2**40), format_bytes(12)) == ("1.0 MiB", "3.0 TiB", "12 B")
    assert [format_seconds(x) for x in (0.0123, 12.34, 75, 7260)] == [
        "12.3 ms", "12.3 s", "1 min 15 s", "2 h 1 min",
    ]  # fmt: skip


def test_every_error_says_what_and_what_to_do_next_and_has_its_own_exit_code():
    """The tree is complete: message, hint, exit code and HTTP status for each class."""
    kinds, todo = [], [IsthmusError]
    while todo:
        kind = todo.pop()
        kinds.append(kind)
        todo += kind.__subclasses__()
    assert len(kinds) >= 12
    for kind in (kind for kind in kinds if kind.__module__ == "isthmus.core.errors"):
        if kind.__name__ != "FileError":
            error = kind("what", hint="next")
            assert error.as_dict() == {"error": kind.__name__, "message": "what", "hint": "next"}
            assert str(error) == "what (next)"
        assert kind.exit_code > 0
        assert 400 <= kind.http_status < 600


def test_replicas_that_share_a_cluster_are_one_group():
    """Directly, or by a replica that joins two others; groups are numbered as their replicas come."""
    assert group_replicas_by_cluster([{"a"}, {"b"}, {"a"}, {"c", "d"}]) == (0, 1, 0, 2)
    assert group_replicas_by_cluster([{"a"}, {"b"}, {"b", "a"}, {"c"}]) == (0, 0, 0, 1)


@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1, max_size=6))
def test_groups_never_share_a_cluster_and_cannot_be_parted(clusters):
    """What groups are, by another way: grown from one replica until no other shares a cluster."""
    groups = group_replicas_by_cluster(clusters)
    for number in range(len(clusters)):
        grown = {number}
        while more := {i for i, own in enumerate(clusters) if i not in grown and any(own & clusters[j] for j in grown)}:
            grown |= more
        assert {i for i, group in enumerate(groups) if group == groups[number]} == grown


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cp_rates": (1.0, 0.5)}, "with cp 1"),
        ({"cp": 3, "cp_rates": (1.0, 0.5)}, "with cp 3: give one for each part"),
        ({"cp": 2, "cp_rates": (0.9, 0.5)}, "1 for the fastest"),
        ({"cp": 2, "cp_rates": (1.0, 0.0)}, "greater than 0"),
        ({"cp": 2, "cp_rates": (1.0, 2.0)}, "less than or equal to 1"),
        ({"cp": 2, "cp_rates": (1.0, 0.5), "cp_kind": "all_to_all"}, "which deals heads equally"),
    ],
)
def test_rates_of_chips_that_share_a_sequence_are_one_for_each_and_the_fastest_is_1(fields, reason):
    """A stage whose rates cannot be is refused where it is read."""
    known = {"cluster": "a", "node_group": "g", "layers": (0, 2)}
    assert Stage.model_validate(known | {"cp": 2, "cp_rates": (0.25, 1.0)}).cp_rates == (0.25, 1.0)
    with pytest.raises(ValidationError, match=reason):
        Stage.model_validate(known | fields)


def test_local_steps_and_sizes_of_a_plan_must_mean_something():
    """Local steps need groups that may differ; the sizes are one per replica, the plan's the largest."""
    apart = [stage("a", 0, 2), stage("b", 0, 2, replica=1)]
    together = [stage("a", 0, 2), stage("a", 0, 2, replica=1)]
    assert plan(*apart, dp=2, local_steps=8).replica_groups == (0, 1)
    with pytest.raises(ValidationError, match="all replicas are in one group"):
        plan(*together, dp=2, local_steps=8)
    sized = {"dp": 2, "micro_batch_size": 4, "micro_batches": 3, "sequence_length": 8, "id": "p"}
    uneven = Plan(stages=apart, **sized, replica_micro_batch_sizes=(4, 1), replica_micro_batches=(2, 3))
    assert uneven.num_samples == 4 * 2 + 1 * 3
    with pytest.raises(ValidationError, match="3 entries for dp 2"):
        Plan(stages=apart, **sized, replica_micro_batch_sizes=(4, 1, 1))
    with pytest.raises(ValidationError, match="the largest of replica_micro_batch_sizes is 2"):
        Plan(stages=apart, **sized, replica_micro_batch_sizes=(2, 1))


@pytest.mark.parametrize("heads", [3, 0, -2])
def test_key_value_heads_that_do_not_divide_the_heads_are_refused_with_the_valid_values(tmp_path, heads):
    """The planner would refuse the model too, but only after the job has been submitted."""
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "num_key_value_heads": heads}))
    with pytest.raises(
        ModelError, match=f"num_key_value_heads {heads} does not divide num_attention_heads, 4"
    ) as refused:
        require_trainable(load_model(tmp_path))
    assert refused.value.hint == "valid values: 1, 2, 4"
