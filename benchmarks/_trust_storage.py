"""Users apart on storage: seeded names and links of an attacking user, and what checks and limits cost a worker."""

from __future__ import annotations

import os
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import Row, compared
from isthmus.agent.adapters.local_adapter import CONFINED_START
from isthmus.agent.adapters.worker_limits import limits_for
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.core.errors import InputError
from isthmus.core.job import CheckpointConfig, DataConfig, Job, TrainingConfig
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.core.rights.storage_rules import StorageRules
from isthmus.core.rights.worker_rights import WorkerRights

_NAMES = ("users", "alice", "bob", "run", "link", "up", "loop", "models", ".", "..", "", "*", "bob ", "x")


def measure(quick: bool) -> list[Row]:
    """Return what seeded paths gain, and what checks and limits cost a worker."""
    num_attacks, num_starts = (2_000, 11) if quick else (20_000, 51)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.path.realpath(name))
        begun_s = time.process_time()
        num_admitted, escaped = attack_paths(folder, num_attacks, seed=1)
        used_s = time.process_time() - begun_s
        check_s = _seconds_of_checks(folder, 200)
        plain, limited = _start_costs(folder, num_starts)
    what = f"{num_attacks:,} seeded paths of a user, {num_admitted:,} admitted, {used_s:.2f} s of CPU"
    start = f"start and end of a process with a worker's limits, {limited[1]:.1f} and {plain[1]:.1f} ms of CPU"
    return [
        Row(what=f"{what}: outside the user's roots", ours=len(escaped), unit="", target="0", met=not escaped),
        Row(what="check of all paths of a job with storage roots, links followed", ours=check_s * 1e3, unit="ms"),
        compared(start, limited[0], "ms", "without limits", plain[0]),
    ]


def attack_paths(folder: Path, num_attacks: int, seed: int) -> tuple[int, list[str]]:
    """Return how many random paths the site admitted, and those of them that lead outside the roots of `bob`.

    What is outside is decided by the paths' real places alone, not by the rules.
    """
    storage, rng = SiteStorage(make_disk(folder)), random.Random(seed)
    inside = {"write": [folder / "users/bob"], "read": [folder / "users/bob", folder / "models"]}
    admitted, escaped = 0, list[str]()
    for _ in range(num_attacks):
        access = rng.choice(("read", "write"))
        begin = rng.choice((str(folder), str(folder / "users/bob"), "", "/", f"//{folder}"))
        path = "/".join([begin, *rng.choices(_NAMES, k=rng.randint(1, 7))])
        try:
            place = storage.resolve("output", path, access, "bob")  # type: ignore[arg-type]
        except InputError:
            continue
        admitted += 1
        real = Path(os.path.realpath(place.partition("*")[0]))
        if not any(real.is_relative_to(root) for root in inside[access]):
            escaped.append(path)
    return admitted, escaped


def make_disk(folder: Path) -> StorageRules:
    """Make the homes of two users, with links of bob's that lead everywhere; return the rules of the site."""
    for name in ("users/alice/run", "users/bob/run", "models/x"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    home = folder / "users/bob"
    links = {
        "link": folder / "users/alice",
        "up": "..",
        "loop": "loop",
        "run/link": "../../alice/run",
        "run/up": "../..",
    }
    for name, target in links.items():
        if not (home / name).is_symlink():
            (home / name).symlink_to(target)
    roots = [{"path": f"{folder}/users/{{user}}"}, {"path": f"{folder}/models", "access": "read"}]
    return StorageRules.model_validate({"roots": roots})


def _seconds_of_checks(folder: Path, num: int) -> float:
    """Return the seconds of one check of a job's paths."""
    storage, home = SiteStorage(make_disk(folder)), folder / "users/bob/run"
    job = Job(
        name="own", model=str(folder / "models/x"), data=DataConfig(paths=(f"{home}/text",)), output=f"{home}/out",
        training=TrainingConfig(steps=1), checkpoints=CheckpointConfig(folder=f"{home}/ck"),
    )  # fmt: skip
    begun_s = time.perf_counter()
    for _ in range(num):
        storage.resolve_job("own-1", job, "bob")
    return (time.perf_counter() - begun_s) / num


def _start_costs(folder: Path, num: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return median wall and CPU milliseconds of a short process: without limits, and with them; taken in turns."""
    worker = WorkerFolder(folder / "worker")
    allowed = make_disk(folder).of_user("bob")
    worker.write_limits(limits_for(worker.path, WorkerRights(), "bob", allowed, protected=[folder / "state"]))
    program = ("sh", "-c", ":")
    limited = (*CONFINED_START, str(worker.limits_path), *program)
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {program: [], limited: []}
    for _ in range(num):
        for command, costs in found.items():
            before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            status = os.waitstatus_to_exitcode(os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)[1])
            wall_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_CHILDREN)
            if status:
                sys.exit(f"{' '.join(command)} ended with status {status}")
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            costs.append((wall_s * 1e3, cpu_s * 1e3))
    plain, confined = (tuple(statistics.median(one) for one in zip(*costs, strict=True)) for costs in found.values())
    return (plain[0], plain[1]), (confined[0], confined[1])
