"""Workers in real containers: what they see, what holds them, and that none outlives its worker."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.adapters.local_adapter import LocalAdapter
from isthmus.agent.adapters.scheduler_adapter import RankStart
from isthmus.agent.containers.image_tool import build_image, unpack_image
from isthmus.agent.containers.part_renderer import PartRenderer
from isthmus.agent.containers.part_rendering import RENDER_FILE
from isthmus.agent.containers.read_images import read_images
from isthmus.agent.containers.worker_containers import BUNDLE, WorkerContainers
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.files.version_cache import VersionCache
from isthmus.core.catalogue import CopyKey
from isthmus.core.errors import InputError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.rights.storage_rules import AllowedStorage, StorageRoot, StorageRules
from isthmus.core.rights.worker_rights import ContainerRules, WorkerRights
from isthmus.render import ImageFacts, settings_document
from tests.control.catalogued import manifest
from tests.render.samples import make_job
from tests.until import until

HOST = ImageFacts(host_files=True, libraries={"isthmus": {}})  # type: ignore[dict-item]
LIMIT_BYTES = 256 << 20


@functools.cache
def why_not() -> str:
    """Return why containers cannot run here, or "": root, the two tools, and control groups that may be written."""
    if os.geteuid() != 0:
        return "containers need root"
    missing = [tool for tool in ("runc", "umoci") if shutil.which(tool) is None]
    if missing:
        return f"to run this: sudo apt-get install -y {' '.join(missing)}"
    groups = Path("/sys/fs/cgroup/memory")
    return "" if os.access(groups, os.W_OK) or Path("/sys/fs/cgroup/cgroup.procs").exists() else "no control groups"


pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.skipif(bool(why_not()), reason=why_not())]


class Site:
    """A site with one image, whose workers run `program` (Python) in containers."""

    def __init__(self, folder: Path, facts: ImageFacts = HOST) -> None:
        self.folder = folder
        build_image(folder / "images", "host", "1", facts)
        group = {"chip": "CPU-core", "nodes": 1, "chips_per_node": 2, "cpus_per_node": 1}
        cluster = {"name": "a", "owner": "x", "node_groups": [group | {"memory_bytes_per_node": 2 * LIMIT_BYTES}]}
        self.pool = Pool.model_validate({"clusters": [cluster]})
        self.adapter = LocalAdapter(self.pool.clusters[0], folder / "queue")
        (folder / "data").mkdir()
        (folder / "secret").write_text("secret")
        self.job = make_job().model_copy(
            update={"model": str(folder / "data"), "output": str(folder / "out" / "result"),
                    "data": make_job().data.model_copy(update={"paths": (str(folder / "data"),)}),
                    "checkpoints": make_job().checkpoints.model_copy(update={"folder": str(folder / "out" / "c")})}
        )  # fmt: skip
        (folder / "out").mkdir()
        self.allowed: AllowedStorage | None = None

    def start(self, program: str, rank: int = 0) -> Path:
        folder = self.folder / "state" / "runs" / "0123" / "1" / str(rank)
        (folder / "tmp").mkdir(parents=True)
        plan = Plan.model_validate(
            {"id": "p", "micro_batches": 1, "micro_batch_size": 1, "sequence_length": 8,
             "stages": [{"cluster": "a", "node_group": "cpu-core", "layers": [0, 4], "tp": 2}]}
        )  # fmt: skip
        spec = WorkerSpec(run="0123", attempt=1, rank=rank, job=self.job, plan=plan, storage=self.allowed)
        command = (sys.executable, "-c", program)
        rights = WorkerRights(containers=ContainerRules(images=str(self.folder / "images")))
        assert rights.containers is not None
        renderer = PartRenderer(rights, self.pool, "a", "container")
        part = renderer.render_worker(spec)
        (folder / RENDER_FILE).write_text(settings_document(part.settings))
        containers = WorkerContainers(rights.containers, rights, self.folder / "state", command)
        started = containers.prepare(
            folder, spec, part, ["cpu-core/0/0"], None, protected=[self.folder / "secret"], also_read=[]
        )
        self.adapter.start(RankStart(folder=folder, cards=("cpu-core/0/0",), command=started))
        return folder

    def wait(self, folder: Path) -> int:
        until(lambda: self.adapter.poll(folder).state == "exited")
        status = self.adapter.poll(folder).exit_status
        assert status is not None
        return status


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    tmp_path.chmod(0o755)
    made = Site(tmp_path)
    yield made
    assert not list((tmp_path / "state" / "containers").glob("*")), "a container is left"


def test_worker_sees_its_job_and_nothing_else(site: Site) -> None:
    program = f"""
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
def tried(action):
    try:
        action()
        return "done"
    except OSError as error:
        return error.strerror
outside = pathlib.Path({str(site.folder)!r})
(folder / "seen.json").write_text(json.dumps({{
    "out": tried(lambda: (outside / "out" / "x").write_text("x")),
    "data": tried(lambda: (outside / "data" / "x").write_text("x")),
    "root": tried(lambda: pathlib.Path("/x").write_text("x")),
    "secret": tried(lambda: (outside / "secret").read_text()),
    "state": sorted(one.name for one in (outside / "state").iterdir()),
    "pids": sorted(int(one) for one in os.listdir("/proc") if one.isdigit())[0],
    "cards": os.environ["ISTHMUS_CARDS"],
    "capabilities": [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")][0],
    "mount": tried(lambda: os.chroot("/tmp")),
}}))
"""
    folder = site.start(program)
    assert site.wait(folder) == 0, (folder / "log").read_text()
    seen = json.loads((folder / "seen.json").read_text())
    assert seen == {
        "out": "done",
        "data": "Read-only file system",
        "root": "Read-only file system",
        "secret": "No such file or directory",
        "state": ["runs"],
        "pids": 1,
        "cards": "cpu-core/0/0",
        "capabilities": "0" * 16,
        "mount": "Operation not permitted",
    }
    assert {one["class"] for one in json.loads((folder / RENDER_FILE).read_text())} >= {
        "training",
        "resources",
        "mounts",
    }
    assert not (folder / BUNDLE / "rootfs").exists()


def cached(cache: VersionCache, owner: str, files: dict[str, bytes]) -> CopyKey:
    """Put a version of these files into a site's cache, as if it had been brought."""
    of = manifest(files)
    key = CopyKey(owner=owner, version=of.version)
    cache.reserve(key, of, ())
    for file in of.files:
        cache.write(key, file, 0, files[file.path])
        assert cache.finish(key, file)
    cache.publish(key, of)
    return key


@pytest.mark.attack
@pytest.mark.parametrize("with_roots", [False, True])
def test_worker_reads_the_versions_that_its_job_names_and_no_other_of_the_cache(site: Site, with_roots: bool) -> None:
    """A version of the catalogue lies in the agent's cache, whose other versions are not in the container."""
    cache = VersionCache(site.folder / "state" / "cache", 1 << 20)
    mine = cached(cache, "ann", {"a/0.txt": b"mine", "b.txt": b"too"})
    other = cached(cache, "ann", {"secret.txt": b"another"})
    roots = (StorageRoot(path=str(site.folder / "out")), StorageRoot(path=str(site.folder / "data"), access="read"))
    storage = SiteStorage(StorageRules(roots=roots if with_roots else ()), None, cache)
    named = site.job.data.model_copy(update={"paths": (f"catalogue:ann/wiki@{mine.version}",)})
    asked = site.job.model_copy(update={"data": named})
    site.job, site.allowed = storage.resolve_job("0123", asked, "ann")
    assert (site.allowed is not None) == with_roots
    program = f"""
import json, pathlib, sys
here, there = pathlib.Path({site.job.data.paths[0]!r}), pathlib.Path({str(cache.place(other))!r})
def tried(action):
    try:
        return action()
    except OSError as error:
        return error.strerror
seen = {{
    "files": sorted(one.relative_to(here).as_posix() for one in here.rglob("*") if one.is_file()),
    "text": tried(lambda: (here / "a/0.txt").read_text()),
    "write": tried(lambda: (here / "b.txt").write_text("x")),
    "other": tried(lambda: (there / "secret.txt").read_text()),
    "cache": sorted(one.name for one in here.parent.iterdir()),
}}
(pathlib.Path(sys.argv[1]) / "seen.json").write_text(json.dumps(seen))
"""
    folder = site.start(program)
    assert site.wait(folder) == 0, (folder / "log").read_text()
    assert json.loads((folder / "seen.json").read_text()) == {
        "files": ["a/0.txt", "b.txt"],
        "text": "mine",
        "write": "Read-only file system",
        "other": "No such file or directory",
        "cache": [mine.version],
    }


def test_memory_beyond_the_limit_ends_the_worker(site: Site) -> None:
    folder = site.start(f"x = bytearray({LIMIT_BYTES // 2}); print('half', flush=True); x += bytearray({LIMIT_BYTES})")
    assert site.wait(folder) == 128 + signal.SIGKILL
    assert "half" in (folder / "log").read_text()


def test_cpu_time_is_the_share_of_the_node(site: Site) -> None:
    folder = site.start("import time\nwhile True: time.sleep(0.05)")
    quota = Path("/sys/fs/cgroup/cpu/isthmus-0123-1-0/cpu.cfs_quota_us")
    until(lambda: (folder / "log").exists() and quota.exists() and quota.read_text().strip() != "-1")
    assert int(quota.read_text()) == 50_000  # half of one core
    site.adapter.stop(folder, force=True)
    site.wait(folder)


def test_stop_reaches_the_program_and_its_status_comes_back(site: Site) -> None:
    program = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
pathlib.Path(sys.argv[1], "ready").write_text("")
while True: time.sleep(0.05)
"""
    folder = site.start(program)
    until((folder / "ready").exists)
    site.adapter.stop(folder, force=False)
    assert site.wait(folder) == 7


def test_killed_worker_leaves_no_container(site: Site) -> None:
    program = """
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1], "ready").write_text("")
time.sleep(600)
"""
    folder = site.start(program)
    until((folder / "ready").exists)
    site.adapter.stop(folder, force=True)
    assert site.wait(folder) == 128 + signal.SIGKILL
    groups = Path("/sys/fs/cgroup/memory/isthmus-0123-1-0")
    assert not groups.exists() or not (groups / "cgroup.procs").read_text()


def test_version_exists_only_once(site: Site) -> None:
    with pytest.raises(InputError, match="host:1 exists"):
        build_image(site.folder / "images", "host", "1", HOST)


def test_code_is_added_to_a_base_image(site: Site) -> None:
    code, layout = site.folder / "code", site.folder / "images"
    code.mkdir()
    (code / "train.py").write_text("print(1)")
    made = build_image(layout, "mine", "2", ImageFacts(code="built_in"), base="host:1", code=code, labels={"a": "b"})
    assert made.labels["a"] == "b"
    assert {image.reference for image in read_images(layout)} == {"host:1", "mine:2"}
    root = unpack_image(layout, made, site.folder / "store")
    assert (root / "code" / "train.py").read_text() == "print(1)"
    assert unpack_image(layout, made, site.folder / "store") == root


@pytest.mark.attack
def test_program_of_another_is_not_started(tmp_path: Path) -> None:
    """An image that starts a program of its own is refused before anything runs."""
    facts = {"host_files": True, "code": "built_in", "libraries": {"isthmus": {}, "gloo": {}}, "command": ["/bin/true"]}
    parameters = {"parameters": {"steps": {"passed_as": "argument", "name": "--steps"}}}
    site = Site(tmp_path, ImageFacts.model_validate(facts | parameters))
    with pytest.raises(InputError, match="another program"):
        site.start("raise SystemExit(0)")
    assert not list((tmp_path / "state" / "runs").rglob("config.json"))


@pytest.mark.attack
def test_layer_that_was_tampered_with_is_not_unpacked(site: Site) -> None:
    code, layout = site.folder / "code", site.folder / "images"
    code.mkdir()
    (code / "train.py").write_text("print(1)")
    made = build_image(layout, "mine", "2", ImageFacts(code="built_in"), code=code)
    for blob in (layout / "blobs" / "sha256").iterdir():
        data = blob.read_bytes()
        if not data.startswith(b"{"):  # a layer
            blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Exception, match="umoci unpack"):
        unpack_image(layout, made, site.folder / "store")
    assert list((site.folder / "store").iterdir()) == []
