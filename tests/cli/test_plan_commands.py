"""Rules of the commands that tell before a run what it will take."""

import io
import json
from pathlib import Path

import pytest
import yaml

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.chip import chip_catalogue

pytestmark = pytest.mark.integration

POOL = {
    "clusters": [
        {
            "name": name,
            "owner": "o",
            "node_groups": [{"name": "g", "chip": "H20", "nodes": 2, "chips_per_node": 8}],
        }
        for name in "ab"
    ],
    "links": [{"between": ["a", "b"], "bandwidth_gbps": 10, "round_trip_ms": 20}],
}
MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32000,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pool, a model, a plan within a cluster and one across two."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(POOL))
    for name, second in (("near", "a"), ("far", "b")):
        plan = {
            "id": name,
            "model": "config.json",
            "stages": [
                {"cluster": "a", "node_group": "g", "layers": [0, 4], "tp": 2},
                {"cluster": second, "node_group": "g", "layers": [4, 8], "tp": 2},
            ],
            "micro_batches": 4,
            "micro_batch_size": 1,
            "sequence_length": 2048,
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(plan))
    return tmp_path


def run(*arguments: object) -> tuple[int, str]:
    """Run a command and return its status and what it printed."""
    out = io.StringIO()
    status = main([str(one) for one in arguments], env=CliEnvironment(variables={}, stdout=out, stderr=out))
    return status, out.getvalue()


def answer(*arguments: object) -> dict:
    """Run a command with --json and return its answer; it must succeed."""
    status, text = run(*arguments, "--json")
    assert status == 0, text
    return json.loads(text)


def test_simulate_answers_the_contract(folder):
    """Iteration, tokens per card, samples, stages, links, calibration and assumptions are there."""
    told = answer("simulate", folder / "far.yaml", "--pool", folder / "pool.yaml")
    assert told["iteration_low_s"] < told["iteration_s"] < told["iteration_high_s"]
    assert told["tgs_tokens_per_card_s"] == pytest.approx(4 * 2048 / told["iteration_s"] / 4)
    assert len(told["stages"]) == 2
    assert told["links"][0]["bytes"] == 4 * 2048 * 2048 * 2
    assert {link["from"] for link in told["links"]} == {"a", "b"}
    assert told["calibration"] == "data-sheet"
    assert told["assumptions"]


def test_simulate_prints_the_bounds_of_the_pipeline(folder):
    """Between the critical path and one operation after another lies a simulated iteration without jitter."""
    told = answer("simulate", folder / "far.yaml", "--pool", folder / "pool.yaml")
    assert told["bounds"]["critical_path_s"] <= told["iteration_s"] * (1 + 1e-9)
    assert told["bounds"]["critical_path_s"] < told["bounds"]["serial_s"]
    assert "critical path" in run("simulate", folder / "far.yaml", "--pool", folder / "pool.yaml")[1]


def test_simulate_shows_people_a_table_and_writes_trace_and_page(folder):
    """The trace is JSON of the Trace Event Format; the page stands alone."""
    status, text = run(
        "simulate", folder / "far.yaml", "--pool", folder / "pool.yaml",
        "--trace", folder / "t.json", "--page", folder / "t.html",
    )  # fmt: skip
    assert status == 0
    assert "90 % interval" in text
    assert json.loads((folder / "t.json").read_text())["traceEvents"]
    assert (folder / "t.html").read_text().startswith("<!doctype html>")


def test_chips_that_a_cluster_does_not_have_are_told_of(folder):
    """A forecast of such a plan holds for a larger cluster, and says so."""
    far = (folder / "far.yaml").read_text()
    (folder / "large.yaml").write_text(far.replace("  tp: 2", "  tp: 2\n  cp: 512", 1))
    fits = answer("simulate", folder / "far.yaml", "--pool", folder / "pool.yaml")
    told = answer("simulate", folder / "large.yaml", "--pool", folder / "pool.yaml")
    assert not any("which has" in note for note in fits["assumptions"])
    assert any("uses 1,024 chips of a/" in note for note in told["assumptions"])


def test_a_plan_without_a_model_asks_for_one(folder):
    """The mistake names the plan and what to do."""
    plan = yaml.safe_load((folder / "far.yaml").read_text())
    del plan["model"]
    (folder / "bare.yaml").write_text(yaml.safe_dump(plan))
    status, text = run("simulate", folder / "bare.yaml", "--pool", folder / "pool.yaml")
    assert status == 2
    assert "has no model" in text
    named = answer("simulate", folder / "bare.yaml", "--pool", folder / "pool.yaml", "--model", folder / "config.json")
    assert named["iteration_s"] > 0


def test_compare_two_plans(folder):
    """The plan across the WAN takes longer than the one within a cluster."""
    told = answer("compare", folder / "near.yaml", folder / "far.yaml", "--pool", folder / "pool.yaml")
    assert told["b"][0]["a_over_b"] < 1


def test_calibrate_makes_predictions_meet_runs_and_refuses_to_compare_them(folder):
    """Fitted to a run, the model meets it; comparing with that run is refused, with another run it is not."""
    measured_s = answer("simulate", folder / "near.yaml", "--pool", folder / "pool.yaml")["iteration_s"] * 1.2
    runs = {
        "source": "a test",
        "runs": [{"name": "one", "plan": "near.yaml", "pool": "pool.yaml", "iteration_s": measured_s}],
    }
    (folder / "runs.yaml").write_text(yaml.safe_dump(runs))
    made = answer("calibrate", folder / "runs.yaml", "--fit", "matmul_share,launch_s", "--output", folder / "c.yaml")
    assert made["fitted_on"] == ["one"]
    fitted_s = answer(
        "simulate", folder / "near.yaml", "--pool", folder / "pool.yaml", "--calibration", folder / "c.yaml"
    )["iteration_s"]
    before = abs(measured_s / 1.2 / measured_s - 1)
    assert abs(fitted_s / measured_s - 1) < before
    compared = ("compare", folder / "near.yaml", folder / "runs.yaml", "--pool", folder / "pool.yaml")
    status, text = run(*compared, "--calibration", folder / "c.yaml")
    assert status == 2
    assert "was fitted on 'one'" in text
    assert answer(*compared)["b"][0]["a_over_b"] == pytest.approx(1 / 1.2)


def test_calibrate_refuses_what_it_cannot_do(folder):
    """No runs, unknown parameters, unknown chips, and a table without the plan are mistakes."""
    assert run("calibrate")[0] == 2
    assert "unknown chip 'H9'" in run("calibrate", "--measure", "--chip", "H9")[1]
    runs = {"source": "s", "runs": [{"name": "r", "plan": "far.yaml", "pool": "pool.yaml", "iteration_s": 1}]}
    (folder / "runs.yaml").write_text(yaml.safe_dump(runs))
    for fit, refusal in (
        ("speed", "unknown parameter 'speed'"),
        ("", "no parameter to fit"),
        ("H1000/matmul_share", "no run uses 'H1000'"),
    ):
        assert refusal in run("calibrate", folder / "runs.yaml", "--fit", fit)[1]
    status, text = run("compare", folder / "near.yaml", folder / "runs.yaml", "--pool", folder / "pool.yaml")
    assert (status, "has no run of" in text) == (2, True)


def test_profile_and_memory_answer(folder):
    """Parameters and the layer matrix; weights, gradients, optimizer and activations in bytes."""
    told = answer("profile", folder / "config.json")
    assert told["parameters"] > 5e8
    assert {"embedding", "head"} <= {part["kind"] for part in told["parts"]}
    assert "FLOP/byte" in run("profile", folder / "config.json")[1]
    held = answer("memory", folder / "config.json", "--parallel", "tp=2,pp=2", "--sequence", 4096)
    assert {"weights", "gradients", "optimizer", "static"} == set(held["per_chip"])
    assert "per_chip.static" in run("memory", folder / "config.json")[1]
    assert "layers" in run("memory", folder / "config.json", "--parallel", "pp=9999")[1]


def test_memory_counts_the_sequences_that_a_chip_serves(folder):
    """From the cache that weights leave, by the longest, the mean and the distribution of measured lengths."""
    model = folder / "config.json"
    told = answer("memory", model, "--inference", "--chip", "H20", "--lengths", "1024,1024,8192")
    limits, per_token = told["concurrent_sequences"], told["kv_bytes_per_token"]
    assert limits["by_maximum"] == limits["cache_bytes"] // (8192 * per_token)
    assert limits["by_maximum"] < limits["by_mean"] <= limits["by_distribution"]
    alone = answer("memory", model, "--inference", "--chip", "H20", "--sequence", 2048)["concurrent_sequences"]
    assert alone["by_maximum"] == alone["by_mean"] == alone["by_distribution"]
    status, text = run("memory", model, "--inference", "--chip", "H20")
    assert status == 0
    assert "concurrent_sequences.by_distribution" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lengths", "8", "--chip", "H20"], "--inference"),
        (["--inference", "--stack", "megatron"], "--inference"),
        (["--stack", "megatorn"], "unknown stack 'megatorn'"),
        (["--stack", "absent.yaml"], "absent.yaml"),
        (["--inference", "--lengths", "8"], "--chip"),
        (["--inference", "--chip", "H2O"], "unknown chip 'H2O'"),
        *(
            (["--inference", "--chip", "H20", "--lengths", wrong], "sequence length")
            for wrong in ("", "0", "1,,2", "-1", "1e3", "٣", "9" * 5000, "1\n2")
        ),
    ],
)
def test_memory_refuses_options_that_count_nothing(folder, options, words):
    """Each refusal names what is wrong, in a few words."""
    status, text = run("memory", folder / "config.json", *options)
    assert status == 2
    assert words in text
    assert len(text) < 1000


def test_profile_adds_the_communication_between_layers(folder):
    """A matrix in JSON, (layers, layers), in bytes of one micro-batch; in text one line for the chain."""
    assert "communication_bytes" not in answer("profile", folder / "config.json")
    matrix = answer("profile", folder / "config.json", "--communication", "--sequence", 1024)["communication_bytes"]
    assert [len(row) for row in matrix] == [8] * 8
    assert {(i, j): size for i, row in enumerate(matrix) for j, size in enumerate(row) if size} == {
        (i, i + 1): 1024 * 2048 * 2 for i in range(7)
    }
    text = run("profile", folder / "config.json", "--communication", "--sequence", 1024)[1]
    assert text.splitlines()[-1].split() == ["0..6", "1..7", "4.0", "MiB", "4.0", "MiB"]


def test_chips_are_ranked_by_the_given_weights(folder):
    """H20 has little compute and much memory; a chip of the pool file competes; a model gives its own weights."""

    def best(*options: object) -> str:
        return answer("chips", "A100", "H20", *options)["chips"][0]["chip"]

    assert best("--weights", "compute=1") == "A100"
    assert best("--weights", "memory=1") == "H20"
    fast = {
        "name": "fast",
        "peak_flop_per_s": {"bf16": 1e18},
        "memory_bytes": "1 TiB",
        "memory_bandwidth_bytes_per_s": 1e14,
        "in_node_link": {"name": "x", "bandwidth_bytes_per_s": 1e13},
    }
    (folder / "pool.yaml").write_text(yaml.safe_dump(POOL | {"chips": [fast]}))
    assert best("fast", "--pool", folder / "pool.yaml", "--weights", "compute,memory") == "fast"
    told = answer("chips", "H20", "A100", "--model", folder / "config.json")
    assert sum(told["weights"].values()) == pytest.approx(1)
    assert told["weights"]["compute"] > told["weights"]["communication"] > 0
    lines = run("chips", "--weights", "compute,memory,communication")[1].splitlines()
    assert lines[0] == "weights: compute 33%, memory 33%, communication 33%"
    assert lines[4 + len(chip_catalogue())] == "", "a line per chip"
    assert set(answer("chips", "H20", "A100")) == {"H20", "A100"}, "without weights, a list"


def test_scored_chips_name_what_they_cannot_use(folder):
    """An unknown chip, two sources of weights, and weights that are not NAME=NUMBER."""
    assert "unknown chip 'H1000'" in run("chips", "H1000")[1]
    both = ("--weights", "memory=1", "--model", folder / "config.json")
    assert "both --weights and --model" in run("chips", *both)[1]
    for text in ("speed=1", "memory=fast", "memory=-1", "memory=1,memory=2", "memory="):
        assert f"weight '{text.split(',')[-1]}'" in run("chips", "--weights", text)[1]
    assert "one above 0" in run("chips", "--weights", "memory=0")[1]
