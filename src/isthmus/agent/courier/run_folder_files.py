"""`RunFolderFiles`: the files of one run folder on the agent's disk, as the far side reads and writes them.

A file has one writer. What the far side wrote is in a record, by name and generation: a generation is a file that was
put in place as a whole and then only grew. All other files are the agent's, and the far side reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from isthmus.agent.courier.courier_frames import MAX_FILES, FrameError, is_carried_name
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process.rank_runner import take_folder

AGENT_FILES = frozenset(
    {"pid", "hold", "start.json", "spec.json", "limits.json", "keys.json", "ranks.json", "protect.json", "stop"}
)
"""Files that only the agent writes, whether they are there yet or not."""

CONSUMED_FILES = frozenset({"keys.json"})
"""Files of the agent that the worker removes once it has read them."""

_LOCAL_FILES = frozenset({"pid"})
"""Files that are not carried: each side has its own."""

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = ".courier.part"


class FileDeniedError(FrameError):
    """Raised for a file that is not the far side's to write, or that is beyond a bound."""


@dataclass(frozen=True)
class AgentFile:
    """A file of the agent: `stamp` changes with its content."""

    stamp: str
    num_bytes: int
    mode: int


class RunFolderFiles:
    """The files of `folder`; `record` is where the names from the far side are kept.

    `max_bytes` bounds what the far side may write in all. `clock` counts from the epoch. Raises `FileNotFoundError`
    once the folder is gone, `FileDeniedError` for a file that is not the far side's to write.
    """

    def __init__(
        self, folder: Path, record: Path, max_bytes: int = 64 << 30, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self._record_path, self._max_bytes, self._clock = record, max_bytes, clock
        self._record: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            self._record = {str(name): int(number) for name, number in json.loads(record.read_bytes()).items()}

    def take(self, instance: str, host: str) -> bool:
        """Take the folder for the one worker `instance`; return whether it is that worker's."""
        if take_folder(str(self.folder), f"{instance} {host}"):
            return True
        return (self.folder / "pid").read_text(encoding="utf-8").split()[:1] == [instance]

    def agent_files(self) -> dict[str, AgentFile]:
        """Return the files of the agent: regular ones, directly in the folder."""
        found: dict[str, AgentFile] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name = entry.name
                if name in self._record or name in _LOCAL_FILES or not is_carried_name(name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False) and len(found) < MAX_FILES:
                        found[name] = _agent_file(entry.stat(follow_symlinks=False))
        return found

    def far_files(self) -> dict[str, tuple[int, int]]:
        """Return generation and size of each file from the far side."""
        sizes = {name: self._size(name) for name in self._record}
        return {name: (self._record[name], size) for name, size in sizes.items() if size is not None}

    def read(self, name: str, stamp: str, offset: int, num_bytes: int) -> bytes | None:
        """Return up to `num_bytes` of a file of the agent at `offset`; None if it is no longer the one of `stamp`."""
        if name in self._record or name in _LOCAL_FILES:
            raise FrameError(f"'{name}' is no file of the agent")
        with self._folder_fd() as folder:
            try:
                descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
            except OSError:  # gone, or a link
                return None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or _agent_file(found).stamp != stamp:
                return None
            return os.pread(descriptor, num_bytes, offset)
        finally:
            os.close(descriptor)

    def put(self, name: str, generation: int, data: bytes | bytearray, age_s: float) -> int:
        """Put a file of the far side in place as a whole, last written `age_s` ago; return its size."""
        self._check_writable(name, len(data))
        if name not in self._record:
            self._save({**self._record, name: 0})  # before the file is there, so that it never counts as the agent's
        with self._folder_fd() as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_TEMPORARY, dir_fd=folder)
            descriptor = os.open(_TEMPORARY, _NEW_FLAGS, 0o666, dir_fd=folder)
            try:
                _write_all(descriptor, data)
                self._set_age(descriptor, age_s)
            finally:
                os.close(descriptor)
            os.rename(_TEMPORARY, name, src_dir_fd=folder, dst_dir_fd=folder)
        self._save({**self._record, name: generation})
        return len(data)

    def append(self, name: str, generation: int, offset: int, data: bytes | bytearray, age_s: float) -> tuple[int, int]:
        """Append to a file if `offset` is its end; return generation and size as they are then."""
        if name not in self._record:
            raise FileDeniedError(f"'{name}' is no file of the far side")
        self._check_writable(name, len(data))
        with self._folder_fd() as folder:
            try:
                flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(name, flags, dir_fd=folder)
            except FileNotFoundError:
                return 0, 0
        try:
            size = os.fstat(descriptor).st_size
            if (self._record[name], size) == (generation, offset):
                os.lseek(descriptor, offset, os.SEEK_SET)
                _write_all(descriptor, data)
                self._set_age(descriptor, age_s)
                size += len(data)
            return self._record[name], size
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove a file of the far side, or one of the agent that the worker has consumed."""
        if name not in self._record and name not in CONSUMED_FILES:
            raise FileDeniedError(f"'{name}' is no file of the far side")
        with self._folder_fd() as folder, contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        if name in self._record:
            self._save({one: number for one, number in self._record.items() if one != name})

    def _check_writable(self, name: str, num_bytes: int) -> None:
        if name in AGENT_FILES or name in _LOCAL_FILES:
            raise FileDeniedError(f"'{name}' is a file of the agent")
        if name not in self._record:
            if len(self._record) >= MAX_FILES:
                raise FileDeniedError(f"more than {MAX_FILES} files")
            if os.path.lexists(self.folder / name):
                raise FileDeniedError(f"'{name}' is a file of the agent")
        if sum(size for _, size in self.far_files().values()) + num_bytes > self._max_bytes:
            raise FileDeniedError(f"more than {self._max_bytes} bytes in a run folder")

    def _size(self, name: str) -> int | None:
        try:
            found = (self.folder / name).lstat()
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _set_age(self, descriptor: int, age_s: float) -> None:
        written_s = max(0.0, self._clock() - age_s)
        os.utime(descriptor, (written_s, written_s))

    def _save(self, record: Mapping[str, int]) -> None:
        write_atomically(self._record_path, json.dumps(record))
        self._record = dict(record)

    @contextlib.contextmanager
    def _folder_fd(self) -> Iterator[int]:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _agent_file(found: os.stat_result) -> AgentFile:
    stamp = f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
    return AgentFile(stamp, found.st_size, stat.S_IMODE(found.st_mode))


def _write_all(descriptor: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
