"""`isthmus simulate --sync` and what `plan` and `explain` say of sums of gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cli.test_plan_commands import answer, run

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "docs/guide/example/config.json"


@pytest.fixture
def words(tmp_path: Path) -> tuple[object, ...]:
    """Write 16 replicas on 4 nodes with a switch, and return the words of `simulate` for them."""
    stages = [{"cluster": "a", "node_group": "g", "layers": [0, 80], "tp": 2, "replica": r} for r in range(16)]
    plan = {"id": "p", "model": str(MODEL), "dp": 16, "stages": stages, "micro_batches": 4, "micro_batch_size": 1}
    group = {"name": "g", "chip": "H100", "nodes": 4, "chips_per_node": 8, "network_gbps": 50}
    cluster = {"name": "a", "owner": "o", "node_groups": [group], "aggregators": [{"kind": "switch"}]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**plan, "sequence_length": 4096}))
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"clusters": [cluster]}))
    return "simulate", tmp_path / "plan.yaml", "--pool", tmp_path / "pool.yaml"


def test_a_forced_strategy_changes_the_iteration_by_its_time(words: tuple[object, ...]) -> None:
    """JSON states the strategy, each group's prices and what binds; the text shows both times."""
    default, forced = answer(*words), answer(*words, "--sync", "passing")
    assert default["synchronisation"]["strategy"] is None
    assert forced["synchronisation"]["strategy"] == "passing"
    (group,) = forced["synchronisation"]["groups"]
    assert group["strategy"] == "passing"
    assert group["strategies"]["passing"]["bound"] == "worker"
    saved_s = default["iteration_s"] - forced["iteration_s"]
    assert saved_s == pytest.approx(group["default_s"] - group["strategies"]["passing"]["seconds"])
    status, text = run(*words, "--sync", "ring")
    assert status == 0
    assert "ring: " in text
    assert "passing: " in text


def test_bad_names_and_missing_aggregators_are_named(words: tuple[object, ...]) -> None:
    """The nearest name, or the aggregator that the pool lacks."""
    status, text = run(*words, "--sync", "pasing")
    assert status == 2
    assert "did you mean 'passing'" in text
    status, text = run(*words, "--sync", "psring")
    assert status != 0
    assert "strategy 'psring' needs a server: cluster 'a' has none" in text


def test_explain_says_which_strategy_is_fastest_and_why(words: tuple[object, ...]) -> None:
    """One sentence per group, and its prices in JSON."""
    told = answer("explain", *words[1:])
    assert any("fastest by passing" in sentence for sentence in told["sentences"])
    assert told["synchronisation"][0]["strategy"] == "passing"


def test_a_plan_without_replicas_says_that_nothing_is_summed(words: tuple[object, ...]) -> None:
    """--sync is answered, not ignored."""
    file = Path(str(words[1]))
    plan = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**plan, "dp": 1, "stages": plan["stages"][:1]}))
    assert answer(*words, "--sync", "ring")["synchronisation"]["groups"] == []
    assert "No replicas sum gradients" in run(*words, "--sync", "ring")[1]
