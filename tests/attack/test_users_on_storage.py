"""Attacks of a user on the storage of another one: by names, links, forged claims, and by what a run overwrites."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._trust_storage import attack_paths
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.preflight.preflight_checks import CheckContext, run_check
from isthmus.agent.service.agent_service import AgentService
from isthmus.control.preflight.plan_checks import own_checks
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.job import Job
from isthmus.core.messages.worker_folder import WorkerSpec, write_atomically
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.rights.storage_rules import Access, StorageRules
from isthmus.core.runs.run_folder import claim_folder
from isthmus.train.checkpoint.checkpoint_folder import newest_valid
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.write_checkpoint import clear_unfinished, publish, write_rank_part
from isthmus.train.process.run_folders import check_resume, claim_run_folders
from tests.agent.test_shell import FakeAdapter
from tests.site.samples import EAST, order, orders
from tests.train.worker_jobs import make_job, whole

pytestmark = pytest.mark.attack


class Disk:
    """A site's storage with the homes of two users and a shared folder of models; alice has trained there."""

    def __init__(self, root: Path) -> None:
        self.root, self.users = root, root / "users"
        self.alice, self.bob, self.shared = self.users / "alice", self.users / "bob", root / "models"
        for folder in (self.alice, self.bob, self.shared):
            folder.mkdir(parents=True)
        self.job = make_job(self.alice)
        claim_run_folders(self.spec(self.job, "alice", "alice-1"))
        for step in (2, 4):
            save(Path(self.job.checkpoints.folder), step)
        (Path(self.job.output) / "model.safetensors").write_bytes(b"weights of alice")
        self.before = digest(self.alice)

    @property
    def rules(self) -> StorageRules:
        return StorageRules.model_validate(
            {"roots": [{"path": f"{self.users}/{{user}}"}, {"path": str(self.shared), "access": "read"}]}
        )

    def spec(self, job: Job, user: str, run: str, **more: Any) -> WorkerSpec:
        return WorkerSpec(run=run, attempt=1, rank=0, user=user, job=job, plan=whole(job), **more)

    def bobs_job(self, **changes: Any) -> Job:
        return make_job(self.bob, **changes)

    def attacks(self, by: Path | None = None) -> dict[str, dict[str, Any]]:
        """What bob can name of alice's, by the field in which he names it; through `by` instead of her folder."""
        there = by or self.alice
        return {
            "checkpoints.folder": {"checkpoints": {"folder": str(there / "checkpoints")}},
            "output": {"output": str(there / "output")},
            "resume": {"resume": str(there / "checkpoints")},
            "model": {"model": str(there / "output")},
            "data.paths": {"data": {"paths": [str(there / "output" / "*.safetensors")], "tokenizer": "bytes"}},
        }


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def save(folder: Path, step: int, keep: int = 2) -> None:
    """Write a checkpoint of one rank, as the job that has claimed the folder does."""
    write_rank_part(folder, [TensorShard.full("w", torch.full((2,), float(step)))], step=step, rank=0, write_id="1")
    assert publish(folder, step=step, samples=step, num_ranks=1, write_id="1", keep=keep)


def begin(spec: WorkerSpec) -> None:
    """What a worker does before it reads or writes a file of its job."""
    claim_run_folders(spec)
    check_resume(spec)


def digest(folder: Path) -> str:
    """A digest of every file below a folder."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        found.update(f"{file.relative_to(folder)}\0".encode() + (file.read_bytes() if file.is_file() else b""))
    return found.hexdigest()


FIELDS = ["checkpoints.folder", "output", "resume", "model", "data.paths"]


@pytest.mark.parametrize("field", FIELDS)
def test_without_a_policy_another_users_job_folder_is_refused(disk: Disk, field: str) -> None:
    """The worker refuses it before its first read or write, names no field of the other job, and changes nothing."""
    spec = disk.spec(disk.bobs_job(**disk.attacks()[field]), "bob", "bob-1")
    with pytest.raises(InputError, match=r"belongs to a job of another user|another user than 'bob'") as refused:
        begin(spec)
    assert "alice-1" not in str(refused.value)
    assert digest(disk.alice) == disk.before


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("way", ["by name", "by ..", "by a link", "by a link above"])
def test_with_roots_another_users_folder_is_refused_however_it_is_named(disk: Disk, field: str, way: str) -> None:
    """At the agent before the start and in the preflight; the error names path, user, roots and what to do."""
    by = disk.alice
    if way == "by ..":
        by = disk.bob / ".." / "alice"
    elif way == "by a link":
        by = disk.bob / "link"
        by.symlink_to(disk.alice)
    elif way == "by a link above":
        (disk.bob / "sub").mkdir()
        (disk.bob / "sub" / "up").symlink_to(disk.users)
        by = disk.bob / "sub" / "up" / "alice"
    job, storage = disk.bobs_job(**disk.attacks(by)[field]), SiteStorage(disk.rules)
    with pytest.raises(InputError) as refused:
        storage.resolve_job("bob-1", job, "bob")
    text = str(refused.value)
    assert field in text
    assert "'bob' may write below" in text
    assert f"{disk.bob};" in text
    assert "ask the owner of the site for a grant" in text
    context = CheckContext(site="here", user="bob", storage=storage)
    plan = whole(job)
    found = [run_check(one, context) for one in own_checks(job, plan, plan.clusters[0], "")]
    assert any(one.status == "failed" and "bob" in one.hint for one in found), found
    assert digest(disk.alice) == disk.before


@pytest.mark.parametrize("field", FIELDS)
def test_a_link_put_there_after_the_agents_check_is_found_by_the_worker(disk: Disk, field: str) -> None:
    """1. The agent checks a folder of bob. 2. Bob replaces it by a link to alice's. 3. The worker looks again."""
    mine = disk.bob / "mine"
    shutil.copytree(disk.alice, mine)
    shutil.rmtree(mine / "checkpoints/.isthmus-run")
    shutil.rmtree(mine / "output/.isthmus-run")
    if field in ("checkpoints.folder", "output"):
        shutil.rmtree(mine / "checkpoints")
        shutil.rmtree(mine / "output")
    storage = SiteStorage(disk.rules)
    job, allowed = storage.resolve_job("bob-1", disk.bobs_job(**disk.attacks(mine)[field]), "bob")
    shutil.rmtree(mine)
    mine.symlink_to(disk.alice)
    with pytest.raises(InputError, match=r"leads to .*alice.*, which lies outside the storage roots"):
        claim_run_folders(disk.spec(job, "bob", "bob-1", storage=allowed))
    assert digest(disk.alice) == disk.before


def test_a_link_to_a_folder_of_ones_own_put_there_after_the_check_is_found_too(disk: Disk) -> None:
    """The worker uses the places that the agent checked, and no others."""
    (disk.bob / "other").mkdir()
    job, allowed = SiteStorage(disk.rules).resolve_job("bob-1", disk.bobs_job(), "bob")
    (disk.bob / "checkpoints").symlink_to(disk.bob / "other")
    with pytest.raises(InputError, match="has become a symbolic link since the agent checked it"):
        claim_run_folders(disk.spec(job, "bob", "bob-1", storage=allowed))


@pytest.mark.parametrize("inside", ["checkpoints/step-00000004", "model/model.safetensors", "output/.export"])
def test_a_link_inside_a_folder_of_ones_own_leads_nowhere(disk: Disk, inside: str) -> None:
    """A checkpoint, a file of weights and the folder of the export are not read or written through a link."""
    targets = {"checkpoints/step-00000004": "checkpoints/step-00000004", "model/model.safetensors": "output"}
    job = disk.bobs_job()
    place = disk.bob / inside
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(disk.alice / targets.get(inside, "output"))
    job, allowed = SiteStorage(disk.rules).resolve_job("bob-1", job, "bob")
    with pytest.raises(InputError, match="outside the storage roots"):
        claim_run_folders(disk.spec(job, "bob", "bob-1", storage=allowed))


@pytest.mark.parametrize("path", ["loop/../alice", "loop/./../up/alice", "loop/../alice/checkpoints"])
@pytest.mark.parametrize("access", ["read", "write"])
def test_a_loop_of_links_hides_no_later_link(disk: Disk, path: str, access: Access) -> None:
    """What follows a link to itself is not left unresolved: the last link of the name leads to alice's home."""
    (disk.bob / "loop").symlink_to("loop")
    (disk.bob / "alice").symlink_to(disk.alice)
    (disk.bob / "up").symlink_to("..")
    with pytest.raises(InputError, match=r"loop of symbolic links|outside the storage roots"):
        SiteStorage(disk.rules).resolve("output", str(disk.bob / path), access, "bob")


def test_a_claim_that_names_the_attacker_proves_nothing_below_anothers_root(disk: Disk) -> None:
    """Ownership rests on the place, which the site's owner chose, and not on a file that the attacker may write."""
    folder = Path(disk.job.checkpoints.folder)
    claim = folder / ".isthmus-run/run.json"
    claim.write_text(claim.read_text().replace('"alice"', '"bob"').replace('"alice-1"', '"bob-1"'))
    job = disk.bobs_job(resume=str(folder))
    with pytest.raises(InputError, match="outside the storage roots"):
        SiteStorage(disk.rules).resolve_job("bob-1", job, "bob")


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="needs root to give files to another account; run: sudo .venv/bin/python -m pytest -m root tests/attack",
)
@pytest.mark.parametrize("field", ["checkpoints.folder", "resume"])
def test_a_claim_of_another_account_than_the_checkpoints_proves_nothing(disk: Disk, field: str) -> None:
    """Without roots: bob, who may write to the folder by an account of his own, replaces the claim of alice."""
    folder = Path(disk.job.checkpoints.folder)
    claim = folder / ".isthmus-run/run.json"
    claim.write_text(claim.read_text().replace('"alice"', '"bob"').replace('"alice-1"', '"bob-1"'))
    os.chown(claim, 65534, 65534)
    spec = disk.spec(disk.bobs_job(**disk.attacks()[field]), "bob", "bob-1")
    with pytest.raises(InputError, match="does not prove which job the folder belongs to"):
        begin(spec)


def test_a_forged_claim_makes_no_checkpoint_of_another_job_ones_own(disk: Disk) -> None:
    """Each checkpoint says which job wrote it: those of another job are neither loaded nor removed."""
    folder = Path(disk.job.checkpoints.folder)
    claim = folder / ".isthmus-run/run.json"
    claim.write_text(claim.read_text().replace('"alice-1"', '"bob-1"'))
    assert newest_valid(folder) is None
    for step in (6, 8, 10):
        save(folder, step)
    assert {one.name for one in folder.glob("step-*")} == {f"step-{step:08d}" for step in (2, 4, 8, 10)}


def test_a_checkpoint_of_another_job_is_neither_pruned_nor_overwritten(disk: Disk) -> None:
    """Bob's folder holds a copy and a link of alice's checkpoints; his job keeps one of its own."""
    spec = disk.spec(disk.bobs_job(), "bob", "bob-1")
    claim_run_folders(spec)
    folder, hers = Path(spec.job.checkpoints.folder), Path(disk.job.checkpoints.folder)
    shutil.copytree(hers / "step-00000002", folder / "step-00000001")
    (folder / "step-00000003").symlink_to(hers / "step-00000004")
    (folder / "step-00000007.1.tmp").symlink_to(hers / "step-00000004")
    clear_unfinished(folder)
    for step in (5, 6):
        save(folder, step, keep=1)
    assert {one.name for one in folder.glob("step-*")} == {
        "step-00000001", "step-00000003", "step-00000006", "step-00000007.1.tmp",
    }  # fmt: skip
    found = newest_valid(folder)
    assert found is not None
    assert (found.step, found.run) == (6, "bob-1")
    for step in (1, 3):
        with pytest.raises(UnavailableError, match="a link or a checkpoint of another job"):
            save(folder, step)
    assert digest(disk.alice) == disk.before


@pytest.mark.parametrize(
    "path", ["file:///{alice}/checkpoints", "local://{alice}/x", "simplecache::file://{alice}/x", "s3://b/%2e%2e/alice"]
)
def test_a_url_is_no_way_around_the_roots(disk: Disk, path: str) -> None:
    """URLs of files, chains of URLs and encoded parents are refused, also below a root that is a URL."""
    rules = disk.rules.model_copy(
        update={
            "roots": (*disk.rules.roots, *StorageRules.model_validate({"roots": [{"path": "s3://b/{user}"}]}).roots)
        }
    )
    job = disk.bobs_job(data={"paths": [path.format(alice=disk.alice)], "tokenizer": "bytes"})
    with pytest.raises(InputError, match="outside the storage roots"):
        SiteStorage(rules).resolve_job("bob-1", job, "bob")
    fine = disk.bobs_job(data={"paths": ["s3://b/bob/text"], "tokenizer": "bytes"})
    assert SiteStorage(rules).resolve_job("bob-1", fine, "bob")[0].data.paths == ("s3://b/bob/text",)


@pytest.mark.parametrize("user", ["..", "alice/../bob", "", "alice\0", "{user}", "a" * 300, "*"])
def test_a_name_that_is_no_users_name_has_no_roots(disk: Disk, user: str) -> None:
    """The server names the user: a name with parts of a path gets nothing, whatever it would expand to."""
    with pytest.raises(InputError, match="has no root at this site"):
        SiteStorage(disk.rules).resolve_job("bob-1", disk.bobs_job(), user)


def test_the_agent_starts_no_worker_for_anothers_folder(disk: Disk, tmp_path: Path) -> None:
    """By name the part is refused; by a link that is put there later, the part fails for good. No worker starts."""
    adapter = FakeAdapter()
    agent = AgentService(
        cluster=EAST, adapter=adapter, state=tmp_path / "state", clock=lambda: 0.0,
        policy=OwnerPolicy(storage=disk.rules),
    )  # fmt: skip
    named = disk.bobs_job(resume=str(disk.alice / "checkpoints"), output=str(disk.alice / "output"))
    agent.apply_orders(orders(order("prepared", user="bob").model_copy(update={"spec": named})))
    (seen,) = agent.observed_parts()
    assert seen.state == "refused"
    assert "output" in seen.detail
    assert "outside the storage roots of user 'bob'" in seen.detail
    linked = disk.bobs_job(output=str(disk.bob / "result"))
    for desired in ("prepared", "running"):
        wanted = order(desired, "b", user="bob").model_copy(update={"spec": linked})
        agent.apply_orders(orders(wanted))
        (disk.bob / "result").unlink(missing_ok=True)
        (disk.bob / "result").symlink_to(disk.alice / "output")
    (seen,) = (one for one in agent.observed_parts() if one.job == "b")
    assert (seen.state, seen.fault) == ("failed", "permanent")
    assert "leads to" in seen.detail
    assert adapter.started == []
    assert digest(disk.alice) == disk.before


def test_a_file_of_the_agent_is_not_written_through_a_link(tmp_path: Path) -> None:
    """A worker that foresees the temporary name of an agent's file gains nothing by a link there."""
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    (tmp_path / f".ranks.json.{os.getpid()}.tmp").symlink_to(theirs)
    write_atomically(tmp_path / "ranks.json", "new")
    assert (theirs.read_text(), (tmp_path / "ranks.json").read_text()) == ("kept", "new")


def test_a_grant_lets_another_user_read_and_no_more(disk: Disk) -> None:
    """Of the site's owner for all roots or one folder; of the job's user by `readers`; none lets anyone write."""
    resume = disk.bobs_job(resume=str(disk.alice / "checkpoints"))
    write = disk.bobs_job(output=str(disk.alice / "new"))
    for grant in ({"to": "bob", "owner": "alice"}, {"to": "bob", "path": str(disk.alice / "checkpoints")}):
        rules = StorageRules.model_validate(disk.rules.model_dump() | {"grants": [grant]})
        job, allowed = SiteStorage(rules).resolve_job("bob-1", resume, "bob")
        begin(disk.spec(job, "bob", "bob-1", storage=allowed))
        with pytest.raises(InputError, match=r"may only be read|outside the storage roots"):
            SiteStorage(rules).resolve_job("bob-1", write, "bob")
        with pytest.raises(InputError, match="outside the storage roots"):
            SiteStorage(rules).resolve_job("c-1", resume, "carol")


def test_the_readers_of_a_job_may_resume_from_it(disk: Disk) -> None:
    """The claim of a folder below alice's own root says so: only her jobs write there."""
    shared = make_job(disk.alice / "shared", readers=["bob"])
    claim_run_folders(disk.spec(shared, "alice", "alice-2"))
    save(Path(shared.checkpoints.folder), 3)
    storage = SiteStorage(disk.rules)
    wanted = disk.bobs_job(resume=shared.checkpoints.folder)
    job, allowed = storage.resolve_job("bob-1", wanted, "bob")
    claim_run_folders(disk.spec(job, "bob", "bob-1", storage=allowed))
    context = CheckContext(site="here", user="bob", storage=storage)
    plan = whole(wanted)
    found = {one.name: one for one in (run_check(one, context) for one in own_checks(wanted, plan, "a", ""))}
    assert found["resume"].status == "passed", found["resume"]
    with pytest.raises(InputError, match="outside the storage roots"):
        storage.resolve_job("carol-1", wanted, "carol")
    with pytest.raises(InputError, match="outside the storage roots"):
        storage.resolve_job("bob-1", disk.bobs_job(output=shared.checkpoints.folder), "bob")


@pytest.mark.parametrize("seed", range(3))
def test_no_seeded_path_leads_out_of_the_roots(tmp_path: Path, seed: int) -> None:
    """Names, links, `..`, doubled slashes and wildcards at random: what is admitted lies in the user's own places."""
    num_admitted, escaped = attack_paths(tmp_path, 1_000, seed)
    assert num_admitted > 10, "an attack on rules that admit nothing proves nothing"
    assert escaped == []


def test_a_run_that_is_its_users_goes_on(disk: Disk) -> None:
    """What the rules are for still works: alice trains on, and bob reads a shared model."""
    storage = SiteStorage(disk.rules)
    job, allowed = storage.resolve_job("alice-1", disk.job, "alice")
    claim_run_folders(disk.spec(job, "alice", "alice-1", storage=allowed))
    found = newest_valid(Path(job.checkpoints.folder))
    assert found is not None
    assert (found.step, found.run) == (4, "alice-1")
    shutil.copytree(disk.alice / "model", disk.shared / "tiny")
    job, allowed = storage.resolve_job("bob-1", disk.bobs_job(model=str(disk.shared / "tiny")), "bob")
    claim_run_folders(disk.spec(job, "bob", "bob-1", storage=allowed))
    with pytest.raises(InputError, match="may only be read"):
        claim_folder_of(storage, str(disk.shared / "tiny"))


def claim_folder_of(storage: SiteStorage, folder: str) -> None:
    """Let bob write to a folder."""
    place = Path(storage.resolve("output", folder, "write", "bob"))
    claim_folder(place, "output", "bob-1", lambda: pytest.fail("the folder must be refused before it is claimed"))
