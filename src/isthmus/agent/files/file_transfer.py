"""Copy a job's checkpoints, model and data from another site to this one.

At a site with its own storage folder, the pool's `path` is that path below the folder. A source gives access
to another site's storage: a folder (mounted or local), or a copy command such as
`rsync -a --partial north:/pool/{path} {target}`, which must resume and verify by itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from isthmus.core.catalogue import is_catalogue_name
from isthmus.core.errors import FileError, UnavailableError
from isthmus.core.files.model_tokenizer import tokenizer_paths
from isthmus.core.job import Job
from isthmus.core.messages.worker_folder import open_regular

_SOURCES: TypeAdapter[dict[str, str | tuple[str, ...]]] = TypeAdapter(dict[str, str | tuple[str, ...]])
_BLOCK_BYTES = 1 << 20
_MAX_ERROR_CHARS = 300
_OF_A_SHELL = re.compile(r"[^\w./@%+=:,~*?\[\] -]|^\s*-|(^|/)\.\.(/|$)")
"""What a path for a copy command may not have: signs that a shell at the other end would execute, an option, `..`."""

COMMAND_LIMIT_S = 6 * 3600.0
"""Longest run of a copy command for one path; it resumes where it was when the job is tried again."""

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes copied so far and the total."""
PathFilter = Callable[[str], bool]
"""Returns whether the job's user may read a pool path."""


class FileSource(Protocol):
    """Access to the files of another site."""

    def fetch(
        self, path: str, target: Path, on_progress: ProgressCallback, admits: PathFilter = lambda _: True
    ) -> bool:
        """Copy pool path `path`, a file or folder, to `target`; return whether it exists at the source.

        Resumes an interrupted copy; a file appears at its final name only after its checksum matches.
        Raises `UnavailableError` if the source cannot be read now, or has a link to what `admits` does not.
        """
        ...


@dataclass(frozen=True)
class FolderSource:
    """Another site's storage, mounted as a folder on this machine.

    Users of that site may have put links there, and this agent may read more than they: a link to a file outside the
    storage, or to one that the job's user may not read, is refused.
    """

    root: Path

    def fetch(
        self, path: str, target: Path, on_progress: ProgressCallback, admits: PathFilter = lambda _: True
    ) -> bool:
        """Copy file by file, each to `NAME.part` first (see `FileSource`)."""
        origin = storage_path(self.root, path)
        try:
            places = {file: self._place(file, admits) for file in _finished_files(origin)}
            sizes = {file: place.stat().st_size for file, place in places.items()}
            done, total = 0, sum(sizes.values())
            for file, size in sizes.items():
                _copy_file(places[file], target if file == origin else target / file.relative_to(origin))
                done += size
                on_progress(done, total)
        except OSError as error:
            raise UnavailableError(f"cannot copy {origin} to {target}: {error}") from error
        return bool(sizes)

    def _place(self, file: Path, admits: PathFilter) -> Path:
        """Return where a file is, with links followed; raise `UnavailableError` if it is not to be copied."""
        root, real = Path(os.path.realpath(self.root)), Path(os.path.realpath(file))
        if not real.is_relative_to(root) or not admits(f"/{real.relative_to(root)}"):
            raise UnavailableError(
                f"{file} is a link to a place that the job's user may not read",
                hint="remove it, or copy the file there",
            )
        return real


@dataclass(frozen=True)
class CommandSource:
    """A copy command, ended after `limit_s`; `{path}` and `{target}` are substituted."""

    command: tuple[str, ...]
    limit_s: float = COMMAND_LIMIT_S

    def fetch(
        self, path: str, target: Path, on_progress: ProgressCallback, admits: PathFilter = lambda _: True
    ) -> bool:
        """Run the command (see `FileSource`); exit status 0 means success. It decides itself on links at the source.

        Users name the path, and copy commands such as rsync and scp hand it to a shell at the other end.
        """
        del admits
        if bad := _OF_A_SHELL.search(path.lstrip("/")):
            raise UnavailableError(
                f"{path[:200]!r} is not handed to the copy command of this site, since it has {bad[0]!r}",
                hint="name a path of letters, digits, spaces and ./@%+=:,~*?[]_- without '..'",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        argv = [word.format(path=path.lstrip("/"), target=target) for word in self.command]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=self.limit_s)  # noqa: S603 - the command is the owner's own configuration; no shell
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"'{' '.join(argv)}' has not finished within {self.limit_s:g} s", hint="check the link to the source"
            ) from error
        except OSError as error:
            raise UnavailableError(f"cannot run '{argv[0]}': {error.strerror}") from error
        if done.returncode:
            errors = done.stderr.strip()[-_MAX_ERROR_CHARS:]
            raise UnavailableError(f"'{' '.join(argv)}' exited with status {done.returncode}: {errors}")
        size = sum(file.stat().st_size for file in _finished_files(target))
        on_progress(size, size)
        return target.exists()


def read_sources(file: Path) -> dict[str, FileSource]:
    """Read a JSON file that maps a cluster to a folder or a command (a list of words); raise `FileError`."""
    try:
        parsed = _SOURCES.validate_json(file.read_bytes())
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", file=str(file)) from error
    except ValidationError as error:
        hint = 'sources are JSON: {"north": "/mnt/north", "south": ["rsync", "-a", "south:/{path}", "{target}"]}'
        raise FileError(error.errors()[0]["msg"], file=str(file), hint=hint) from error
    return {
        cluster: FolderSource(Path(where)) if isinstance(where, str) else CommandSource(where)
        for cluster, where in parsed.items()
    }


def storage_path(root: Path, path: str) -> Path:
    """Return the location of pool path `path` below the storage folder `root`."""
    parts = [part for part in Path(path).parts if part not in ("/", "..")]
    return root.joinpath(*parts)


def job_paths(job: Job, *, with_checkpoints: bool = True) -> tuple[str, ...]:
    """Return the paths that a job needs to resume at another site: checkpoints first, URLs omitted."""
    named = [job.checkpoints.folder] if with_checkpoints else []
    named += [job.model, *job.data.paths, *tokenizer_paths(job.data.tokenizer_path)]
    named += [job.resume_folder] if with_checkpoints and job.resume_folder is not None else []
    return tuple(path for path in dict.fromkeys(named) if not _is_elsewhere(path))


def _is_elsewhere(path: str) -> bool:
    """Return whether a path is a URL or an entry of the catalogue, which lies in the site's cache."""
    return "://" in path or is_catalogue_name(path)


def fetch_job_files(
    job: Job,
    clusters: Sequence[str],
    sources: Mapping[str, FileSource],
    root: Path,
    on_progress: ProgressCallback,
    *,
    with_checkpoints: bool = True,
    admits: PathFilter = lambda _: True,
) -> None:
    """Copy each path of `job` from the first of `clusters` that has it; raise `UnavailableError` on failure.

    A path that no cluster has is skipped; the worker reports the missing file. Without a source it is enough that model
    and data are here already, if workers of other sites send the checkpoints.
    """
    paths = job_paths(job, with_checkpoints=with_checkpoints)
    known = [cluster for cluster in clusters if cluster in sources]
    if not known and not with_checkpoints and all(_is_here(storage_path(root, path)) for path in paths):
        return
    if not known:
        raise UnavailableError(
            f"no source for the job's files at {', '.join(clusters)}",
            hint="add the cluster to the agent's --sources file",
        )
    for path in paths:
        for cluster in known:
            if sources[cluster].fetch(path, storage_path(root, path), on_progress, admits):
                break


def _is_here(path: Path) -> bool:
    """Return whether a file, a folder or a file of a glob exists."""
    return path.exists() or any(True for _ in path.parent.glob(path.name))


def _finished_files(origin: Path) -> Iterator[Path]:
    """Yield the files of a folder, or the file itself, except unfinished ones (`.tmp`, `.part`)."""
    if origin.is_file():
        yield origin
    for file in sorted(origin.rglob("*")):
        unfinished = any(part.endswith((".tmp", ".part")) for part in file.relative_to(origin).parts)
        if file.is_file() and not unfinished:
            yield file


def _copy_file(file: Path, target: Path) -> None:
    """Copy one file unless already present; resume an earlier partial copy."""
    if target.is_file() and target.stat().st_size == file.stat().st_size and _digest(target) == _digest(file):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    if os.path.lexists(part) and (part.is_symlink() or not part.is_file()):  # another user of the storage has made it
        part.unlink()
    # Resume the partial copy; if its checksum is wrong, copy once more from the start.
    for begin in (part.stat().st_size if part.exists() else 0, 0):
        with open_regular(file) as reader, open(part, "r+b" if begin else "wb", opener=_without_links) as writer:
            reader.seek(begin)
            writer.seek(begin)
            while block := reader.read(_BLOCK_BYTES):
                writer.write(block)
            writer.truncate()
        if _digest(part) == _digest(file):
            part.replace(target)
            return
    part.unlink()
    raise UnavailableError(f"{target}: checksum differs from {file} after copying")


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _digest(file: Path) -> bytes:
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").digest()
