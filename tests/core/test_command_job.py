"""The job file of `engine: command`, and the plan of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from isthmus.agent.adapters.worker_limits import require_confined
from isthmus.agent.service.agent_state_folder import devices_for, ranks_of_node
from isthmus.client.read_job import read_job
from isthmus.control.placement import PlanRequest
from isthmus.control.placement.command_plans import command_plans
from isthmus.control.placement.propose_plans import propose_plans
from isthmus.control.preflight.plan_checks import own_checks
from isthmus.control.state.packed_submission import PackedSubmission
from isthmus.core.errors import FileError, InputError
from isthmus.core.job import Job, job_accesses, with_own_folders, with_paths
from isthmus.core.messages.worker_folder import WorkerAccount, WorkerLimits, WorkerPaths, WorkerSpec
from isthmus.core.model import COMMAND_MODEL
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Cluster, NodeGroup, Pool
from isthmus.core.runs.check_job import check_job
from isthmus.core.views.api_views import Submission
from isthmus.site import SitePart
from isthmus.site.parts import SiteWorker

POOL = Pool(
    clusters=(
        Cluster(
            name="a",
            owner="o",
            node_groups=(
                NodeGroup(name="g", chip="H20", nodes=2, chips_per_node=4),
                NodeGroup(name="h", chip="910B", nodes=1, chips_per_node=8),
            ),
        ),
        Cluster(name="b", owner="o", node_groups=(NodeGroup(name="g", chip="H20", nodes=2, chips_per_node=4),)),
    )
)
FREE = {"a": {"g": 8, "h": 8}, "b": {"g": 8}}


def job(**command: Any) -> Job:
    fields = {"arguments": ["python", "train.py"], "ranks": {"a": 2, "b": 1}} | command
    return Job.model_validate({"name": "c", "engine": "command", "command": fields})


def test_a_command_needs_no_model_data_and_training(tmp_path: Path) -> None:
    """The file names the program and its ranks; the rest has a default, and survives a round trip."""
    file = tmp_path / "job.yaml"
    file.write_text("name: c\nengine: command\ncommand: {arguments: [python, x.py], ranks: {a: 2}}\noutput: here\n")
    read = read_job(file)
    assert (read.job.output, read.model) == (str(tmp_path / "here"), COMMAND_MODEL)
    assert read.notes == ("command: 2 ranks of python x.py",)
    assert not read.job.trains
    again = PackedSubmission.pack(Submission(job=read.job, model=read.model)).unpack()
    assert again.job == read.job
    check_job(again.job, again.model)
    assert with_own_folders(job(), "c-1").output == "runs/c-1"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("{ranks: {a: 1}}", "arguments"),
        ("{arguments: [], ranks: {a: 1}}", "arguments"),
        ('{arguments: [""], ranks: {a: 1}}', "names the program"),
        ('{arguments: ["a\\0b"], ranks: {a: 1}}', "null character"),
        ("{arguments: python x.py, ranks: {a: 1}}", "arguments"),
        ("{arguments: [x], ranks: {}}", "ranks"),
        ("{arguments: [x], ranks: {a: 0}}", "ranks"),
        ("{arguments: [x], ranks: {a: 65536, b: 1}}", "65537"),
        ("{arguments: [x], ranks: {a: 1}, environment: {RANK: x}}", "RANK is set"),
        ("{arguments: [x], ranks: {a: 1}, environment: {HF_TOKEN: x}}", "names a secret"),
        ("{arguments: [x], ranks: {a: 1}, environment: {'A=B': x}}", "environment"),
        ("{arguments: [x], ranks: {a: 1}, node_groups: {b: g}}", "b has no ranks"),
        ("{arguments: [x], ranks: {a: 1}, silence_s: 0}", "silence_s"),
        ("{arguments: [x], ranks: {a: 1}, shell: true}", "shell"),
    ],
)
def test_a_wrong_command_is_refused_in_the_file(tmp_path: Path, command: str, words: str) -> None:
    """With the field, before anything is submitted."""
    file = tmp_path / "job.yaml"
    file.write_text(f"name: c\nengine: command\ncommand: {command}\n")
    with pytest.raises(FileError) as caught:
        read_job(file)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        {"model": "m"},
        {"data": {"paths": ["d"]}},
        {"training": {"steps": 3}},
        {"resume": "other"},
        {"parallel": {"tp": 2}},
        {"placement": {"clusters": ["a"]}},
        {"compute": "virtual"},
        {"preemptible": True},
        {"engine": "isthmus", "model": "m", "data": {"paths": ["d"]}, "training": {"steps": 3}, "output": "o"},
    ],
)
def test_fields_that_the_engine_would_ignore_are_refused(more: dict[str, Any]) -> None:
    """No field is read and ignored."""
    fields = {"name": "c", "engine": "command", "command": {"arguments": ["x"], "ranks": {"a": 1}}}
    with pytest.raises(ValidationError, match=r"leave them out|belong together"):
        Job.model_validate(fields | more)
    with pytest.raises(ValidationError, match="belong together"):
        Job.model_validate({"name": "c", "engine": "command"})


def test_a_plan_has_the_ranks_that_the_user_counts() -> None:
    """One process a rank, contiguous by cluster, on the node group with the most free chips or the one named."""
    request = PlanRequest(job=job(chips_per_rank=2), model=COMMAND_MODEL, pool=POOL, free_chips=FREE)
    (plan,) = propose_plans(request).plans
    assert plan.rank_clusters == ("a", "a", "b")
    assert [part.chips for part in plan.parts()] == [{"g": 4}, {"g": 2}]
    assert [part.ranks for part in plan.parts()] == [(0, 1), (2,)]
    (named,) = command_plans(job(node_groups={"a": "h"}), POOL, FREE).plans
    assert [part.chips for part in named.parts()] == [{"h": 2}, {"g": 1}]


@pytest.mark.parametrize(
    ("command", "free", "words"),
    [
        ({"ranks": {"c": 1}}, FREE, "the pool has no cluster 'c'"),
        ({"node_groups": {"a": "x"}}, FREE, "a has no node group 'x'; it has g, h"),
        ({"chips_per_rank": 9}, FREE, "no node of a has 9 chips"),
        ({"ranks": {"b": 9}}, FREE, "9 chips of one node group wanted, 8 of 8 free in g"),
        ({"ranks": {"b": 3}, "chips_per_rank": 3}, FREE, "9 chips of one node group wanted"),
        ({}, {"a": {"g": 1, "h": 1}, "b": {"g": 8}}, "a: 2 chips of one node group wanted, 1 of 8 free in g, 1 of 8"),
        ({}, {}, "0 of 8 free"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(command: dict[str, Any], free: dict[str, Any], words: str) -> None:
    """A job waits with the reason, for each of its clusters."""
    found = command_plans(job(**command), POOL, free)
    assert found.plans == ()
    assert words in found.refused[0].reason


def test_a_site_admits_programs_only_if_its_owner_says_so() -> None:
    """They run code of users; folders and storage roots of the policy hold for the output alone."""
    assert "commands: true" in OwnerPolicy().rejection_reason("u", job())
    open_to_all = {"workers": {"commands": True}}
    assert OwnerPolicy.model_validate(open_to_all).rejection_reason("u", job()) == ""
    limited = OwnerPolicy.model_validate(open_to_all | {"folders": ["/data"]})
    assert "'runs/{job}' is outside" in limited.rejection_reason("u", job())
    roots = OwnerPolicy.model_validate(open_to_all | {"storage": {"roots": [{"path": "/data/{user}"}]}})
    there = with_paths(job(), lambda _, path: f"/data/u/{path}")
    assert roots.rejection_reason("u", there) == ""
    assert roots.rejection_reason("v", there) != ""
    assert list(job_accesses(there)) == [("output", "/data/u/runs/{job}", "write")]


def test_without_a_way_to_hold_a_program_it_does_not_start() -> None:
    """Neither another account nor Landlock: the program would read the agent's token."""
    (plan,) = command_plans(job(), POOL, FREE).plans
    spec = WorkerSpec(run="c", attempt=1, rank=0, job=job(), plan=plan)
    with pytest.raises(InputError, match="agent's account"):
        require_confined(spec, WorkerLimits())
    require_confined(spec, WorkerLimits(paths=WorkerPaths(reads=(), writes=())))
    require_confined(spec, WorkerLimits(account=WorkerAccount(name="u", uid=1000, gid=1000)))


def test_sites_check_no_files_for_a_command() -> None:
    """It has no model and data that they could look for."""
    (plan,) = command_plans(job(), POOL, FREE).plans
    assert own_checks(job(), plan, "a", "marker") == ()


def test_ranks_of_a_node_see_all_its_devices_in_their_order() -> None:
    """LOCAL_RANK counts processes of the node and devices that a program sees, as under torchrun."""
    (plan,) = command_plans(job(ranks={"a": 3}), POOL, FREE).plans
    part = SitePart(job="c", attempt=1, spec=job(), plan=plan)
    places = {0: "g/0/3", 1: "g/1/0", 2: "g/1/1"}
    part.set_workers({rank: SiteWorker(node_group="g", chips=1, devices=(one,)) for rank, one in places.items()})
    assert [ranks_of_node(part, rank) for rank in places] == [[0], [1, 2], [1, 2]]
    assert devices_for(part, 0) == ("g/0/3",)
    assert devices_for(part, 2) == ("g/1/0", "g/1/1")


def test_a_command_job_is_what_it_was_after_a_way_as_json() -> None:
    """The fields that a command does not use are filled in what a user writes; JSON of a job has them."""
    given = job()
    assert Job.model_validate_json(given.model_dump_json()) == given
    assert Job.model_validate_json(given.model_dump_json(exclude_defaults=True)) == given
