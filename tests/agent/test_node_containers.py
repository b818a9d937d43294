"""Workers in containers on a node behind the courier: what they see, what holds them, and that nothing is left."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.adapters.scheduler_adapter import NodeImages
from isthmus.agent.containers.image_tool import build_image
from isthmus.agent.containers.node_containers import NodeContainers
from isthmus.agent.containers.part_renderer import PartRenderer
from isthmus.agent.courier.start_file import write_start
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.process.node_container import CONTAINER_FILE
from isthmus.core.rights.worker_rights import ContainerRules, WorkerRights
from tests.agent.test_containers import HOST, LIMIT_BYTES, why_not
from tests.courier.far_worker import FarWorker, until
from tests.render.samples import make_job

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.skipif(bool(why_not()), reason=why_not())]

PLAN = Plan.model_validate(
    {"id": "p", "micro_batches": 1, "micro_batch_size": 1, "sequence_length": 8,
     "stages": [{"cluster": "a", "node_group": "cpu-core", "layers": [0, 4], "tp": 2}]}
)  # fmt: skip


class Node:
    """A node with images of its own in `nodes`, and an agent that has the same images elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.layout = folder, folder / "nodes" / "store", folder / "nodes" / "images"
        build_image(folder / "images", "host", "1", HOST)
        (folder / "nodes").mkdir()
        (folder / "data").mkdir()
        (folder / "out").mkdir()
        (folder / "secret").write_text("secret")
        group = {"chip": "CPU-core", "nodes": 1, "chips_per_node": 2, "cpus_per_node": 1}
        cluster = {"name": "a", "owner": "x", "node_groups": [group | {"memory_bytes_per_node": 2 * LIMIT_BYTES}]}
        self.pool, job = Pool.model_validate({"clusters": [cluster]}), make_job()
        self.job = job.model_copy(
            update={"model": str(folder / "data"), "output": str(folder / "out" / "new" / "result"),
                    "data": job.data.model_copy(update={"paths": (str(folder / "data"),)}),
                    "checkpoints": job.checkpoints.model_copy(update={"folder": str(folder / "out" / "c")})}
        )  # fmt: skip
        self.workers: list[FarWorker] = []

    def copy_images(self) -> None:
        """Give the node the agent's images."""
        shutil.copytree(self.folder / "images", self.layout)

    def start(self, program: str, variables: dict[str, str] | None = None) -> FarWorker:
        worker = FarWorker(self.folder / f"far-{len(self.workers)}", ())
        self.workers.append(worker)
        rights = WorkerRights(containers=ContainerRules(images=str(self.folder / "images")))
        spec = WorkerSpec(run="0123", attempt=1, rank=len(self.workers) - 1, job=self.job, plan=PLAN)
        part = PartRenderer(rights, self.pool, "a", "container", apart=True).render_worker(spec)
        places = NodeImages(layout=str(self.layout), store=str(self.store))
        containers = NodeContainers(rights, places, self.folder, (sys.executable, "-c", program))
        command = containers.prepare(worker.folder, spec, part, ["g/n/0"], None, protected=(), also_read=())
        write_start(worker.folder, command, {"ISTHMUS_CARDS": "g/n/0"})
        worker.start(worker.ticket(), variables or {})
        return worker

    def left(self) -> list[str]:
        """Return what is left in the node's store beside the unpacked image."""
        return [one.name for kind in ("bundles", "runtime") for one in (self.store / kind).glob("*")]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    tmp_path.chmod(0o755)
    made = Node(tmp_path)
    yield made
    for worker in made.workers:
        worker.close()
    assert made.left() == []


def test_a_worker_behind_the_courier_runs_in_the_container_that_was_rendered(node: Node) -> None:
    """It sees the job's files, its own folder and nothing else; output and status come back; no secret goes in."""
    node.copy_images()
    program = f"""
import json, os, pathlib, sys
folder, outside = pathlib.Path(sys.argv[1]), pathlib.Path({str(node.folder)!r})
def tried(action):
    try:
        action()
        return "done"
    except OSError as error:
        return error.strerror
(folder / "seen.json").write_text(json.dumps({{
    "out": tried(lambda: (outside / "out" / "x").write_text("x")),
    "data": tried(lambda: (outside / "data" / "x").write_text("x")),
    "secret": tried(lambda: (outside / "secret").read_text()),
    "images": tried(lambda: os.listdir(outside / "nodes")),
    "pid": os.getpid(),
    "variables": [os.environ.get(name) for name in ("ISTHMUS_CARDS", "SOME_TOKEN", "LANG", "STRANGE")],
    "capabilities": [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")][0],
}}))
print("said")
sys.exit(7)
"""
    worker = node.start(program, {"SOME_TOKEN": "hidden", "LANG": "C.UTF-8", "STRANGE": "x"})
    assert worker.wait() == 0
    log = (worker.folder / "log").read_text()
    assert (worker.status, log.strip()) == (7, "said"), log
    assert json.loads((worker.folder / "seen.json").read_text()) == {
        "out": "done", "data": "Read-only file system", "secret": "No such file or directory",
        "images": "No such file or directory", "pid": 1, "variables": ["g/n/0", None, "C.UTF-8", None],
        "capabilities": "0" * 16,
    }  # fmt: skip
    assert not (worker.folder / "after.json").exists()


def test_memory_beyond_the_limit_ends_the_worker_and_its_image_stays_for_the_next(node: Node) -> None:
    """The kernel ends it; a second worker of the image starts from what was unpacked."""
    node.copy_images()
    program = f"x = bytearray({LIMIT_BYTES // 2}); print('half', flush=True); x += bytearray({LIMIT_BYTES})"
    worker = node.start(program)
    assert worker.wait() == 0
    assert (worker.status, (worker.folder / "log").read_text().strip()) == (128 + signal.SIGKILL, "half")
    (unpacked,) = (one for one in node.store.iterdir() if len(one.name) == 64)
    made_ns = unpacked.stat().st_ctime_ns
    again = node.start("print('again')")
    assert again.wait() == 0
    assert (again.folder / "log").read_text().strip() == "again"
    assert unpacked.stat().st_ctime_ns == made_ns


def test_a_stopped_worker_leaves_neither_process_nor_container(node: Node) -> None:
    """SIGKILL through the folder: every process of the container ends, and its bundle goes."""
    node.copy_images()
    program = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    worker = node.start(program)
    log = worker.folder / "log"
    until("it runs", lambda: log.exists() and "up" in log.read_text())
    assert node.left()
    (worker.folder / "stop").write_text("KILL")
    until("it has ended", lambda: worker.status == 128 + signal.SIGKILL)


@pytest.mark.attack
def test_a_program_that_rewrites_its_container_file_removes_nothing_of_the_node(node: Node) -> None:
    """What is removed after the program was fixed before its start."""
    node.copy_images()
    victim = node.folder / "victim"
    victim.mkdir()
    program = f"""
import json, pathlib, sys
file = pathlib.Path(sys.argv[1]) / {CONTAINER_FILE!r}
file.unlink()
file.write_text(json.dumps({{"store": {str(victim)!r}, "name": "..", "digest": "x"}}))
(pathlib.Path(sys.argv[1]) / "after.json").unlink()
(pathlib.Path(sys.argv[1]) / "after.json").write_text(json.dumps(["rm", "-rf", {str(victim)!r}]))
"""
    worker = node.start(program)
    assert worker.wait() == 0
    assert worker.status == 0, (worker.folder / "log").read_text()
    assert victim.exists()


@pytest.mark.attack
def test_a_job_that_writes_beside_the_programs_of_the_node_does_not_get_their_folder(node: Node) -> None:
    """Its output is to be a new folder below /usr, which stays read-only; a folder of the kernel is refused."""
    node.copy_images()
    node.job = node.job.model_copy(update={"output": "/usr/isthmus-none/result"})
    worker = node.start("open('/usr/isthmus-written', 'w')")
    assert worker.wait() == 0
    assert (worker.status, "Read-only file system" in (worker.folder / "log").read_text()) == (1, True)
    node.job = node.job.model_copy(update={"output": "/proc/isthmus-none"})
    refused = node.start("print('ran')")
    assert refused.wait() == 0
    assert (refused.status, "a folder of the kernel" in (refused.folder / "log").read_text()) == (126, True)


def test_a_node_without_the_image_says_so_before_anything_runs(node: Node) -> None:
    """Status 126 and the folder, the image and what to do, in the worker's log."""
    build_image(node.layout, "other", "1", HOST)
    worker = node.start("print('ran')")
    assert worker.wait() == 0
    log = (worker.folder / "log").read_text()
    assert worker.status == 126
    assert "lacks image host:1" in log
    assert "ran" not in log


def test_a_store_that_others_may_write_is_refused(node: Node) -> None:
    """Its images would run as root."""
    node.copy_images()
    node.store.mkdir()
    node.store.chmod(0o777)
    worker = node.start("print('ran')")
    assert worker.wait() == 0
    assert (worker.status, "others may write there" in (worker.folder / "log").read_text()) == (126, True)


def test_an_index_of_images_without_bound_is_not_read(node: Node) -> None:
    """The node reads it as root, and a user may have brought the image."""
    node.copy_images()
    with (node.layout / "index.json").open("ab") as index:
        index.write(b" " * (4 << 20))
    worker = node.start("print('ran')")
    assert worker.wait() == 0
    assert (worker.status, "larger than 4 MiB" in (worker.folder / "log").read_text()) == (126, True)
