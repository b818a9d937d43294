"""`demo_folder`: the demo's pool, job and model, in a folder that one demo at a time empties and uses."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from isthmus.core.errors import InputError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.state_folder import locked, unwritable

MARKER = ".isthmus-demo"
"""A file that says that a folder is the demo's own, and may be emptied by the next demo."""


@contextmanager
def demo_folder(state: Path) -> Iterator[Path]:
    """Empty the demo's folder, fill it with pool, job and model, and hold it for this demo alone.

    Raises `InputError` for a folder that is somebody else's, `UnavailableError` where another demo is at work
    in it, or where it takes no files.
    """
    folder = state.resolve()
    try:
        there = {one.name for one in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise unwritable(folder, error) from error
    if there - {"lock"} and MARKER not in there:
        raise InputError(f"{folder} is not empty and not the demo's", hint="give another --state folder")
    with locked(folder, "demo"):
        try:
            _fill(folder)
        except OSError as error:
            raise unwritable(folder, error) from error
        yield folder


def _fill(folder: Path) -> None:
    (folder / MARKER).touch()
    for old in folder.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        elif old.name not in (MARKER, "lock"):
            old.unlink()
    (folder / "model").mkdir()
    files = resources.files("isthmus.cli.demo") / "demo_files"
    for name, target in (("pool.yaml", "pool.yaml"), ("config.json", "model/config.json")):
        write_atomically(folder / target, (files / name).read_text(encoding="utf-8"))
    job = (files / "job.yaml").read_text(encoding="utf-8")
    write_atomically(folder / "job.yaml", job.replace("STDLIB", sysconfig.get_path("stdlib")))
