"""`isthmus simulate-pool`: what it prints, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

from isthmus.cli.app.entry import main
from isthmus.cli.app.typer_app import app
from isthmus.cli.environment.cli_environment import CliEnvironment

SACCT = """JobID|Account|Submit|Elapsed|NNodes|ReqTRES|QOS
1|vision|2026-03-01T10:00:00|01:00:00|2|gres/gpu=16|normal
2|speech|2026-03-01T10:00:10|00:30:00|1|gres/gpu=8|normal
3|speech|2026-03-01T10:00:20|00:30:00|1|gres/gpu=8|high
4|speech|2026-03-01T10:00:30|00:30:00|1|cpu=8|high
"""
POOL = """version: 1
clusters:
  - {name: vision, owner: vision, node_groups: [{name: g, chip: H20, nodes: 2, chips_per_node: 8}]}
  - {name: speech, owner: speech, node_groups: [{name: g, chip: H20, nodes: 1, chips_per_node: 8}]}
links:
  - {between: [vision, speech], bandwidth_gbps: 100, round_trip_ms: 10}
"""


def _run(*arguments: str) -> tuple[int, str, str]:
    shell = CliEnvironment(variables={"COLUMNS": "200"}, stdout=io.StringIO(), stderr=io.StringIO())
    status = main(app, ["simulate-pool", *arguments], env=shell)
    return status, shell.stdout.getvalue(), shell.stderr.getvalue()  # type: ignore[attr-defined]


def _files(folder: Path) -> list[str]:
    (folder / "jobs.txt").write_text(SACCT)
    (folder / "pool.yaml").write_text(POOL)
    return [str(folder / "jobs.txt"), "--pool", str(folder / "pool.yaml")]


def test_a_trace_is_played_in_three_scenarios_side_by_side(tmp_path: Path) -> None:
    """A table of the runs, a table of the owners' waits, and what was left out of the file."""
    status, told, aside = _run(*_files(tmp_path))
    assert status == 0
    assert [word in told for word in ("alone", "home, arrival", "pool, arrival", "vision", "speech")] == [True] * 5
    assert "1 rows skipped: no chips asked for" in aside


def test_json_is_a_document_for_each_run(tmp_path: Path) -> None:
    """Scenarios and objectives as asked for, in order, each with its owners."""
    status, told, _ = _run(
        *_files(tmp_path),
        "--scenario",
        "pool",
        "--objective",
        "arrival",
        "--objective",
        "throughput",
        "--json",
    )
    runs = [json.loads(line) for line in told.splitlines()]
    assert status == 0
    assert [(run["scenario"], run["objective"]) for run in runs] == [
        ("pool", "arrival"),
        ("pool", "throughput"),
    ]
    assert [run["pool"]["done"] for run in runs] == [3, 3]
    assert [owner["owner"] for owner in runs[0]["owners"]] == ["speech", "vision"]


def test_what_is_not_known_is_refused_with_what_is(tmp_path: Path) -> None:
    """A scenario, an objective, a trace without jobs: each says what would have been right."""
    status, _, told = _run("--jobs", "5", "--scenario", "moon")
    assert (status, "unknown scenario 'moon'" in told, "alone, home, pool" in told) == (2, True, True)
    status, _, told = _run("--jobs", "5", "--objective", "luck")
    assert (status, "unknown objective 'luck'" in told) == (2, True)
    (tmp_path / "none.txt").write_text(SACCT.splitlines()[0] + "\n")
    status, _, told = _run(str(tmp_path / "none.txt"))
    assert (status, "has no job" in told) == (2, True)


def test_days_end_a_run_before_its_jobs_do(tmp_path: Path) -> None:
    """A run that is broken off says so, and how far it came."""
    status, told, _ = _run(*_files(tmp_path), "--scenario", "pool", "--days", "0.02")
    assert status == 0
    assert "(interrupted)" in told


def test_a_policy_holds_at_all_sites(tmp_path: Path) -> None:
    """With a policy that admits none of the jobs' users, no job starts in the pool; moves are among the totals."""
    (tmp_path / "policy.yaml").write_text("users: [somebody-else]\nmoves: {at_once: 1}\n")
    files = [*_files(tmp_path), "--scenario", "pool", "--days", "0.5", "--json"]
    started = []
    for options in ([], ["--policy", str(tmp_path / "policy.yaml")]):
        status, told, _ = _run(*files, *options)
        assert status == 0
        (run,) = [json.loads(line) for line in told.splitlines()]
        started.append(run["pool"]["started"])
        assert (run["moves"], run["most_lost_by_move_s"]) == (0, 0)
    assert started == [3, 0]
