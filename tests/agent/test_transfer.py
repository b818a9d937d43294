"""Files fetched from another site: verified, resumed, their progress reported; and the part that waits for them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from isthmus.agent.files.file_fetcher import FetchStatus, FileFetcher
from isthmus.agent.files.file_transfer import (
    CommandSource,
    FolderSource,
    fetch_job_files,
    job_paths,
    read_sources,
    storage_path,
)
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.service.agent_state_folder import worker_spec
from isthmus.core.errors import FileError, UnavailableError
from isthmus.core.job import Job, ResumeSource
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import FetchFiles, FetchObserved, SiteInstruction
from tests.site.driver import Site
from tests.site.samples import EAST, INVENTORY, JOB, order

CHECKPOINT = "checkpoints/step-00000004"


def put(root: Path, **files: bytes) -> None:
    """Write files; `__` in a name stands for `/`."""
    for name, data in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


@pytest.fixture
def north(tmp_path: Path) -> Path:
    """A site's storage with all that `DRY_RUN_JOB_ID` needs, and what a crash has left."""
    root = tmp_path / "north"
    put(root, model__config=b"{}", text=b"a" * 3_000_000)
    put(root / CHECKPOINT, manifest=b"m", rank=b"r" * 2_000_000)
    put(root / "checkpoints" / "step-00000005.tmp", rank=b"half")
    return root


def fetch(north: Path, south: Path, job: Job = JOB) -> list[tuple[int, int]]:
    """Bring all of a job from north to south; return the progress that was reported."""
    told: list[tuple[int, int]] = []
    fetch_job_files(job, ["north"], {"north": FolderSource(north)}, south, lambda *seen: told.append(seen))
    return told


def test_all_that_a_job_needs_comes_and_nothing_unfinished(north: Path, tmp_path: Path) -> None:
    """Checkpoints, model and data, with progress in bytes; a second time nothing is copied."""
    south = tmp_path / "south"
    told = fetch(north, south)
    assert (south / CHECKPOINT / "rank").read_bytes() == (north / CHECKPOINT / "rank").read_bytes()
    assert (south / "text").stat().st_size == 3_000_000
    assert not list(south.rglob("*.tmp"))
    assert told[:2] == [(1, 2_000_001), (2_000_001, 2_000_001)]
    before = (south / "text").stat().st_mtime_ns
    fetch(north, south)
    assert (south / "text").stat().st_mtime_ns == before


@pytest.mark.parametrize("left", [b"a" * 2_000_000, b"b" * 2_000_000, b"a" * 4_000_000])
def test_a_copy_that_was_cut_off_goes_on_and_ends_right_whatever_is_left(
    north: Path, tmp_path: Path, left: bytes
) -> None:
    """What is left is used where it is the beginning; else the checksum shows it, and all is copied again."""
    south = tmp_path / "south"
    put(south, **{"text.part": left})
    fetch(north, south)
    assert (south / "text").read_bytes() == (north / "text").read_bytes()
    assert not (south / "text.part").exists()


def test_a_damaged_file_of_the_same_size_is_copied_again(north: Path, tmp_path: Path) -> None:
    """Size is no proof."""
    south = tmp_path / "south"
    put(south, text=b"b" * 3_000_000)
    fetch(north, south)
    assert (south / "text").read_bytes() == (north / "text").read_bytes()


def test_without_a_source_the_files_cannot_be_had(tmp_path: Path) -> None:
    """To start from the beginning would lose the work."""
    with pytest.raises(UnavailableError, match="no source for the job's files at north"):
        fetch_job_files(JOB, ["north"], {}, tmp_path, lambda *_: None)
    with pytest.raises(UnavailableError, match="no source for the job's files at north"):
        fetch_job_files(JOB, ["north"], {}, tmp_path, lambda *_: None, with_checkpoints=False)


def test_model_and_data_that_are_here_need_no_source(tmp_path: Path) -> None:
    """A new site of a job whose other sites have the checkpoints starts with its own copy of model and data."""
    for path in job_paths(JOB, with_checkpoints=False):
        storage_path(tmp_path, path).mkdir(parents=True, exist_ok=True)
    assert JOB.checkpoints.folder not in job_paths(JOB, with_checkpoints=False)
    fetch_job_files(JOB, ["north"], {}, tmp_path, lambda *_: None, with_checkpoints=False)


def test_a_command_copies_and_its_failure_is_told(tmp_path: Path) -> None:
    """`{path}` and `{target}` are filled in; the last words of standard error are the reason."""
    copy = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)"
    put(tmp_path / "north", model__config=b"{}")
    source = CommandSource((sys.executable, "-c", copy, f"{tmp_path}/north/{{path}}", "{target}"))
    assert source.fetch("/model", tmp_path / "south" / "model", lambda *_: None)
    assert (tmp_path / "south" / "model" / "config").read_bytes() == b"{}"
    with pytest.raises(UnavailableError, match="No such file"):
        source.fetch("/nothing", tmp_path / "south" / "nothing", lambda *_: None)


def test_sources_are_read_and_broken_ones_named(tmp_path: Path) -> None:
    """A folder or the words of a command, by cluster."""
    file = tmp_path / "sources.json"
    file.write_text('{"north": "/mnt/north", "west": ["rsync", "west:/{path}", "{target}"]}')
    assert read_sources(file) == {
        "north": FolderSource(Path("/mnt/north")),
        "west": CommandSource(("rsync", "west:/{path}", "{target}")),
    }
    file.write_text('{"north": 3}')
    with pytest.raises(FileError, match="sources are JSON"):
        read_sources(file)


def at_site(job: Job) -> Job:
    """Return job `j` as a site with its storage in `/site` sees it."""
    return SiteStorage(root=Path("/site")).resolve_job("j", job, "")[0]


def test_a_jobs_paths_lie_below_the_sites_storage() -> None:
    """Absolute and relative alike; URLs stay; nothing climbs out."""
    job = JOB.model_copy(update={"output": "/pool/out", "model": "../../etc"})
    data = JOB.data.model_copy(update={"paths": ("s3://texts/a", "/pool/text")})
    here = at_site(job.model_copy(update={"data": data}))
    assert (here.output, here.model, here.checkpoints.folder) == (
        "/site/pool/out",
        "/site/etc",
        "/site/checkpoints",
    )
    assert here.data.paths == ("s3://texts/a", "/site/pool/text")
    assert storage_path(Path("/site"), "/a/../b") == Path("/site/a/b")


def test_the_folder_to_resume_from_lies_in_the_storage_and_is_fetched() -> None:
    """Given as a path or as the server's description; a job to resume is none of the site's paths."""
    for source in ("/old/ck", ResumeSource(folder="/old/ck", job="old-1")):
        job = JOB.model_copy(update={"resume": source})
        assert at_site(job).resume_folder == "/site/old/ck"
        assert "/old/ck" in job_paths(job)
    named = JOB.model_copy(update={"resume": "old-1"})
    assert at_site(named).resume == "old-1"
    assert job_paths(named) == job_paths(JOB)


def test_fetches_go_on_beside_the_agent_and_are_told_of_to_their_end(north: Path, tmp_path: Path) -> None:
    """One a job, however often it is ordered; a failed one may be begun again."""
    fetches = FileFetcher(tmp_path / "south", {"north": FolderSource(north)})
    fetches.start("j", JOB, ["north"])
    fetches.start("j", JOB, ["nowhere"])
    assert _ended(fetches, "j") == FetchStatus(progress_text="", complete=True)
    assert fetches.poll() == {}
    fetches.start("j", JOB, ["nowhere"])
    assert _ended(fetches, "j").failed


def test_what_is_free_of_a_storage_is_told_if_it_can_be(tmp_path: Path) -> None:
    """The server promises no more than that; a storage that is away says nothing."""
    free = FileFetcher(tmp_path, {}).free_bytes()
    assert free is not None
    assert free > 0
    assert FileFetcher(tmp_path / "away", {}).free_bytes() is None


def _ended(fetches: FileFetcher, job: str) -> FetchStatus:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        fetch = fetches.poll()[job]
        if fetch.complete or fetch.failed:
            return fetch
    raise AssertionError("the fetch does not end")


class Fetching(Site):
    """A site with a storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = SiteMachine("east", DeviceIdAllocator(INVENTORY), has_own_storage=True)

    def files(self, words: str = "", **seen: bool) -> list[SiteInstruction]:
        return self.handle(FetchObserved(now_s=self.now_s, job="a", progress_text=words, **seen))


def test_a_part_is_prepared_once_its_files_are_here() -> None:
    """Its devices are held meanwhile, its progress is reported; a repeated order starts no second transfer."""
    site = Fetching()
    wants = order("prepared", files_at=("north", "west"))
    (step,) = site.obey(wants)
    assert isinstance(step, FetchFiles)
    assert (step.clusters, step.with_checkpoints) == (("north", "west"), False), "north is in the plan"
    assert site.states == {"a/1": "ready"}
    site.files("half of it")
    assert (site.states, site.detail()) == ({"a/1": "ready"}, "half of it")
    site.files(complete=True)
    assert site.states == {"a/1": "prepared"}
    assert site.obey(wants) == []


def test_without_a_site_that_has_them_the_checkpoints_are_fetched_too() -> None:
    """The job moves to sites that have never run it."""
    (step,) = Fetching().obey(order("prepared", files_at=("south",)))
    assert isinstance(step, FetchFiles)
    assert step.with_checkpoints


def test_with_an_object_store_no_checkpoints_are_fetched() -> None:
    """The workers read there what they need; sites that have never run the job need no source for checkpoints."""
    wants = order("prepared", files_at=("south",))
    assert wants.spec is not None
    checkpoints = wants.spec.checkpoints.model_copy(update={"copy_store": "s3://pool/copies"})
    spec = wants.spec.model_copy(update={"checkpoints": checkpoints})
    (step,) = Fetching().obey(wants.model_copy(update={"spec": spec}))
    assert isinstance(step, FetchFiles)
    assert not step.with_checkpoints


def test_a_site_of_the_last_attempt_fetches_nothing() -> None:
    """It has its own parts of the checkpoints; workers of the other sites send theirs."""
    site = Fetching()
    assert site.obey(order("prepared", files_at=("east", "north"))) == []
    assert site.states == {"a/1": "prepared"}


def test_a_part_whose_files_cannot_be_had_is_refused_with_the_reason() -> None:
    """Its devices are free again."""
    site = Fetching()
    site.obey(order("prepared", files_at=("north",)))
    site.files("no way to north", failed=True)
    assert (site.states, site.detail()) == ({"a/1": "refused"}, "east: no way to north")
    assert site.machine.free_chips()["h20"] == 3


def test_after_a_restart_the_files_are_asked_for_again() -> None:
    """The agent that was bringing them is gone; the part does not start without them."""
    site = Fetching()
    wants = order("prepared", files_at=("north",))
    site.obey(wants)
    site.machine = SiteMachine(
        "east", DeviceIdAllocator(INVENTORY), list(site.machine.parts.values()), has_own_storage=True
    )
    site.wait(1)
    assert site.states == {"a/1": "ready"}
    assert [type(step) for step in site.obey(wants)] == [FetchFiles]


def test_a_site_that_shares_its_files_fetches_none() -> None:
    """Without a storage of its own."""
    site = Site()
    assert site.obey(order("prepared", files_at=("north",))) == []
    assert site.states == {"a/1": "prepared"}


def test_a_copy_command_that_hangs_ends_with_an_error(tmp_path: Path) -> None:
    """It is killed at its limit, and the error names the command and what to check."""
    source = CommandSource(("sleep", "60"), limit_s=0.05)
    with pytest.raises(UnavailableError, match=r"'sleep 60' has not finished within 0\.05 s \(check the link"):
        source.fetch("text", tmp_path / "text", lambda *_: None)


@pytest.mark.parametrize("files_at", [(), ("north",), ("east",)])
def test_workers_learn_whether_the_job_has_trained_before(files_at: tuple[str, ...]) -> None:
    """Then unclaimed files in its folders, written under an earlier release, are its own."""
    site = Site()
    site.obey(order("prepared", files_at=files_at))
    (part,) = site.machine.parts.values()
    assert worker_spec(part, 0, EAST, host="127.0.0.1", routes={}, storage=SiteStorage()).has_trained is bool(files_at)
