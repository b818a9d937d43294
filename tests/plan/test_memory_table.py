"""Rules of the memory table: the report's figures to the digit, and the contract of its JSON."""

import json

import pytest

from isthmus.core.errors import InputError
from isthmus.core.units import GIB, MIB
from isthmus.plan.memory.memory_table import MeshDegrees, memory_table
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.component import Sharding
from isthmus.plan.profile.model_profile import profile_model
from tests.plan.hand import model_of
from tests.plan.published import NAMES, published

MODEL = published("qwen3-235b-a22b")
SMALL = model_of(layers=4, hidden=256)
DENSE = profile_model(SMALL)
TABLE = 32000 * 256


def report(parallel, **options):
    return memory_table(MODEL, MeshDegrees.parse(parallel), sequence_length=32768, accounting="report", **options)


def cut_digits(value):
    """The report cuts off after two digits: 12.5156 is printed as 12.51."""
    return int(value * 100) / 100


def test_static_memory_is_the_report_s():
    """Table of 3.1, TP4 PP4 EP32: QKV 18, O 16, MoE 144 MB a layer; 4.17 + 8.34 = 12.51 GB on 24 layers."""
    table = report("tp=4,pp=4,cp=4,ep=32")
    chip = table["per_chip"]
    assert table["layers_per_chip"] == 24
    assert [chip["weights"][name] / 24 / MIB for name in ("qkv", "o", "moe")] == [18, 16, 144]
    printed = [cut_digits(chip[name] / GIB) for name in ("gradients", "static")]
    assert [cut_digits(chip["weights"]["total"] / GIB), *printed] == [4.17, 8.34, 12.51]
    assert chip["optimizer"] == 0


@pytest.mark.parametrize(
    ("cp", "attention", "balanced", "worst"),
    [
        (8, (26, 16, 25, 8, 75), (64, 48, 48, 8, 8, 176), (1024, 768, 768, 8, 8, 2576)),
        (1, (208, 128, 200, 64, 600), (512, 384, 384, 64, 64, 1408), (8192, 6144, 6144, 64, 64, 20608)),
    ],
)
def test_activations_of_a_layer_are_the_report_s(cp, attention, balanced, worst):
    """Table of 3.1: one layer at 32K tokens in MB, for the rows that are printed."""
    layer = report(f"tp=4,pp=4,cp={cp},ep=32")["per_layer_activations"]
    assert tuple(value / MIB for value in layer["attention"].values()) == attention
    for name, expected in (("balanced", balanced), ("worst", worst)):
        parts = [value / MIB for value in layer["moe_parts"][name].values()]
        assert (*parts, layer["moe"][name] / MIB) == expected


def test_attention_of_all_layers_is_the_report_s():
    """3.1: the first rank keeps 94 layers' worth of attention, 55.07 GB without context parallelism."""
    layer = report("tp=4,pp=4,cp=1,ep=32")["per_layer_activations"]
    assert cut_digits(94 * layer["attention"]["total"] / GIB) == 55.07


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_context_parallelism_divides_the_report_s_activations(cp):
    """Every entry of the table goes with 1 / cp."""
    whole, cut = (report(f"tp=4,pp=4,cp={n},ep=32")["per_layer_activations"] for n in (1, cp))
    assert cut["attention"]["total"] == whole["attention"]["total"] / cp
    assert cut["moe"] == {name: value / cp for name, value in whole["moe"].items()}


def test_inference_counts_all_weights_and_no_training_state():
    """2.1, TP4 DP32 EP128: one expert a chip, the router whole, embedding and head cut; a sum of these."""
    table = report("tp=4,dp=32,ep=128", inference=True)
    weights = table["per_chip"]["weights"]
    assert weights["moe"] == 94 * 3 * 4096 * 1536 * 2
    assert weights["gate"] == 94 * 4096 * 128 * 2
    assert weights["embedding_lm_head"] == 2 * 151936 * 4096 * 2 / 4
    parts = sum(weights[name] for name in ("embedding_lm_head", "qkv", "o", "moe", "gate"))
    assert table["per_chip"]["static"] == weights["total"] == parts
    assert table["kv_bytes_per_token"] == 94 * 2 * 128 * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("accounting", ["default", "report"])
def test_the_contract_holds_for_every_model(name, accounting):
    """Every model has every key of the contract, in bytes, as JSON."""
    tp = 1 + (published(name).config["num_attention_heads"] % 2 == 0)
    table = memory_table(published(name), MeshDegrees(tp=tp), sequence_length=4096, accounting=accounting)
    table = json.loads(json.dumps(table))
    assert set(table["per_chip"]) == {"weights", "gradients", "optimizer", "static"}
    groups = {"embedding_lm_head", "qkv", "o", "moe", "gate", "total"}
    assert groups <= set(table["per_chip"]["weights"])
    assert set(table["per_layer_activations"]["attention"]) == {"qkvo", "fa", "norm", "add", "total"}
    assert {"balanced", "worst"} <= set(table["per_layer_activations"]["moe"])
    assert table["kv_bytes_per_token"] > 0


def test_the_default_counts_every_parameter():
    """On one chip the default's weights are two bytes for each parameter of the model."""
    table = memory_table(MODEL, MeshDegrees(), sequence_length=4096)
    assert table["per_chip"]["weights"]["total"] == 2 * 235_093_634_560
    assert table["per_chip"]["static"] == 18 * 235_093_634_560


@pytest.mark.parametrize("text", ["tp", "tp=0", "xp=2", "tp=two", "tp=-1", "tp=2,tp=4"])
def test_a_mistake_in_the_degrees_is_named(text):
    """An unknown or impossible degree is shown with those that exist."""
    with pytest.raises(InputError, match=text.partition("=")[0]):
        MeshDegrees.parse(text)


def test_degrees_are_read_in_any_order():
    """`ep=32, tp=4` and `tp=4,ep=32` are one thing."""
    assert MeshDegrees.parse("ep=32, tp=4") == MeshDegrees.parse("tp=4,ep=32") == MeshDegrees(tp=4, ep=32)


def table(parallel="", **options):
    options = {"sequence_length": 1024} | options
    return memory_table(SMALL, MeshDegrees.parse(parallel), **options)


def test_the_default_table_of_a_small_model_by_hand():
    """Hidden size 256, 16 heads of 16, 8 of keys and values, a feed-forward block of 1024, 32000 words; bf16."""
    chip = table()["per_chip"]
    layer = {"qkv": 256 * (256 + 2 * 128), "o": 256 * 256, "moe": 3 * 256 * 1024, "gate": 0, "norm": 2 * 256}
    expected = {name: 2 * 4 * size for name, size in layer.items()} | {"embedding_lm_head": 2 * 2 * TABLE}
    expected["norm"] += 2 * 256
    total = sum(expected.values())
    assert chip["weights"] == expected | {"total": total}
    assert (chip["gradients"], chip["optimizer"], chip["static"]) == (2 * total, 6 * total, 9 * total)


def test_a_stage_of_several_has_its_layers_and_the_larger_end():
    """Layers rounded up; no final norm; embedding or head, not both."""
    chip = table("pp=3")
    whole = table()["per_chip"]["weights"]
    weights = chip["per_chip"]["weights"]
    assert chip["layers_per_chip"] == 2
    assert [weights[name] for name in ("qkv", "o", "moe")] == [whole[name] / 2 for name in ("qkv", "o", "moe")]
    assert weights["norm"] == 2 * 2 * 2 * 256
    assert weights["embedding_lm_head"] == 2 * TABLE
    assert chip["kv_bytes_per_token"] == table()["kv_bytes_per_token"] / 2 == 2 * 2 * 2 * 128
    assert chip["kv_bytes_per_sequence"] == 1024 * chip["kv_bytes_per_token"]


def test_inference_has_weights_only():
    """Whichever accounting."""
    for accounting in ("default", "report"):
        chip = table(inference=True, accounting=accounting)["per_chip"]
        assert (chip["gradients"], chip["optimizer"], chip["static"]) == (0, 0, chip["weights"]["total"])
    assert table(accounting="report", inference=True)["accounting"] == "report"


@pytest.mark.parametrize("parallel", ["", "cp=4", "tp=2", "tp=4,cp=2"])
def test_the_parts_of_a_layers_activations_are_the_whole_layers(parallel):
    """Attention and feed-forward block together are what training keeps of the layer, with half of the norms each."""
    degrees = MeshDegrees.parse(parallel)
    layer = table(parallel)["per_layer_activations"]
    attention = layer["attention"]
    shard = Sharding(tp=degrees.tp, sp=degrees.tp > 1, etp=degrees.tp)
    whole = DENSE.layers[0].activation_bytes(1024 / degrees.cp, 1024, 2, "none", shard)
    assert attention["total"] + layer["moe"]["balanced"] == pytest.approx(whole)
    assert attention["total"] == sum(attention[name] for name in ("qkvo", "fa", "norm", "add"))
    assert layer["moe"]["worst"] == layer["moe"]["balanced"], "there is nothing to route"
    norms = DENSE.layers[0].norms.activation_bytes(1024 / degrees.cp, 1024, 2, shard=shard)
    assert attention["norm"] == pytest.approx(norms / 2)
    assert attention["fa"] > 0
    assert attention["add"] == 0


@pytest.mark.parametrize(
    ("parallel", "words", "hint"),
    [
        ("pp=5", "pp=5 for 4 layers", "each stage needs at least one layer"),
        ("ep=2", "ep=2 for 1 experts in a layer", "nearest valid: ep=1"),
        ("tp=6", "tp=6 does not divide the 16 attention heads", "nearest valid: tp=4"),
        ("tp=32", "tp=32 does not divide the 16 attention heads", "nearest valid: tp=16"),
        ("tp=0", "parallel degree 'tp=0'", "write NAME=NUMBER, each name once; names: tp, pp, cp, ep, dp"),
    ],
)
def test_degrees_that_the_model_does_not_admit_are_refused_with_the_nearest(parallel, words, hint):
    """Each end of the range is still valid."""
    with pytest.raises(InputError) as raised:
        table(parallel)
    assert str(raised.value) == f"{words} ({hint})"
    table("pp=4"), table("tp=16")
    memory_table(published("mixtral-8x7b"), MeshDegrees(ep=8), sequence_length=8)


def test_the_worst_routing_sends_all_tokens_of_the_group_here():
    """Attention and norms are the same; only the experts' activations grow."""
    sparse = published("mixtral-8x7b")
    moe = memory_table(sparse, MeshDegrees(ep=4), sequence_length=1024)["per_layer_activations"]["moe"]
    layer, degrees = profile_model(sparse).layers[0], StageDegrees(ep=4)
    kept = [
        layer.feed_forward.activation_bytes(1024, 1024, 2, shard=degrees.sharding(layer, imbalance))
        for imbalance in (0.0, 1.0)
    ]
    assert moe["worst"] - moe["balanced"] == pytest.approx(kept[1] - kept[0])
    assert moe["worst"] > 2 * moe["balanced"]


def test_the_report_counts_norms_of_query_and_key_only_where_the_model_has_them():
    """A Llama has none: what is left is the norm before attention, once."""
    attention = table(accounting="report")["per_layer_activations"]["attention"]
    assert (attention["norm"], attention["add"]) == (1024 * 256 * 2, 1024 * 256 * 2)
    assert attention["qkvo"] == 1024 * 2 * (256 + 2 * 128 + 256)


def test_norms_inside_attention_count_as_norms():
    """The parts are the whole layer in a model that has them, too; the accounting is named in the table."""
    made = memory_table(MODEL, MeshDegrees(), sequence_length=1024)
    layer = made["per_layer_activations"]
    profile = profile_model(MODEL).layers[0]
    shard = StageDegrees().sharding(profile)
    whole = profile.activation_bytes(1024, 1024, 2, "none", shard)
    assert layer["attention"]["total"] + layer["moe"]["balanced"] == pytest.approx(whole)
    assert layer["attention"]["norm"] > profile.norms.activation_bytes(1024, 1024, 2, shard=shard) / 2
    assert made["accounting"] == "default"
