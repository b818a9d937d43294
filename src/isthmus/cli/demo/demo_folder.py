"""`demo_folder`: an exclusively locked folder with the demo's pool, job and model."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from isthmus.core.errors import InputError
from isthmus.core.job import Job
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.pool import Pool
from isthmus.core.process.state_folder_lock import lock_state_folder, unwritable_folder_error

MARKER_FILE = ".isthmus-demo"
"""Marker file: the folder belongs to the demo, and the next demo may empty it."""


@contextmanager
def demo_folder(state: Path) -> Iterator[Path]:
    """Lock the demo's folder, empty it and write pool, job and model.

    Raises `InputError` if the folder has other content, `UnavailableError` if another demo uses it or it is
    not writable.
    """
    folder = state.resolve()
    try:
        names = {one.name for one in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise unwritable_folder_error(folder, error) from error
    if names - {"lock"} and MARKER_FILE not in names:
        raise InputError(f"{folder} is not empty and not a demo folder", hint="choose another --state folder")
    with lock_state_folder(folder, "demo"):
        try:
            _fill(folder)
        except OSError as error:
            raise unwritable_folder_error(folder, error) from error
        yield folder


def stock_sites(storage: Path, job: Job, pool: Pool) -> Job:
    """Give each cluster a folder of its own below `storage`, with model and data; return the job as sites see it.

    The sites see nothing of each other: paths of the job lie below each one's own folder.
    """
    for cluster in pool.clusters:
        shutil.copytree(job.model, storage / cluster.name / "model")
        data = storage / cluster.name / "data"
        data.mkdir()
        for path in map(Path, job.data.paths):
            for file in path.parent.glob(path.name):
                shutil.copyfile(file, data / file.name)
    return job.model_copy(
        update={
            "model": "/model",
            "data": job.data.model_copy(update={"paths": ("/data/*.py",)}),
            "checkpoints": job.checkpoints.model_copy(update={"folder": "/checkpoints"}),
            "output": "/result",
        }
    )


def as_seen_outside(job: Job, root: Path) -> Job:
    """Return the job of `stock_sites` with the paths of its data and result at the site with folder `root`."""
    data = job.data.model_copy(update={"paths": tuple(f"{root}{path}" for path in job.data.paths)})
    return job.model_copy(update={"model": f"{root}{job.model}", "data": data, "output": f"{root}{job.output}"})


def _fill(folder: Path) -> None:
    (folder / MARKER_FILE).touch()
    for old in folder.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        elif old.name not in (MARKER_FILE, "lock"):
            old.unlink()
    (folder / "model").mkdir()
    files = resources.files("isthmus.cli.demo") / "demo_files"
    for name, target in (("pool.yaml", "pool.yaml"), ("config.json", "model/config.json")):
        write_atomically(folder / target, (files / name).read_text(encoding="utf-8"))
    job = (files / "job.yaml").read_text(encoding="utf-8")
    write_atomically(folder / "job.yaml", job.replace("STDLIB", sysconfig.get_path("stdlib")))
