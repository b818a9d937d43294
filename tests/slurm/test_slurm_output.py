"""What Slurm prints is read whole or is an error with its line; other users' words are never taken for Slurm's."""

from __future__ import annotations

import contextlib
import random
from datetime import datetime

import pytest

from isthmus.agent.adapters.slurm.slurm_checks import check_slurm
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_output import (
    expand_nodes,
    parse_allocation,
    parse_boot_time,
    parse_jobs,
    parse_nodes,
)
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.core.errors import UnavailableError
from isthmus.core.owner.site_file import NodeSelector, SiteFile
from isthmus.core.pool import Cluster, NodeGroup

JOBS = (
    "7|R|1000|100|normal|2026-01-01T10:00:00|2|4|a[1-2]|1|gres:gpu:4|N/A|N/A|2026-01-01T12:30:00|\n"
    "8|PD|1001|90|normal|2026-01-01T10:00:01|1|2||0|N/A|gres:gpu:3|gres:gpu:1|N/A|\n"
)
NODE = "NodeName=a1 Arch=x86_64 Gres=gpu:h20:8(S:0-1) GresUsed=gpu:h20:2 State={} Partitions=normal,high  Version=22"


def test_jobs_are_read_with_nodes_and_cards() -> None:
    """Cards are counted per node, per job or per task, whichever the user asked for."""
    first, second = parse_jobs(JOBS).values()
    assert (first.id, first.state, first.nodes, first.num_cards("gpu"), first.requeue) == (
        7,
        "R",
        ("a1", "a2"),
        8,
        True,
    )
    assert (second.nodes, second.num_cards("gpu"), second.num_cards("npu")) == ((), 3, 0)
    assert first.key != second.key


def test_cards_of_a_node_that_no_node_group_maps_are_named() -> None:
    """Also beside cards that one maps, and of another type; resources that are no cards are not."""
    site = SlurmSite(
        SiteFile(kind="slurm", node_groups={"h20": NodeSelector(partition="normal", resource="gpu:h20")}),
        Cluster(name="east", owner="o", node_groups=(NodeGroup(name="h20", chip="H20", nodes=1, chips_per_node=8),)),
    )

    class Commands(SlurmCommands):
        def run_fully(self, *command: str) -> tuple[str, str]:
            if command[0] == "sbatch":
                return "", ""
            mixed = NODE.replace("Gres=gpu:h20:8(S:0-1)", "Gres=gpu:h20:8(S:0-1),gpu:a100:2,npu:4,nic:2")
            return ("BOOT_TIME = now\n" if "config" in command else mixed.format("IDLE") + "\n"), ""

    wrong = [one for one in check_slurm(site, Commands(config="", timeout_s=1)) if not one.ok]
    assert [one.detail for one in wrong] == ["cards of no node group: a1 (gpu:a100, npu)"]


def test_the_end_of_a_running_job_is_read_in_the_zone_of_this_machine() -> None:
    """Of a job that waits Slurm's guess is none, and a job without a limit has no end."""
    first, second = parse_jobs(JOBS).values()
    assert first.ends_at_s == datetime(2026, 1, 1, 12, 30).timestamp()  # noqa: DTZ001 - as Slurm prints it
    assert second.ends_at_s is None
    (endless,) = parse_jobs(JOBS.splitlines()[0].replace("2026-01-01T12:30:00", "NONE")).values()
    assert endless.ends_at_s is None
    for wrong in ("soon", "2026-13-01T00:00:00", "0001-01-01T00:00:00-99:00"):
        with pytest.raises(UnavailableError, match="line 1 of the output of squeue"):
            parse_jobs(JOBS.splitlines()[0].replace("2026-01-01T12:30:00", wrong))


@pytest.mark.parametrize(
    "line",
    [
        "slurm_load_jobs error: Unable to contact slurm controller",
        "9|R|",
        "x" + JOBS.splitlines()[0],
        "7|??" + JOBS[3:40],
    ],
)
def test_a_line_that_cannot_be_read_is_an_error_that_names_it(line: str) -> None:
    """It is never skipped, and never taken for an empty list."""
    with pytest.raises(UnavailableError, match="line 3 of the output of squeue cannot be read"):
        parse_jobs(f"{JOBS}{line}\n")


def test_a_line_that_was_there_before_is_the_same_job() -> None:
    """It is not parsed again; a line that changed is, and what is gone is gone."""
    before = parse_jobs(JOBS)
    after = parse_jobs(JOBS.replace("8|PD|", "8|CG|").removesuffix("\n"), before)
    assert [row.state for row in after.values()] == ["R", "CG"]
    same = [row for row in after.values() if any(row is one for one in before.values())]
    assert [row.id for row in same] == [7]
    assert [row.id for row in parse_jobs(JOBS.splitlines()[1], before).values()] == [8]


def test_cut_and_mangled_output_is_read_or_refused() -> None:
    """A reply cut anywhere, or with bytes changed, gives jobs that were there or an error, no other exception."""
    rng, whole = random.Random(7), {row.id: row for row in parse_jobs(JOBS).values()}
    for _ in range(500):
        text = JOBS[: rng.randrange(len(JOBS))]
        with contextlib.suppress(UnavailableError):
            assert all(row == whole[row.id] for row in parse_jobs(text).values()), text
        mangled = "".join(rng.choice("|,[]-\n 0x") if rng.random() < 0.1 else letter for letter in JOBS)
        with contextlib.suppress(UnavailableError):
            parse_jobs(mangled)


@pytest.mark.parametrize(
    ("state", "usable"),
    [("IDLE", True), ("MIXED", True), ("ALLOCATED", True), ("IDLE+DRAIN", False), ("DOWN*", False), ("IDLE*", False),
     ("MIXED+COMPLETING", True), ("DOWN+INVALID_REG", False)],
)  # fmt: skip
def test_nodes_are_usable_only_while_slurm_gives_them_out(state: str, usable: bool) -> None:
    """Drained, down and silent nodes have cards that nobody gets."""
    (node,) = parse_nodes(NODE.format(state))
    assert (node.name, node.num_cards("gpu"), node.num_cards("gpu:h20"), node.usable) == ("a1", 8, 8, usable)
    assert node.partitions == ("normal", "high")


def test_a_node_without_state_is_an_error() -> None:
    """A half line is no node without cards."""
    with pytest.raises(UnavailableError, match="line 1 of the output of scontrol show node"):
        parse_nodes("NodeName=a1 Arch=x86_64\n")


def test_the_cards_of_an_allocation_are_read_by_node() -> None:
    """Indices are spans; several nodes may share one line."""
    text = (
        "JobId=3 JobName=x   Nodes=a[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:h20:3(IDX:0-1,5)   "
        "Nodes=b7 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:2) x"
    )
    assert parse_allocation(text, "gpu") == {"a1": (0, 1, 5), "a2": (0, 1, 5), "b7": (2,)}
    with pytest.raises(UnavailableError, match="scontrol show job"):
        parse_allocation("JobId=3 JobName=x", "gpu")


def test_node_lists_are_expanded() -> None:
    """Zeros in front are kept; no nodes are no nodes."""
    assert list(expand_nodes("a[1-3,07],b2,c")) == ["a1", "a2", "a3", "a07", "b2", "c"]
    assert list(expand_nodes("")) == list(expand_nodes("(null)")) == []


def test_the_run_of_slurmctld_has_a_name() -> None:
    """BOOT_TIME or an error."""
    assert parse_boot_time("AuthType = x\nBOOT_TIME               = 2026-01-01T10:00:00\n") == "2026-01-01T10:00:00"
    with pytest.raises(UnavailableError, match="scontrol show config"):
        parse_boot_time("AuthType = x\n")
