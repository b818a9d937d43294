"""Rules of an owner's policy."""

from __future__ import annotations

from datetime import datetime

import pytest

from isthmus.core.job import CheckpointConfig, DataConfig, Job, TrainingConfig
from isthmus.core.owner_policy import OwnerPolicy

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
