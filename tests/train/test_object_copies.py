"""Rules of copies in an object store: what a store sees, what is restored from it, and what its owner cannot do."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.core.errors import UnavailableError
from isthmus.core.job import CheckpointConfig
from isthmus.core.rights.storage_rules import StorageRules
from isthmus.train.checkpoint.checkpoint_folder import CheckpointFile, Manifest, read_manifests
from isthmus.train.checkpoint.layout.checkpoint_layout import StoredShard
from isthmus.train.checkpoint.layout.shard_files import rank_file_name
from isthmus.train.checkpoint.objects.object_copies import ObjectCopies
from isthmus.train.checkpoint.objects.object_seal import (
    HEAD_BYTES,
    PIECE_BYTES,
    ObjectSeal,
    contents_bytes,
    sealed_bytes,
)
from isthmus.train.checkpoint.objects.object_store import ObjectStore
from tests.train.site_ranks import Meet, Rank, part_of, restore, save
from tests.train.worker_jobs import at_site, keys_of, make_job, make_plan, run_job, started, whole

pytestmark = pytest.mark.integration

KEY = bytes(range(32))
SITES = ("north", "south", "west")


def copies_in(folder: Path, run: str = "job-1", key: bytes = KEY) -> ObjectCopies:
    """Copies in an object store that is a folder."""
    store = ObjectStore(LocalFileSystem(auto_mkdir=True, skip_instance_cache=True), str(folder / "store"))
    return ObjectCopies(store, key, run, sleep=lambda _: None)


def objects_of(folder: Path, step: int = 5, run: str = "job-1") -> dict[str, Path]:
    """The objects of a checkpoint by the name of their file."""
    (place,) = (folder / "store" / run).glob(f"step-{step:08d}.*")
    return {one.name: one for one in place.iterdir()}


@given(st.integers(0, 5 * PIECE_BYTES), st.data())
def test_any_range_of_an_object_opens_alone(num_bytes: int, data: st.DataObject) -> None:
    """Sizes follow from each other, and consecutive pieces give the bytes of their range."""
    contents = hashlib.shake_128(num_bytes.to_bytes(8)).digest(num_bytes)
    seal = ObjectSeal(KEY, "job/a", b"s" * 16, num_bytes)
    pieces = [contents[at : at + PIECE_BYTES] for at in range(0, num_bytes, PIECE_BYTES)]
    sealed = seal.head + b"".join(seal.seal(number, one) for number, one in enumerate(pieces))
    assert len(sealed) == sealed_bytes(num_bytes)
    assert contents_bytes(len(sealed)) == num_bytes
    first = data.draw(st.integers(0, seal.num_pieces))
    end = data.draw(st.integers(first, seal.num_pieces))
    begin, stop = seal.span(first, end)
    assert seal.open(first, sealed[begin:stop]) == contents[first * PIECE_BYTES : end * PIECE_BYTES]


def test_a_reader_reads_ranges_over_pieces_and_little_more(tmp_path: Path) -> None:
    """Reads that follow each other fetch each piece once, whatever their bounds."""
    contents = torch.randint(0, 255, (9 * PIECE_BYTES + 77,), dtype=torch.uint8)
    copies, file = copies_in(tmp_path), tmp_path / rank_file_name(0)
    file.write_bytes(contents.numpy().tobytes())
    described = CheckpointFile(
        name=file.name, num_bytes=len(contents), sha256=hashlib.sha256(file.read_bytes()).hexdigest()
    )
    copies.put_file((5, "a1"), file, described)
    manifest = Manifest(step=5, samples=1, num_ranks=1, files=(described,), write_id="a1", run="job-1")
    reader = copies.reader(manifest)
    stored = StoredShard(
        name="w", dtype="uint8", shape=contents.shape, offsets=(0,), sizes=contents.shape, file=file.name, start_byte=0
    )
    found = bytearray(len(contents))
    for begin in range(0, len(contents), 50_001):
        reader.read_at(stored)(begin, memoryview(found)[begin : begin + 50_001])
    assert bytes(found) == file.read_bytes()
    assert reader.num_bytes <= len(contents) * 1.05
    changed = described.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(UnavailableError, match="has changed since it was written"):
        copies.put_file((6, "a1"), file, changed)


@pytest.mark.attack
def test_a_store_sees_names_and_sizes_and_no_weights(meet: Meet, tmp_path: Path) -> None:
    """Every part, the layout and the manifest are there; none of their contents is."""
    objects = copies_in(tmp_path)
    save(meet(*SITES), 5, copies=0, objects=objects)
    found = objects_of(tmp_path)
    assert sorted(found) == sorted([*map(rank_file_name, range(3)), "layout.json", "manifest.json"])
    for rank in range(3):
        row = part_of(rank, 3, 5).tensor[0].numpy().tobytes()
        assert row not in found[rank_file_name(rank)].read_bytes()
    assert b"weight" not in b"".join(one.read_bytes() for one in found.values())
    assert next(read_manifests(tmp_path / "north")).in_object_store


def test_a_site_that_left_is_replaced_by_the_object_store(meet: Meet, tmp_path: Path) -> None:
    """Without copies at other sites its bytes come from the store, and only those that no site has."""
    objects = copies_in(tmp_path)
    save(meet(*SITES), 5, copies=0, objects=objects)
    shutil.rmtree(tmp_path / "west")
    found = restore(meet("south", "east", "north"), objects)
    assert [step for step, _ in found] == [5, 5, 5]
    read = sum(one.moved for _, one in found)
    parts = [objects_of(tmp_path)[rank_file_name(rank)].stat().st_size for rank in range(3)]
    assert 0 < read <= sum(one.needed for _, one in found) + parts[2], "of the store at most the part of west"


def test_all_sites_may_be_lost(meet: Meet, tmp_path: Path) -> None:
    """Other sites, and another number of them, restore from the store alone; later ones do as well."""
    objects = copies_in(tmp_path)
    for step in (3, 5):
        save(meet(*SITES), step, copies=0, objects=objects, write_id=f"{step}a")
    for site in SITES:
        shutil.rmtree(tmp_path / site)
    assert [step for step, _ in restore(meet("east", "centre"), objects)] == [5, 5]


def test_the_store_keeps_the_newest(meet: Meet, tmp_path: Path) -> None:
    """`keep` checkpoints remain, and what a crash left without a manifest goes at the next start."""
    objects, sites = copies_in(tmp_path), meet(*SITES)
    for step in (1, 2, 3):
        save(sites, step, objects=objects, write_id=f"{step}a")
    assert [step for step, _ in objects.checkpoints()] == [3, 2]
    left = tmp_path / "store" / "job-1" / "step-00000004.bb"
    left.mkdir()
    (left / rank_file_name(0)).write_bytes(b"cut")
    (tmp_path / "store" / "job-1" / "notes.txt").write_text("of another program")
    assert [step for step, _ in restore(meet(*SITES), objects)] == [3, 3, 3]
    assert not left.exists()
    assert (tmp_path / "store" / "job-1" / "notes.txt").exists()


def test_a_manifest_in_the_store_completes_the_sites(meet: Meet, tmp_path: Path) -> None:
    """1. The manifest is in the store. 2. All sites stop before they publish. 3. The next start publishes at all."""
    objects = copies_in(tmp_path)
    save(meet(*SITES), 5, write_id="b2", objects=objects)
    for site in SITES:
        place = tmp_path / site / "step-00000005"
        (place / "manifest.json").unlink()
        (place / "layout.json").unlink()
        place.rename(tmp_path / site / "step-00000005.b2.tmp")
    found = restore(meet(*SITES), objects)
    assert [(step, one.moved) for step, one in found] == [(5, 0)] * 3
    for site in SITES:
        assert [one.step for one in read_manifests(tmp_path / site)] == [5]


def test_a_store_that_refuses_fails_the_checkpoint_everywhere(meet: Meet, tmp_path: Path) -> None:
    """The reason reaches all ranks, the checkpoint before stays, and nothing of the failed one is left."""
    objects, sites = copies_in(tmp_path), meet(*SITES)
    save(sites, 1, objects=objects)
    blocked = tmp_path / "store" / "job-1" / "step-00000002.b2"
    blocked.write_text("a file where the folder would be")

    def attempt(one: Rank) -> str:
        with pytest.raises(UnavailableError) as caught:
            one.save(2, [part_of(one.rank, 3, 2)], objects=objects, write_id="b2")
        return caught.value.message

    assert all("the checkpoint after step 2 failed: rank" in one for one in sites.each(attempt))
    for site in SITES:
        assert [one.step for one in read_manifests(tmp_path / site)] == [1]
    assert [step for step, _ in restore(meet(*SITES), objects)] == [1, 1, 1]


def damage(found: dict[str, Path], earlier: dict[str, Path], kind: str) -> None:
    """Change the object of rank 2 as the owner of a store might."""
    mine, data = found[rank_file_name(2)], found[rank_file_name(2)].read_bytes()
    match kind:
        case "flipped":
            mine.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "truncated":
            mine.write_bytes(data[:-1])
        case "longer":
            mine.write_bytes(data + data)
        case "other part":
            shutil.copy(found[rank_file_name(1)], mine)
        case "other version":
            shutil.copy(earlier[rank_file_name(2)], mine)
        case "other salt":
            mine.write_bytes(data[:4] + bytes(16) + data[HEAD_BYTES:])
        case "other magic":
            mine.write_bytes(b"!" + data[1:])
        case "endless":
            mine.unlink()
            mine.symlink_to("/dev/zero")


@pytest.mark.attack
@pytest.mark.parametrize(
    "kind",
    ["flipped", "truncated", "longer", "other part", "other version", "other salt", "other magic", "endless"],
)
def test_an_object_that_was_changed_or_exchanged_is_refused(meet: Meet, tmp_path: Path, kind: str) -> None:
    """The owner of the store changes, cuts, lengthens or exchanges an object: no byte of it is restored."""
    objects = copies_in(tmp_path)
    for step in (3, 5):
        save(meet(*SITES), step, copies=0, objects=objects, write_id=f"{step}a")
    for site in SITES:
        shutil.rmtree(tmp_path / site)
    damage(objects_of(tmp_path, 5), objects_of(tmp_path, 3), kind)
    sites = meet("east")
    if kind in ("truncated", "longer", "endless"):  # its size says so: the checkpoint before it counts
        assert [step for step, _ in restore(sites, objects)] == [3]
        return
    with pytest.raises(UnavailableError, match="is refused: it was changed, cut or exchanged"):
        restore(sites, objects)


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["flipped", "of another job", "of another step", "giant"])
def test_a_manifest_of_another_job_or_step_is_refused(meet: Meet, tmp_path: Path, kind: str) -> None:
    """The owner of the store offers a manifest that this job has not written for that checkpoint."""
    objects, other = copies_in(tmp_path), copies_in(tmp_path, "job-2", bytes(32))
    save(meet(*SITES), 3, copies=0, objects=objects, write_id="3a")
    save(meet(*SITES), 5, copies=0, objects=objects, write_id="5a")
    save(meet(*SITES), 5, copies=0, objects=other, write_id="6a")
    for site in SITES:
        shutil.rmtree(tmp_path / site)
    mine = objects_of(tmp_path, 5)["manifest.json"]
    match kind:
        case "flipped":
            *whole, last = mine.read_bytes()
            mine.write_bytes(bytes([*whole, last ^ 1]))
        case "of another job":
            shutil.copy(objects_of(tmp_path, 5, "job-2")["manifest.json"], mine)
        case "of another step":
            shutil.copy(objects_of(tmp_path, 3)["manifest.json"], mine)
        case "giant":
            with mine.open("r+b") as stream:
                stream.truncate(1 << 40)
    with pytest.raises(UnavailableError, match=r"manifest\.json of checkpoints\.copy_store is refused"):
        restore(meet("east"), objects)


@pytest.mark.attack
def test_names_of_objects_lead_nowhere_else(tmp_path: Path) -> None:
    """No name has a part that leads out of the job's folder, and a store's own names are taken only if they fit."""
    store = ObjectStore(LocalFileSystem(auto_mkdir=True), str(tmp_path / "store"))
    for name in ("../x", "job-1/../../x", "job-1//x", "/x", "."):
        for act in (lambda: store.write(name, [b""]), lambda: store.read(name, 0, 1), lambda: store.size(name)):  # noqa: B023
            with pytest.raises(UnavailableError):
                act()
        store.remove(name)
    assert not (tmp_path / "x").exists()

    class Listing(MemoryFileSystem):
        cachable = False

        def ls(self, path: str, detail: bool = True, **_: object) -> list[str]:  # type: ignore[override]
            return ["../../etc", "step-1", "step-00000001.zz", "step-00000002.aa", "step-00000003.a/../..", "/"]

    assert ObjectCopies(ObjectStore(Listing(), "root"), KEY, "job-1").checkpoints() == [(2, "aa")]


@pytest.mark.attack
def test_a_read_gets_what_it_asked_for_or_nothing() -> None:
    """A store answers a range with fewer bytes, with more, or with an error that quotes a secret."""

    class Odd(MemoryFileSystem):
        cachable = False
        answer: bytes | Exception = b""

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    odd = Odd()
    for odd.answer in (b"", b"abc", b"abcde", ValueError("key AKIASECRET is wrong")):
        with pytest.raises(UnavailableError) as caught:
            ObjectStore(odd, "root").read("a", 0, 4)
        assert "AKIASECRET" not in str(caught.value)


@pytest.mark.attack
@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:SECRET@bucket/a", "s3://bucket/../other", "s3://bucket//a", "simplecache::s3://bucket/a",
        "http://169.254.169.254/a", "reference://a", "s3://bucket/%2e%2e/a", "s3://bucket/a?versionId=1", "s3://",
        "ftp://host/a", "S3://bucket/a", "memory://a",
    ],
)  # fmt: skip
def test_a_store_is_a_plain_url_without_credentials(url: str) -> None:
    """Credentials, chains, queries, parents and other protocols in the URL are refused where the job is read."""
    with pytest.raises(ValidationError):
        CheckpointConfig(copy_store=url)


def test_a_misspelt_kind_of_store_names_the_nearest() -> None:
    """The error says which kinds there are."""
    with pytest.raises(ValidationError, match="'s4' is no object store; nearest: s3"):
        CheckpointConfig(copy_store="s4://bucket/a")


@pytest.mark.attack
@pytest.mark.parametrize(
    "url",
    ["s3://pool/copies/eve/a", "s3://other/copies/demo", "s3://pool/copies", "file:///data", "gs://pool/copies/demo"],
)
def test_an_owner_says_which_stores_its_users_may_use(url: str) -> None:
    """With storage roots, only a store below a root of the user passes; no agent of that owner starts the job."""
    allowed = StorageRules.model_validate({"roots": [{"path": "s3://pool/copies/{user}"}]}).of_user("demo")
    assert allowed is not None
    assert allowed.problem("s3://pool/copies/demo/runs", "write") == ""
    assert "outside the storage roots of user 'demo'" in allowed.problem(url, "write")


def test_a_job_without_a_store_says_so(meet: Meet, tmp_path: Path) -> None:
    """Its manifests do not send a restart to one."""
    save(meet(*SITES), 5)
    assert not next(read_manifests(tmp_path / "north")).in_object_store


@pytest.mark.slow
def test_a_run_goes_on_from_the_store_alone_at_other_sites(tmp_path: Path) -> None:
    """Real workers of two sites that share nothing save to a store and are killed; no site of theirs is left.

    1. Two sites train to a checkpoint, with no copies but those in the store. 2. Both are lost with their disks. 3. Two
    other sites go on with another plan; the losses are those of a run that was never interrupted.
    """
    url = f"file://{tmp_path}/store"
    job = make_job(tmp_path, steps=15, checkpoints={"every_steps": 3, "copies": 0, "copy_store": url})
    alone = job.model_copy(update={"checkpoints": job.checkpoints.model_copy(update={"copy_store": None})})
    expected = run_job(tmp_path / "reference", alone, make_plan(job, [2, 4])).losses()
    with started(tmp_path, [at_site(job, tmp_path / one) for one in SITES[:2]], make_plan(job, [2, 4])) as workers:
        workers.wait_for_step(2)
        workers.wait_for_checkpoint()
    for site in SITES[:2]:
        shutil.rmtree(tmp_path / site)
    jobs = [at_site(job, tmp_path / one) for one in ("east", "centre")]
    again = run_job(tmp_path, jobs, make_plan(job, [1, 4]), attempt=2, has_trained=True)
    assert "from the object store" in again.log(0)
    assert again.losses() == pytest.approx(expected[-len(again.losses()) :], abs=1e-6)
    assert 0 < len(again.losses()) <= 12
    secret = keys_of("a", make_plan(job, [2, 4])).copies
    assert secret is not None
    assert not any(secret in file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.slow
def test_one_site_alone_uses_a_store(tmp_path: Path) -> None:
    """A job of one process at one site saves to the store, loses its disk, and goes on at another."""
    url = f"file://{tmp_path}/store"
    job = make_job(tmp_path, steps=4, checkpoints={"every_steps": 2, "copy_store": url})
    first = run_job(tmp_path, at_site(job, tmp_path / "north"), whole(job))
    longer = at_site(job, tmp_path / "south")
    longer = longer.model_copy(update={"training": longer.training.model_copy(update={"steps": 6})})
    shutil.rmtree(tmp_path / "north")
    again = run_job(tmp_path, longer, whole(job), attempt=2, has_trained=True)
    assert (len(first.losses()), len(again.losses())) == (4, 2)
    assert "received" in again.log(0)
