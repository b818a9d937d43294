"""Rules of `isthmus calibrate --measure`: parts of a model and messages of a link become parameters."""

import json
from pathlib import Path

import pytest
import yaml

from isthmus.core.files.user_files import load_pool
from isthmus.wan import links_in_background
from tests.cli.test_plan_commands import answer, run

GROUP = {"name": "core", "chip": "CPU-core", "nodes": 1, "chips_per_node": 1}
POOL = {
    "clusters": [{"name": name, "owner": "o", "node_groups": [GROUP]} for name in "ab"],
    "links": [{"between": ["a", "b"], "bandwidth_gbps": 0.1, "round_trip_ms": 10}],
}
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 260,
}  # fmt: skip
PLAN = {
    "id": "two", "model": "config.json", "micro_batches": 4, "micro_batch_size": 1, "sequence_length": 64,
    "stages": [
        {"cluster": "a", "node_group": "core", "layers": [0, 2]},
        {"cluster": "b", "node_group": "core", "layers": [2, 4]},
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, two clusters of a CPU core and a link between them."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(POOL))
    return tmp_path


@pytest.mark.slow
def test_parts_and_messages_are_measured_where_they_are(folder):
    """Two copies on a core each, then tensors between two workers through the emulated link.

    The result is a calibration, which a simulation names.
    """
    with links_in_background(load_pool(folder / "pool.yaml")) as links:
        (folder / "routes.json").write_text(json.dumps(links.routes))
        made = answer(
            *("calibrate", "--measure", "--copies", 2, "--model", folder / "config.json", "--sequence", 64),
            *("--pool", folder / "pool.yaml", "--routes", folder / "routes.json"),
            *("--name", "here", "--output", folder / "here.yaml"),
        )
    found = made["parameters"]
    assert {"CPU-core:h64:n64:tp1/shape_time", "CPU-core:h64:n64:v260/head_time"} <= set(found)
    assert {"CPU-core/matmul_share", "CPU-core/memory_share", "CPU-core/launch_s"} <= set(found)
    assert {"CPU-core/update_time", "CPU-core/step_s", "a>b/message_s", "b>a/message_s"} <= set(found)
    assert 0 < found["a>b/message_s"]["value"] < 0.1
    assert found["CPU-core:h64:n64:tp1/shape_time"]["relative"] >= 0.03
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    known = ("--pool", folder / "pool.yaml", "--calibration", folder / "here.yaml")
    assert answer("simulate", folder / "plan.yaml", *known)["calibration"] == "here"


@pytest.mark.slow
def test_a_worker_that_cannot_measure_says_why(folder):
    """The last line of its log is the message: here, a model without inner layers."""
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 2}))
    status, told = run("calibrate", "--measure", "--model", folder / "config.json")
    assert status != 0
    assert "2 layers" in told


def test_routes_that_are_none_are_refused(folder):
    """A file that holds no routes is named before anything is measured."""
    (folder / "routes.json").write_text("{")
    status, told = run("calibrate", "--measure", "--pool", folder / "pool.yaml", "--routes", folder / "routes.json")
    assert status == 2
    assert "cannot read routes" in told
