"""`isthmus site check` on a real Slurm: what fits, and what does not with its line and the nearest word."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from tests.slurm.slurm_cluster import SlurmCluster

POOL = """
version: 1
owners: [{{name: o}}]
clusters:
- {{name: east, owner: o, node_groups: [{{name: h20, chip: H20, nodes: {nodes}, chips_per_node: 4}}]}}
"""
SITE = """
kind: slurm
node_groups:
  {group}:
    partition: {partition}
options:
  config: {config}
  preempting_partition: {preempting}
"""


def check(slurm: SlurmCluster, folder: Path, **changes: object) -> tuple[int, str]:
    """Run the command; return its exit status and what it printed."""
    told = {"nodes": 2, "group": "h20", "partition": "normal", "preempting": "high", "config": slurm.conf} | changes
    (folder / "pool.yaml").write_text(POOL.format_map(told))
    (folder / "site.yaml").write_text(SITE.format_map(told))
    out = io.StringIO()
    files = ("site", "check", str(folder / "site.yaml"), "--pool", str(folder / "pool.yaml"))
    return main([*files, "--json"], env=CliEnvironment(variables={}, stdout=out, stderr=out)), out.getvalue()


@pytest.mark.slow
def test_a_site_that_fits_its_scheduler_passes(alpha: SlurmCluster, tmp_path: Path) -> None:
    """Every check is named with what was found."""
    status, text = check(alpha, tmp_path)
    found = json.loads(text)
    assert status == 0, text
    assert [one["check"] for one in found] == ["scheduler", "partition", "partition", "cards"]
    assert all(one["ok"] and set(one) == {"check", "ok", "detail", "hint"} for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "normall"}, ("site.yaml:5", "unknown partition 'normall'", "did you mean 'normal'?")),
        ({"preempting": "hihg"}, ("site.yaml:8", "unknown partition 'hihg'", "did you mean 'high'?")),
        ({"nodes": 3}, ("site.yaml:4", "8 cards on 2 nodes, 12 on 3 in pool.yaml")),
        ({"group": "h2o"}, ("site.yaml:4", "unknown node group 'h2o'", "did you mean 'h20'?")),
        ({"config": "/nowhere/slurm.conf"}, ("start slurmctld",)),
    ],
)
def test_a_site_that_does_not_fit_says_where(
    changes: dict[str, object], words: tuple[str, ...], alpha: SlurmCluster, tmp_path: Path
) -> None:
    """Exit status 2, the line of the file, and the nearest word that Slurm knows."""
    status, text = check(alpha, tmp_path, **changes)
    assert status == 2, text
    assert all(word in text for word in words), text


@pytest.mark.slow
def test_a_missing_right_is_named_by_verb_and_object(alpha: SlurmCluster, tmp_path: Path) -> None:
    """Slurm refuses jobs in one of the partitions: the field that names it, and Slurm's reason."""
    alpha.run("scontrol", "update", "PartitionName=high", "State=INACTIVE")
    try:
        status, text = check(alpha, tmp_path)
    finally:
        alpha.run("scontrol", "update", "PartitionName=high", "State=UP")
    assert status == 2, text
    assert all(word in text for word in ("site.yaml:8", "missing right: submit jobs to partition 'high'", "sbatch"))


@pytest.mark.slow
def test_cards_that_no_node_group_maps_are_named(alpha: SlurmCluster, tmp_path: Path) -> None:
    """A partition of one node of two: the other's cards are of no node group."""
    alpha.run("scontrol", "create", "PartitionName=half", f"Nodes={alpha.nodes[0]}", "State=UP")
    try:
        status, text = check(alpha, tmp_path, partition="half", nodes=1)
    finally:
        alpha.run("scontrol", "delete", "PartitionName=half")
    assert status == 2, text
    assert all(word in text for word in ("site.yaml:3", f"cards of no node group: {alpha.nodes[1]}"))
