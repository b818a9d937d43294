"""Rules of an owner's policy."""

from __future__ import annotations

from datetime import datetime

import pytest

from isthmus.core.job import CheckpointConfig, DataConfig, Job, TrainingConfig
from isthmus.core.owner.owner_policy import OwnerPolicy

JOB = Job(
    name="tiny",
    model="/pool/models/tiny",
    data=DataConfig(paths=("/pool/text", "s3://texts/a")),
    training=TrainingConfig(steps=10),
    checkpoints=CheckpointConfig(folder="/pool/checkpoints/tiny"),
    output="/pool/out",
)
OFFICE = {"days": ["mon", "tue", "wed", "thu", "fri"], "from": "08:00", "to": "18:00"}
FRIDAY_NIGHT = {"days": ["fri"], "from": "22:00", "to": "06:00"}


@pytest.mark.parametrize(
    ("hours", "moment", "is_open"),
    [
        ([], "2026-03-07 03:00", True),
        ([OFFICE], "2026-03-06 08:00", True),
        ([OFFICE], "2026-03-06 17:59", True),
        ([OFFICE], "2026-03-06 18:00", False),
        ([OFFICE], "2026-03-07 12:00", False),
        ([FRIDAY_NIGHT], "2026-03-06 22:00", True),
        ([FRIDAY_NIGHT], "2026-03-07 05:59", True),
        ([FRIDAY_NIGHT], "2026-03-07 06:00", False),
        ([FRIDAY_NIGHT], "2026-03-06 05:00", False),
        ([OFFICE, FRIDAY_NIGHT], "2026-03-06 23:00", True),
        ([{"days": ["sat"]}], "2026-03-07 00:00", True),
        ([{"days": ["sat"]}], "2026-03-08 00:00", False),
    ],
)
def test_hours_end_where_they_are_said_to(hours: list[object], moment: str, is_open: bool) -> None:
    """6 March 2026 is a Friday; hours past midnight belong to the day on which they begin."""
    policy = OwnerPolicy.model_validate({"hours": hours})
    assert policy.is_open(datetime.fromisoformat(moment)) == is_open


@pytest.mark.parametrize(
    ("folders", "strange"),
    [
        ((), None),
        (("/pool", "s3://texts"), None),
        (("/pool/", "s3://texts/a"), None),
        (("/pool",), "s3://texts/a"),
        (("/pool/models/../text", "s3://texts", "/pool/models", "/pool/out"), "/pool/checkpoints/tiny"),
        (("/poo", "s3://texts"), "/pool/text"),
        (("/texts", "/pool"), "s3://texts/a"),
    ],
)
def test_a_job_reads_and_writes_below_the_owners_folders_only(folders: tuple[str, ...], strange: str | None) -> None:
    """The first path that is elsewhere is named."""
    objection = OwnerPolicy(folders=folders).rejection_reason("u", JOB)
    assert (objection == "") == (strange is None)
    if strange is not None:
        assert f"'{strange}' is outside the folders" in objection


def test_a_path_cannot_climb_out_of_a_folder() -> None:
    """`..` is taken out before paths are compared."""
    sly = JOB.model_copy(update={"output": "/pool/out/../../etc"})
    assert "'/pool/out/../../etc'" in OwnerPolicy(folders=("/pool", "s3://texts")).rejection_reason("u", sly)


def test_only_users_that_the_owner_names_may_run_jobs() -> None:
    """Without a list every user may."""
    assert OwnerPolicy().rejection_reason("", JOB) == ""
    assert OwnerPolicy(users=("ann", "bo")).rejection_reason("bo", JOB) == ""
    assert "admits jobs of ann, bo, not of 'eve'" in OwnerPolicy(users=("ann", "bo")).rejection_reason("eve", JOB)


STORAGE = {
    "projects": {"vision": ["ann", "ben"]},
    "roots": [
        {"path": "/data/users/{user}"},
        {"path": "/data/projects/{project}"},
        {"path": "/data/models", "access": "read"},
        {"path": "s3://bucket/{user}"},
        {"path": "/data/scratch", "users": ["ann"]},
    ],
    "grants": [{"to": "ben", "path": "/data/users/ann/shared"}, {"to": "eve", "owner": "ben"}],
}


@pytest.mark.parametrize(
    ("user", "path", "access"),
    [
        ("ann", "/data/users/ann/run", "write"),
        ("ann", "/data/users/ben/run", None),
        ("ann", "/data/users/ann/../ben", None),
        ("ann", "/data/users/annabel", None),
        ("ann", "/data/users", None),
        ("ann", "/data/projects/vision/x", "write"),
        ("eve", "/data/users/ben/x", "read"),
        ("eve", "/data/projects/vision/x", "read"),
        ("eve", "/data/users/eve/x", "write"),
        ("dan", "/data/projects/vision/x", None),
        ("ben", "/data/users/ann/shared/x", "read"),
        ("ben", "/data/users/ann/x", None),
        ("ben", "/data/models/x", "read"),
        ("ann", "/data/scratch/x", "write"),
        ("ben", "/data/scratch/x", None),
        ("ben", "s3://bucket/ben/x", "write"),
        ("ben", "s3://bucket/ann/x", None),
        ("ben", "s3://bucket/ben/../ann/x", None),
        ("ben", "/etc/passwd", None),
    ],
)
def test_roots_are_by_user_and_project_and_grants_only_let_read(user: str, path: str, access: str | None) -> None:
    """The name alone decides here; links are followed where the files are."""
    allowed = OwnerPolicy.model_validate({"storage": STORAGE}).storage.of_user(user)
    assert allowed is not None
    assert allowed.access_to(path) == access


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (
            {"roots": [{"path": "/data/{user}"}, {"path": "/data/projects/{project}"}]},
            "of the right name would get both",
        ),
        ({"roots": [{"path": "/data/{user}"}, {"path": "/data/models", "access": "read"}]}, "would get both"),
        ({"roots": [{"path": "/data"}, {"path": "/data/users/{user}"}]}, "not the same users"),
        ({"roots": [{"path": "/data"}, {"path": "/data/x", "users": ["ann"]}]}, "not the same users"),
        ({"roots": [{"path": "/data/u-{user}"}]}, "stand alone between slashes"),
        ({"roots": [{"path": "/data/{job}"}]}, "stand alone between slashes"),
        ({"roots": [{"path": "data/{user}"}]}, "pattern"),
        ({"roots": [{"path": "file:///data/{user}"}]}, "by its absolute path"),
        ({"roots": [{"path": "/data/../{user}"}]}, "by its absolute path"),
        ({"grants": [{"to": "ben", "owner": "ann"}]}, "grants need roots"),
        ({"roots": [{"path": "/d/{user}"}], "grants": [{"to": "ben"}]}, "either an owner or a path"),
    ],
)
def test_roots_that_would_mix_users_are_refused_when_the_policy_is_read(storage: object, message: str) -> None:
    """A user named `models` or `projects` would own what the root of that name holds."""
    with pytest.raises(ValueError, match=message):
        OwnerPolicy.model_validate({"storage": storage})


def test_a_root_inside_a_root_of_the_same_users_changes_the_access() -> None:
    """The innermost root decides; a relative path of a job lies below the first root that may be written."""
    roots = [{"path": "/data/models", "access": "read"}, {"path": "/data/models/drafts"}]
    allowed = OwnerPolicy.model_validate({"storage": {"roots": roots}}).storage.of_user("ann")
    assert allowed is not None
    assert [allowed.access_to(path) for path in ("/data/models/a", "/data/models/drafts/a")] == ["read", "write"]
    assert allowed.resolve("run/a") == "/data/models/drafts/run/a"
    assert allowed.access_to(allowed.resolve("../a")) == "read"


def test_the_policy_names_path_user_roots_and_what_to_do() -> None:
    """Before any disk is read; a path that the user may only read is said to be one."""
    policy = OwnerPolicy.model_validate({"storage": {"roots": [{"path": "/pool", "access": "read"}]}})
    reason = policy.rejection_reason("ann", JOB)
    assert reason == (
        "checkpoints.folder /pool/checkpoints/tiny may only be read by user 'ann' "
        "('ann' may read below /pool; use a folder there, or ask the owner of the site for a grant)"
    )
