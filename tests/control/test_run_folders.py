"""Folders of jobs at submission: one live job per folder, `{job}`, `resume: JOB`, and contradictory fields."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.control.queries.settle_submission import is_settled_as, settle_submission
from isthmus.control.service.auth import Caller
from isthmus.control.service.control_service import ControlService
from isthmus.control.service.folders_in_use import FoldersInUse, _folders, _packed_folders
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import ConflictError, InputError, IsthmusError, NotFoundError
from isthmus.core.job import Job, ResumeSource, TrainingConfig
from isthmus.core.model import COMMAND_MODEL, Model
from isthmus.core.views.api_views import JobState, Submission, TokenRequest
from tests.control.serving import MODEL, POOL, plan_across, submission

ADMIN = Caller(role="admin", name="root")
OWN = {"checkpoints": {"folder": "/ck/{job}"}, "output": "/out/{job}"}


def training(**changes: Any) -> TrainingConfig:
    """The training of `submission` with changes."""
    return TrainingConfig.model_validate({"steps": 2, "sequence_length": 8, "global_batch_size": 2} | changes)


def state_with(*records: tuple[str, str, JobState, Submission]) -> PoolState:
    """A state that holds jobs, given as id, user, state and submission."""
    state = PoolState(config=CoordinatorConfig())
    for number, (job_id, user, life, wanted) in enumerate(records, 1):
        record = JobRecord.create(job_id, number, user, wanted, 0.0)
        record.state = life
        state.jobs[job_id], state.num_submitted = record, number
        if life not in ("succeeded", "failed", "cancelled"):
            state.live_jobs[job_id] = record
    return state


def wish(**changes: Any) -> Submission:
    """A submission with literal folders of its own name, except where changed."""
    return submission(**{"checkpoints": {"folder": "/ck"}, "output": "/out"} | changes)


def command_wish() -> Submission:
    """A submission of a program."""
    command = {"arguments": ["x"], "ranks": {"east": 1}}
    job = Job.model_validate({"name": "c", "engine": "command", "command": command, "output": "/out"})
    return Submission(job=job, model=COMMAND_MODEL)


def test_a_folder_of_a_live_job_is_refused_with_the_difference():
    """Its user learns the job, its state and the differing fields."""
    state = state_with(("a-1", "ann", "running", wish()))
    other = wish(output="/o2", checkpoints={"folder": "/ck/."}, training=training(seed=5))
    with pytest.raises(InputError) as caught:
        FoldersInUse().check(state, "ann", other, "b-1")
    assert caught.value.message.startswith("checkpoints.folder /ck is in use by job a-1 (running), which differs: ")
    assert "seed: 0 there, 5 in this job" in caught.value.message
    assert "isthmus cancel a-1" in (caught.value.hint or "")


def test_another_user_learns_nothing_of_the_job():
    """Neither id nor fields of another user's job are told."""
    state = state_with(("a-1", "ann", "running", wish()))
    with pytest.raises(InputError) as caught:
        FoldersInUse().check(state, "bob", wish(checkpoints={"folder": "/mine"}), "b-1")
    assert caught.value.message == "output /out is in use by another job"
    assert "a-1" not in str(caught.value)


@pytest.mark.parametrize("change", [{"compute": "virtual"}, OWN])
def test_a_job_without_folders_of_that_name_passes(change):
    """Virtual jobs write nothing, and `{job}` makes a folder the job's own."""
    state = state_with(("a-1", "ann", "running", wish()))
    FoldersInUse().check(state, "ann", wish(**change), "b-1")


def test_an_ended_job_frees_its_folders_here():
    """From then on the claim in the folder decides, not the server."""
    state, folders = state_with(("a-1", "ann", "running", wish())), FoldersInUse()
    with pytest.raises(InputError):
        folders.check(state, "ann", wish(), "b-1")
    del state.live_jobs["a-1"]
    folders.check(state, "ann", wish(), "b-1")


@pytest.mark.parametrize("folder", ["/ck", "/ck" + "x" * 2000])
def test_a_checked_job_takes_its_folders_once_it_is_a_job(folder):
    """A check alone takes nothing: it may have been for a job that was refused afterwards, or never written."""
    folders, first = FoldersInUse(), wish(checkpoints={"folder": folder})
    folders.check(state_with(), "ann", first, "a-1")
    folders.check(state_with(), "bob", first, "b-1")
    state = state_with(("a-1", "ann", "planning", first))
    with pytest.raises(InputError, match="in use by another job"):
        folders.check(state, "bob", first, "b-1")


@pytest.mark.parametrize(
    "changes", [{}, OWN, {"compute": "virtual"}, {"output": "/a/../b/"}, {"checkpoints": {"every_steps": 7}}]
)
def test_the_folders_of_a_stored_job_are_those_of_the_job(changes):
    """After a start they are read from the packed form, in which defaults are left out."""
    wanted = wish(**changes)
    record = JobRecord.create("a-1", 1, "ann", wanted, 0.0)
    assert _packed_folders(record) == tuple(folder for _, folder in _folders(record.spec))
    assert _packed_folders(JobRecord.create("c-1", 1, "ann", command_wish(), 0.0)) == ()


def test_a_check_of_another_content_for_the_same_id_is_forgotten():
    """The last check before a job is written is that of its content."""
    folders = FoldersInUse()
    folders.check(state_with(), "ann", wish(output="/x", checkpoints={"folder": "/y"}), "a-1")
    folders.check(state_with(), "ann", wish(), "a-1")
    state = state_with(("a-1", "ann", "planning", wish()))
    folders.check(state, "bob", wish(output="/x", checkpoints={"folder": "/y"}), "b-1")
    with pytest.raises(InputError, match="in use by another job"):
        folders.check(state, "bob", wish(), "b-2")


def test_resume_by_job_becomes_its_folder_with_the_differences():
    """The stored job holds folder, id and differing fields; a repeated key is the same job."""
    state = state_with(("old-1", "ann", "succeeded", wish()))
    new = submission(**OWN, resume="old-1", training=training(steps=9))
    settled = settle_submission(state, "ann", new, "new-2").job
    assert settled.checkpoints.folder == "/ck/new-2"
    assert settled.output == "/out/new-2"
    shown = ("steps: 2 there, 9 in this job",)
    assert settled.resume == ResumeSource(folder="/ck", job="old-1", differences=shown)


@pytest.mark.parametrize(("user", "may"), [("ann", True), ("bob", True), ("eve", False), ("admin", False)])
def test_the_readers_of_a_job_may_resume_it(user, may):
    """Its own user and the users that its file names; a job of another user does not exist, for an admin's job too."""
    state = state_with(("old-1", "ann", "succeeded", submission(**OWN, readers=["bob"], training=training())))
    new = submission(**OWN, resume="old-1", training=training(steps=9))
    if may:
        assert settle_submission(state, user, new, "new-2").job.resume_folder == "/ck/{job}"
        return
    with pytest.raises(NotFoundError, match="no job 'old-1'"):
        settle_submission(state, user, new, "new-2")


@pytest.mark.parametrize(
    ("user", "life", "source", "change", "error", "words"),
    [
        ("bob", "succeeded", {}, {}, NotFoundError, "no job 'old-1'"),
        ("ann", "running", {}, {}, ConflictError, "old-1 is running: its checkpoints still change"),
        ("ann", "succeeded", {"compute": "virtual"}, {}, InputError, "virtual and has no checkpoints"),
        (
            "ann",
            "succeeded",
            {},
            {"checkpoints": {"folder": "/ck/"}},
            InputError,
            "is the folder of the job to resume, old-1",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(user, life, source, change, error, words):
    """A job of another user, one that still writes, one without checkpoints, and the source as target."""
    state = state_with(("old-1", "ann", life, wish(**source)))
    with pytest.raises(error, match=words):
        settle_submission(state, user, submission(**OWN | {"resume": "old-1"} | change), "new-2")


def test_a_model_of_other_shapes_is_not_resumed():
    """The difference of shapes is told before any site starts."""
    small = Model.model_validate(MODEL.model_dump() | {"config": {"hidden_size": 8}})
    large = Model.model_validate(MODEL.model_dump() | {"config": {"hidden_size": 16}})
    state = state_with(("old-1", "ann", "succeeded", wish().model_copy(update={"model": small})))
    new = submission(**OWN, resume="old-1").model_copy(update={"model": large})
    with pytest.raises(InputError, match="hidden_size: 8 there, 16 in this job"):
        settle_submission(state, "ann", new, "new-2")


def test_only_the_same_job_is_settled_as_the_stored_one():
    """A repeated key compares what the user wrote, before ids and folders were filled in."""
    state = state_with(("old-1", "ann", "succeeded", wish()))
    new = submission(**OWN, resume="old-1")
    stored = settle_submission(state, "ann", new, "new-2").job
    assert is_settled_as(stored, new.job, "new-2", "ann")
    assert not is_settled_as(stored, new.job.model_copy(update={"resume": "old-9"}), "new-2", "ann")
    assert not is_settled_as(stored, new.job.model_copy(update={"name": "x"}), "new-2", "ann")


@pytest.fixture
def service():
    """The service over a store in memory."""
    made = ControlService(MemoryStore(), POOL, planner=plan_across, clock=lambda: 1000.0)
    yield made
    made.close()


def submit(service: ControlService, one: Submission) -> Job | IsthmusError:
    """Submit a job; return it as it is stored, or its refusal."""
    (done,) = service.submissions.submit_all("ann", [one])
    return done if isinstance(done, IsthmusError) else service.job(done).job


def test_the_service_refuses_the_second_of_two_jobs_with_one_folder(service):
    """Also within one bulk submission; a repeated key is no second job."""
    first, second = wish(key="a"), wish(key="b", training=training(learning_rate=1.0))
    outcomes = service.submissions.submit_all("ann", [first, second, first])
    assert outcomes[0] == outcomes[2]
    assert isinstance(outcomes[1], InputError)
    assert "learning_rate: 0.0003 there, 1.0 in this job" in outcomes[1].message


def test_the_service_refuses_contradictory_fields(service):
    """A client without the command line's checks gets the same answer."""
    refused = submit(service, wish(training=training(warmup_steps=3)))
    assert isinstance(refused, InputError)
    assert str(refused) == "training.warmup_steps: 3 exceeds training.steps, 2 (nearest valid value: 2)"
    with pytest.raises(InputError, match="warmup_steps"):
        service.dry_run("ann", wish(training=training(warmup_steps=3)))


def test_a_token_for_an_owner_that_the_pool_lacks_is_refused(service):
    """A mistyped owner would get a token with which no agent can join; the nearest name is told."""
    with pytest.raises(InputError, match=r"no owner 'owner-eats' \(did you mean 'owner-east'\?"):
        service.make_token(ADMIN, TokenRequest(role="owner", name="owner-eats"))
    assert service.make_token(ADMIN, TokenRequest(role="owner", name="owner-east")).token
    assert service.make_token(ADMIN, TokenRequest(role="user", name="anybody")).token


def test_without_a_pool_file_any_owner_may_join():
    """Clusters are then known by their agents only."""
    made = ControlService(MemoryStore(), None, planner=plan_across, clock=lambda: 1000.0)
    assert made.make_token(ADMIN, TokenRequest(role="owner", name="new")).token
    made.close()
