"""`Work`: the work folder of one worker, and how its files are read and replaced. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from isthmus.agent.courier.folder_client import Carry, FileStat, FolderClient, Tracked

_LOCAL_FILES = frozenset({"pid", "exit.part", "after.json"})
"""Files that are not carried: each side has its own."""

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY")


class Work:
    """The work folder of one worker: paths, the worker's secret, and what was carried before."""

    def __init__(self, path: Path) -> None:
        self.folder, self.hold, self.lease = path / "folder", path / "hold", path / "lease"
        self._own = path / "courier"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for one in (self.folder, self.hold, self.lease, self._own):
            one.mkdir(mode=0o700, exist_ok=True)
        self._state_path, state = self._own / "state.json", {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(self._state_path.read_bytes())
        self._secret: str = state.get("secret") or secrets.token_hex(32)
        self.installed: dict[str, str] = state.get("installed", {})
        self.client = FolderClient({name: Tracked(*found) for name, found in state.get("tracked", {}).items()})
        for name in self.installed:
            self.client.take(name)
        self._saved: object = None
        self.save()

    @property
    def instance(self) -> str:
        """What the agent knows the worker by: the digest of its secret and nothing else."""
        return sha256(self._secret.encode()).hexdigest()

    def save(self) -> None:
        """Keep what a later process must know, if it has changed."""
        tracked = {
            name: [one.generation, one.inode, 0] for name, one in self.client.tracked.items() if one.generation
        }  # fmt: skip
        state = {"secret": self._secret, "installed": self.installed, "tracked": tracked}
        if state != self._saved:
            replace_file(self._state_path, json.dumps(state).encode(), 0o600)
            self._saved = json.loads(json.dumps(state))

    def script(self, name: str) -> str:
        """Return the path of a script of Isthmus; from an archive it is written to the work folder first."""
        source = files("isthmus.core.process").joinpath(f"{name}.py")
        if isinstance(source, Path):
            return str(source)
        target = self._own / f"{name}.py"
        if not target.exists():
            replace_file(target, source.read_bytes(), 0o600)
        return str(target)

    def file_stats(self) -> dict[str, FileStat]:
        """Return the regular files of the folder."""
        found: dict[str, FileStat] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name not in _LOCAL_FILES and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        one = entry.stat(follow_symlinks=False)
                        found[entry.name] = FileStat(one.st_ino, one.st_size, one.st_mtime_ns)
        return found


def replace_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """Return a JSON value with every text that is one of `paths`, or below one, moved to its place here."""
    if isinstance(value, dict):
        return {name: replace_paths(one, paths) for name, one in value.items()}
    if isinstance(value, list):
        return [replace_paths(one, paths) for one in value]
    if isinstance(value, str):
        for path, place in paths.items():
            if value == path or value.startswith(f"{path}/"):
                return place + value[len(path) :]
    return value


def part_environment(base: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables of this machine that the program gets: no secrets, by their names."""
    for name, value in base.items():
        if not any(word in name.upper() for word in _SECRET_WORDS):
            yield name, value


def read_piece(path: Path, carry: Carry) -> tuple[bytes, bytes, float]:
    """Return the bytes before a piece (as many as `carry.tail`), the piece, and the age of the file in seconds."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        before = os.pread(descriptor, len(carry.tail), carry.offset - len(carry.tail)) if carry.tail else b""
        data = os.pread(descriptor, carry.num_bytes, carry.offset)
        return before, data, time.time() - os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Replace a file at once."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.chmod(mode)
    temporary.replace(path)
