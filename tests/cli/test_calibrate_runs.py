"""`isthmus calibrate` on tables and logs: what it learns, what it says it cannot, and which run would teach most."""

import json
import math
from pathlib import Path

import pytest
import yaml

from isthmus.plan import DATA_SHEET, Calibration, informative_runs, load_calibration, load_runs, planned_runs
from tests.cli.test_plan_commands import answer, run
from tests.plan.test_export_logs import megatron

pytestmark = pytest.mark.integration

MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32000,
}  # fmt: skip
POOL = {
    "clusters": [
        {"name": name, "owner": "o", "node_groups": [{"name": "g", "chip": "A100", "nodes": 2, "chips_per_node": 8}]}
        for name in "ab"
    ],
    "links": [{"between": ["a", "b"], "bandwidth_gbps": 10, "round_trip_ms": 20}],
}


def plan_of(tp: int, clusters: str = "aa", size: int = 1) -> dict:
    """Return a plan of two stages of a batch of 16."""
    stages = [
        {"cluster": cluster, "node_group": "g", "layers": [4 * i, 4 * i + 4], "tp": tp}
        for i, cluster in enumerate(clusters)
    ]
    sizes = {"micro_batches": 16 // size, "micro_batch_size": size, "sequence_length": 4096}
    return {"id": "p", "model": "config.json", "stages": stages} | sizes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, a pool, and five plans: four in one cluster, one over both."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(POOL))
    plans = {"one": plan_of(1), "two": plan_of(2), "wide": plan_of(4, size=2), "far": plan_of(2, "ab")}
    plans["big"] = plan_of(2, size=4)
    for name, plan in plans.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(plan))
    return tmp_path


def predicted(folder: Path, name: str, *more: object) -> float:
    """Return the seconds that `simulate` predicts for a plan."""
    return answer("simulate", folder / f"{name}.yaml", "--pool", folder / "pool.yaml", *more)["iteration_s"]


def table(folder: Path, factors: dict[str, float], **fields: object) -> Path:
    """Write a table of runs that took `factors` times their predictions."""
    runs = [
        {"name": name, "plan": f"{name}.yaml", "pool": "pool.yaml", "iteration_s": predicted(folder, name) * factor}
        | fields
        for name, factor in factors.items()
    ]
    file = folder / "runs.yaml"
    file.write_text(yaml.safe_dump({"source": "a test", "runs": runs}))
    return file


def bias_std(calibration: Calibration, chip: str, stack: str) -> float:
    """Return the deviation of the factor on passes that chip and stack make together: one stack tells only both."""
    keys = (f"{chip}/bias_factor", f"{stack}/stack_factor")
    a, b = (calibration.key_relative(key) for key in keys)
    return math.sqrt(a * a + b * b + 2 * a * b * calibration.correlation(*keys))


def test_runs_that_are_all_slower_are_met_and_the_rest_keeps_its_prior(folder):
    """Three runs 15 % slower: an unseen plan is predicted so, links and what no run informs are named as such."""
    made = answer("calibrate", table(folder, {"one": 1.15, "two": 1.15, "wide": 1.15}), "-o", folder / "c.yaml")
    report = made["report"]
    assert "A100/network_share" in report["not_learned"]
    before, after = (bias_std(one, "A100", "isthmus") for one in (DATA_SHEET, load_calibration(folder / "c.yaml")))
    assert after < 0.9 * before, (before, after)
    assert all(abs(ratio - 1) < 0.03 for ratio in report["predicted_over_measured"].values())
    assert not report["warnings"]
    ratio = predicted(folder, "big", "--calibration", folder / "c.yaml") / predicted(folder, "big")
    assert ratio == pytest.approx(1.15, abs=0.05)
    assert load_calibration(folder / "c.yaml").correlations


def test_one_share_for_both_directions_of_a_link(folder):
    """By default a pair of clusters has one share; a plan inside a cluster has none."""
    made = answer("calibrate", table(folder, {"one": 1.0, "far": 1.2}))
    assert "a<>b/wan_share" in made["parameters"]
    assert not any("wan_share" in key for key in answer("calibrate", table(folder, {"one": 1.0}))["parameters"])


def test_the_run_that_would_teach_most_is_named(folder):
    """Candidates are changes of the runs, those that would teach most first; what was run is none."""
    first = answer("calibrate", table(folder, {"one": 1.0}))["report"]["next_runs"]
    assert first
    assert first[0]["bits"] > 0.2
    assert first == sorted(first, key=lambda one: -one["bits"])
    tp2 = [one for one in first if (one["like"], one["change"]) == ("one", "tp 2")]
    later = answer("calibrate", table(folder, {"one": 1.0, "two": 1.0, "wide": 1.0}))["report"]["next_runs"]
    assert not any((one["like"], one["change"]) == ("one", "tp 2") for one in later), f"that is 'two': {tp2}"
    status, text = run("calibrate", folder / "runs.yaml")
    assert status == 0
    assert "to learn more, run '" in text
    assert "say little about" in text


def test_another_place_is_among_the_runs_that_would_teach(folder):
    """A pool with chips that no run used: moving a run there is a candidate, and teaches more than a run as before."""
    pool = yaml.safe_load((folder / "pool.yaml").read_text())
    pool["clusters"][1]["node_groups"][0]["chip"] = "H100"
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))
    runs = planned_runs(load_runs(table(folder, {"one": 1.0, "two": 1.0, "wide": 1.0})))
    made = DATA_SHEET
    found = informative_runs(runs, made, most=100)
    moved = [one for one in found if one.change == "place a/g to b/g"]
    assert moved
    assert all({stage.cluster for stage in one.plan.stages} == {"b"} for one in moved)
    answer("calibrate", folder / "runs.yaml", "-o", folder / "c.yaml")
    learned = informative_runs(runs, load_calibration(folder / "c.yaml"), most=100)
    bits = {(one.like, one.change): one.bits for one in learned}
    there = max(value for (_, change), value in bits.items() if change.startswith("place"))
    here = max(value for (_, change), value in bits.items() if change.startswith("micro_batch_size"))
    assert there > here, "what the runs have taught of A100 says less of H100"


def test_peaks_of_memory_have_a_band_that_runs_narrow(folder):
    """Without runs 10 % of the peak and 15 % of activations; with measured peaks what the fit leaves."""
    words = ("simulate", folder / "two.yaml", "--pool", folder / "pool.yaml")
    before = answer(*words)["memory"][0]
    share = before["activations"] / before["allocated"]
    spread = math.exp(1.645 * math.hypot(0.1, 0.15 * share))
    assert before["allocated_high"] / before["allocated"] == pytest.approx(spread, rel=1e-3)
    assert before["allocated"] / before["allocated_low"] == pytest.approx(spread, rel=1e-3)
    status, text = run(*words)
    assert status == 0
    assert "Its fullest chip allocates" in text
    peak = answer(*words)["stages"][0]["peak_memory_bytes"]
    answer(
        "calibrate", table(folder, {"two": 1.0, "one": 1.0, "wide": 1.0}, allocated_bytes=peak), "-o", folder / "c.yaml"
    )
    after = answer(*words, "--calibration", folder / "c.yaml")["memory"][0]
    assert after["allocated_high"] / after["allocated_low"] < before["allocated_high"] / before["allocated_low"]


def test_a_run_beyond_the_prior_is_warned_of(folder):
    """A run that took five times as long as any parameter allows: the fit says that it cannot reach it."""
    status, text = run("calibrate", table(folder, {"one": 5.0}))
    assert status == 0
    assert "warning: run 'one' took 5 times longer than the prior predicts" in text


def test_a_log_becomes_a_calibration_with_memory(folder):
    """One log of Megatron-LM: time, and what its allocator held at most."""
    seconds = predicted(folder, "two") * 1.1
    peak = answer("simulate", folder / "two.yaml", "--pool", folder / "pool.yaml")["stages"][0]["peak_memory_bytes"]
    lines = [megatron(i, seconds if i > 2 else 60.0) for i in range(1, 12)]
    memory = f"memory (MB) | allocated: 1 | max allocated: {1.2 * peak / 2**20:.2f} | reserved: 2 | max reserved: 3"
    (folder / "train.log").write_text("\n".join([*lines, f"[Rank 0] (after 1 iterations) {memory}"]))
    words = ("--from", folder / "train.log", "--plan", folder / "two.yaml", "--pool", folder / "pool.yaml")
    made = answer("calibrate", *words, "--warm-up", 3, "-o", folder / "c.yaml")
    assert made["fitted_on"] == ["train"]
    assert made["parameters"]["A100/activation_memory"]["value"] > 1.05
    after = answer("simulate", folder / "two.yaml", "--pool", folder / "pool.yaml", "--calibration", folder / "c.yaml")
    assert after["stages"][0]["peak_memory_bytes"] > peak
    assert predicted(folder, "two", "--calibration", folder / "c.yaml") == pytest.approx(seconds, rel=0.03)
    again = run("calibrate", *words, "--warm-up", 3, "--base", folder / "c.yaml")
    assert again[0] == 2
    assert "was fitted on 'train' already" in again[1]


def test_logs_without_a_plan_and_two_sources_are_refused(folder):
    """A log alone says nothing of what ran; --measure excludes runs."""
    (folder / "t.log").write_text("nothing")
    assert "--from without --plan and --pool" in run("calibrate", "--from", folder / "t.log")[1]
    assert run("calibrate", "--measure", "--from", folder / "t.log")[0] == 2
    words = ("--plan", folder / "one.yaml", "--pool", folder / "pool.yaml")
    assert "no line with an iteration time" in run("calibrate", "--from", folder / "t.log", *words)[1]


def test_device_memory_gives_what_lies_outside_the_allocator(folder):
    """Both peaks of a run: the factor on activations from one, the rest of the device from their difference."""
    stage = answer("simulate", folder / "one.yaml", "--pool", folder / "pool.yaml")["stages"][0]
    peak = stage["peak_memory_bytes"]
    fields = {"allocated_bytes": 0.9 * peak, "device_bytes": peak + 3e9}
    made = answer("calibrate", table(folder, {"one": 1.0, "two": 1.0, "wide": 1.0}, **fields))
    assert made["parameters"]["A100/outside_memory_bytes"]["value"] > 1e9
    assert made["memory_residual"] > 0
