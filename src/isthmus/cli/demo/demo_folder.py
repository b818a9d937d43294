"""`demo_folder`: an exclusively locked folder with the demo's pool, job and model."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from isthmus.core.errors import InputError
from isthmus.core.messages.worker_folder import write_atomically
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
