"""Rules of `isthmus plan` and `isthmus explain`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.core.files.user_files import load_plan
from tests.cli.fake_server import FakeServer, run

pytestmark = pytest.mark.integration

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A job, its model and a pool of two unlike clusters."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "job.yaml").write_text(
        "name: mine\nmodel: config.json\noutput: out\ndata: {paths: [text]}\ncheckpoints: {folder: ck}\n"
        "training: {steps: 100, sequence_length: 2048, global_batch_size: 16}\n"
    )
    (tmp_path / "pool.yaml").write_text(
        "clusters:\n"
        "  - {name: a, owner: x, node_groups: [{chip: H20, nodes: 1, chips_per_node: 2, "
        "price_per_chip_hour: 2}]}\n"
        "  - {name: b, owner: y, node_groups: [{chip: BI-V150, nodes: 1, chips_per_node: 2, "
        "price_per_chip_hour: 0.5}]}\n"
        "links:\n  - {between: [a, b], bandwidth_gbps: 10, round_trip_ms: 10}\n"
    )
    return tmp_path


def plan(files: Path, *more: str) -> dict:
    done = run(FakeServer(), "plan", files / "job.yaml", "--pool", files / "pool.yaml", "--json", *more)
    assert done.status == 0, done.err
    return json.loads(done.out)


def test_the_answer_has_plans_refusals_and_what_the_search_did(files: Path) -> None:
    """The contract: plans with what they rest on, refused combinations, and the search's own figures."""
    answer = plan(files)
    assert set(answer) == {"plans", "refused", "search", "hints", "notes", "synchronisation"}
    assert answer["synchronisation"].keys() == {one["id"] for one in answer["plans"]}
    assert {"seconds", "evaluated", "pruned", "optimal", "bound_s"} <= set(answer["search"])
    best = answer["plans"][0]
    assert {"id", "stages", "dp", "micro_batches", "schedule", "predicted", "why"} <= set(best)
    assert {"replica", "cluster", "node_group", "layers", "tp", "recompute"} <= set(best["stages"][0])
    assert answer["search"]["bound_s"] <= best["predicted"]["iteration_s"]


def test_each_plan_can_be_simulated_and_explained(files: Path) -> None:
    """`--save` writes files that `simulate` takes, with the time that was predicted, and `explain` draws."""
    answer = plan(files, "--save", str(files / "plans"), "--top", "2")
    for one in answer["plans"]:
        file = files / "plans" / f"{one['id']}.json"
        assert load_plan(file).id == one["id"]
        done = run(FakeServer(), "simulate", file, "--pool", files / "pool.yaml", "--json")
        told = json.loads(done.out)["iteration_s"]
        assert told == pytest.approx(one["predicted"]["iteration_s"], rel=1e-6)
        picture = files / "plan.svg"
        done = run(FakeServer(), "explain", file, "--pool", files / "pool.yaml", "--picture", picture)
        assert "is the bottleneck" in done.out
        assert picture.read_text().startswith("<svg")


def test_weights_replace_the_objective(files: Path) -> None:
    """By time alone it is the fastest plan; unreadable weights, and weights beside an objective, are refused."""
    fastest = plan(files)["plans"][0]
    assert plan(files, "--weights", "time=1")["plans"][0]["id"] == fastest["id"]
    asked = ("plan", files / "job.yaml", "--pool", files / "pool.yaml")
    assert "weight 'speed=1'" in run(FakeServer(), *asked, "--weights", "speed=1").err
    both = run(FakeServer(), *asked, "--weights", "time=1", "--objective", "cost")
    assert "both --weights and --objective cost" in both.err


def test_explain_tells_the_load_of_each_node_group(files: Path) -> None:
    """Text and JSON name each group with its load ratio and memory, and the energy of a step."""
    best = plan(files, "--save", str(files / "plans"), "--top", "1")["plans"][0]
    file = files / "plans" / f"{best['id']}.json"
    told = run(FakeServer(), "explain", file, "--pool", files / "pool.yaml", "--json").json
    clusters = {stage["cluster"] for stage in best["stages"]}
    assert {one["cluster"] for one in told["groups"]} == clusters
    assert all(0 < one["peak_memory_bytes"] <= one["memory_bytes"] for one in told["groups"])
    assert all((one["load_ratio"] is None) == (len(told["groups"]) == 1) for one in told["groups"])
    assert told["energy_j"] > 0
    assert "load ratio" in run(FakeServer(), "explain", file, "--pool", files / "pool.yaml").out


def test_cheaper_is_never_dearer_and_runnable_runs(files: Path) -> None:
    """`--objective cost` finds a plan at most as dear; `--runnable` keeps to what the runtime executes."""
    fastest, cheapest = plan(files)["plans"][0], plan(files, "--objective", "cost")["plans"][0]
    assert cheapest["predicted"]["cost_per_iteration"] <= fastest["predicted"]["cost_per_iteration"] * 1.0001
    answer = plan(files, "--runnable")
    assert answer["search"]["runnable"] == [one["id"] for one in answer["plans"]]
    assert answer["plans"]


def test_a_deadline_that_nothing_keeps_says_what_is_possible(files: Path) -> None:
    """No plan is returned; the reason names the fastest and the cheapest."""
    answer = plan(files, "--deadline", "0.001")
    assert answer["plans"] == []
    assert "the fastest takes" in answer["refused"][-1]["reason"]


def test_fixed_degrees_are_kept(files: Path) -> None:
    """`--tp`, `--pp` and `--micro-batch` bind every plan."""
    for one in plan(files, "--tp", "2", "--pp", "2", "--micro-batch", "2")["plans"]:
        assert {stage["tp"] for stage in one["stages"]} == {2}
        assert len(one["stages"]) == 2 * one["dp"]
        assert one["micro_batch_size"] == 2


def test_local_steps_are_planned_simulated_explained_and_exported_where_they_run(files: Path) -> None:
    """A job that admits them gets such a plan over a thin link; every command says what it is."""
    job, pool = files / "job.yaml", files / "pool.yaml"
    job.write_text(job.read_text().replace("steps: 100,", "steps: 2000, local_steps: 2000,"))
    pool.write_text(pool.read_text().replace("bandwidth_gbps: 10", "bandwidth_gbps: 1"))
    answer = plan(files, "--save", str(files / "plans"))
    local = next(one for one in answer["plans"] if one["local_steps"] > 1)
    assert local["local_steps"] == 2000
    assert local["id"] in answer["search"]["runnable"]
    assert any(one["local_steps"] == 1 for one in answer["plans"])
    given = [files / "plans" / f"{local['id']}.json", "--model", files / "config.json"]
    placed = [*given, "--pool", pool]
    simulated = run(FakeServer(), "simulate", *placed, "--json")
    assert json.loads(simulated.out)["iteration_s"] == pytest.approx(local["predicted"]["iteration_s"])
    assert "every 2000 steps" in simulated.out
    explained = run(FakeServer(), "explain", *placed)
    assert "take 2000 local steps" in explained.out.replace("\n", " ")
    assert "local_steps: 2000" in run(FakeServer(), "export", *given, "--to", "isthmus").out
    refused = run(FakeServer(), "export", *placed, "--to", "megatron")
    assert refused.status != 0
    assert "every 2000 steps" in refused.err.replace("\n", " ")
    shown = run(FakeServer(), "plan", job, "--pool", pool)
    assert "average their parameters every 2000 steps" in (files / "plans" / f"{local['id']}.json").read_text()
    assert shown.status == 0


def test_a_job_without_a_plan_learns_what_would_make_one_fit(files: Path) -> None:
    """Every hint was planned: the job or pool with that one change has a plan, and one node less has none."""
    model = json.loads((files / "config.json").read_text()) | {"hidden_size": 4096, "num_hidden_layers": 32}
    (files / "config.json").write_text(
        json.dumps(model | {"intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32})
    )
    pool, job = files / "pool.yaml", files / "job.yaml"
    pool.write_text(pool.read_text().replace("chips_per_node: 2", "chips_per_node: 1"))
    answer = plan(files)
    assert answer["plans"] == []
    changes = [one["change"] for one in answer["hints"]]
    assert "training.optimizer_on_host: true" in changes
    assert "training.precision: fp32" in changes
    assert not any(" and " in change for change in changes), "a combination where one change is enough"
    assert "2 nodes (2 chips) of h20 at a instead of 1" in changes
    assert all(one["iteration_s"] > 0 for one in answer["hints"])
    shown = run(FakeServer(), "plan", job, "--pool", pool)
    assert "With one of these changes a plan fits" in shown.out
    before = job.read_text()
    for line in ("optimizer_on_host: true", "precision: fp32"):
        job.write_text(before.replace("steps: 100,", f"steps: 100, {line},"))
        assert plan(files)["plans"], line
    job.write_text(before)
    pool.write_text(pool.read_text().replace("chip: H20, nodes: 1", "chip: H20, nodes: 2"))
    assert plan(files)["plans"]


def test_a_limit_that_excludes_every_plan_is_named(files: Path) -> None:
    """A budget that no plan keeps: lifting it is a hint; nothing that does not help is one."""
    changes = [one["change"] for one in plan(files, "--budget", "0.000001")["hints"]]
    assert changes == ["no deadline and no budget"]


def test_explain_says_what_makes_an_overfull_plan_fit(files: Path) -> None:
    """A plan whose stage exceeds its chip: the stage is named, and each hint makes the plan fit."""
    answer = plan(files, "--save", str(files / "plans"), "--top", "1", "--pp", "1", "--dp", "1")
    file = files / "plans" / f"{answer['plans'][0]['id']}.json"
    large = json.loads(file.read_text()) | {
        "micro_batch_size": 16,
        "micro_batches": 1,
        "model": str(files / "config.json"),
    }
    large |= {"sequence_length": 32768, "predicted": None}
    large["stages"][0] |= {"recompute": "none", "recompute_layers": None}
    file.write_text(json.dumps(large))
    told = run(FakeServer(), "explain", file, "--pool", files / "pool.yaml", "--json").json
    assert any("usable of its 95.0 GiB" in one for one in told["sentences"])
    changes = [one["change"] for one in told["hints"]]
    assert "recompute: full in every stage" in changes
    large["stages"][0]["recompute"] = "full"
    file.write_text(json.dumps(large))
    assert run(FakeServer(), "explain", file, "--pool", files / "pool.yaml", "--json").json["hints"] == []


def test_plan_says_which_tokenizer_the_job_uses(files: Path) -> None:
    """Under the table, and as `notes` in JSON: bytes where the model has none, else the model's own."""
    done = run(FakeServer(), "plan", files / "job.yaml", "--pool", files / "pool.yaml")
    assert "tokenizer: bytes, one token per byte, since there is no tokenizer.json" in " ".join(done.out.split())
    (files / "tokenizer.json").write_text("{}")
    assert plan(files)["notes"] == [f"tokenizer: {files / 'tokenizer.json'}, the model's own"]


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_every_plan_saved_for_a_framework_exports_there(files: Path, framework: str) -> None:
    """`plan --for X --save` writes files that `export --to X` takes as they are."""
    found = plan(files, "--for", framework, "--save", str(files / "saved"))
    assert found["plans"]
    for one in found["plans"]:
        out = files / "export.py"
        saved = files / "saved" / f"{one['id']}.json"
        done = run(FakeServer(), "export", saved, "--to", framework, "--pool", files / "pool.yaml", "--output", out)
        assert done.status == 0, done.err


def test_for_excludes_runnable(files: Path) -> None:
    """The Isthmus runtime is no other framework."""
    more = ("--pool", files / "pool.yaml", "--for", "megatron", "--runnable")
    done = run(FakeServer(), "plan", files / "job.yaml", *more)
    assert (done.status, "--for excludes --runnable" in done.err) == (2, True)
