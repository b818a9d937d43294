"""Files of a job brought to this site from another: its checkpoints, its model, its data.

What the pool calls `path` is, at a site with a storage folder of its own, that path below the folder. A
source says how to get at another site's: a folder (mounted, or on this machine), or a command that copies
(`rsync -a --partial north:/pool/{path} {target}`), which must resume and verify by itself.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from isthmus.core.errors import FileError, UnavailableError
from isthmus.core.job import Job

_SOURCES: TypeAdapter[dict[str, str | tuple[str, ...]]] = TypeAdapter(dict[str, str | tuple[str, ...]])
_BLOCK_BYTES = 1 << 20
_MOST_WORDS = 300

Tell = Callable[[int, int], None]
"""Is told how many bytes are here, and how many there are."""


class Source(Protocol):
    """How to get at the files of another site."""

    def fetch(self, path: str, target: Path, tell: Tell) -> bool:
        """Bring what the pool calls `path`, a file or a folder, to `target`; return whether it was there.

        Goes on where an earlier attempt was cut off; a file is at its place only once its checksum is that
        of the original. Raises `UnavailableError` where it cannot be had now.
        """
        ...


@dataclass(frozen=True)
class FolderSource:
    """Another site's storage as a folder of this machine."""

    root: Path

    def fetch(self, path: str, target: Path, tell: Tell) -> bool:
        """Copy file by file, each to `NAME.part` first (see `Source`)."""
        origin = place(self.root, path)
        try:
            sizes = {file: file.stat().st_size for file in _files(origin)}
            done, total = 0, sum(sizes.values())
            for file, size in sizes.items():
                _copy(file, target if file == origin else target / file.relative_to(origin))
                done += size
                tell(done, total)
        except OSError as error:
            raise UnavailableError(f"cannot copy {origin} to {target}: {error}") from error
        return bool(sizes)


@dataclass(frozen=True)
class CommandSource:
    """A command that copies from another site; `{path}` and `{target}` in it are filled in."""

    command: tuple[str, ...]

    def fetch(self, path: str, target: Path, tell: Tell) -> bool:
        """Run the command (see `Source`). Its status 0 says that all is here."""
        target.parent.mkdir(parents=True, exist_ok=True)
        words = [word.format(path=path.lstrip("/"), target=target) for word in self.command]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError as error:
            raise UnavailableError(f"cannot run '{words[0]}': {error.strerror}") from error
        if done.returncode:
            said = done.stderr.strip()[-_MOST_WORDS:]
            raise UnavailableError(f"'{' '.join(words)}' ended with status {done.returncode}: {said}")
        size = sum(file.stat().st_size for file in _files(target))
        tell(size, size)
        return target.exists()


def read_sources(file: Path) -> dict[str, Source]:
    """Read a file of sources, JSON: a folder, or the words of a command, by cluster; raise `FileError`."""
    try:
        told = _SOURCES.validate_json(file.read_bytes())
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", file=str(file)) from error
    except ValidationError as error:
        hint = (
            'sources are JSON: {"north": "/mnt/north", "south": ["rsync", "-a", "south:/{path}", "{target}"]}'
        )
        raise FileError(error.errors()[0]["msg"], file=str(file), hint=hint) from error
    return {
        cluster: FolderSource(Path(where)) if isinstance(where, str) else CommandSource(where)
        for cluster, where in told.items()
    }


def place(root: Path, path: str) -> Path:
    """Return where what the pool calls `path` is below a site's storage folder `root`."""
    parts = [part for part in Path(path).parts if part not in ("/", "..")]
    return root.joinpath(*parts)


def localised(job: Job, root: Path) -> Job:
    """Return `job` with its paths below a site's storage folder; URLs stay as they are."""

    def here(path: str) -> str:
        return path if "://" in path else str(place(root, path))

    data = {"paths": tuple(map(here, job.data.paths))}
    if job.data.tokenizer != "bytes":
        data["tokenizer"] = here(job.data.tokenizer)  # type: ignore[assignment]
    return job.model_copy(
        update={
            "model": here(job.model),
            "data": job.data.model_copy(update=data),
            "checkpoints": job.checkpoints.model_copy(update={"folder": here(job.checkpoints.folder)}),
            "output": here(job.output),
        }
    )


def paths_of(job: Job) -> tuple[str, ...]:
    """Return what a job needs to go on at another site; its checkpoints first, URLs left out."""
    named = [job.checkpoints.folder, job.model, *job.data.paths]
    named += [] if job.data.tokenizer == "bytes" else [job.data.tokenizer]
    return tuple(path for path in dict.fromkeys(named) if "://" not in path)


def fetch_all(
    job: Job, clusters: Sequence[str], sources: Mapping[str, Source], root: Path, tell: Tell
) -> None:
    """Bring all that `job` needs from the first of `clusters` that has it; raise `UnavailableError` if not.

    A path that none of them has is passed over: what it lacks the worker says best.
    """
    known = [cluster for cluster in clusters if cluster in sources]
    if not known:
        raise UnavailableError(
            f"the files of the job are at {', '.join(clusters)}, to which this site has no source",
            hint="name it in the agent's --sources",
        )
    for path in paths_of(job):
        for cluster in known:
            if sources[cluster].fetch(path, place(root, path), tell):
                break


def _files(origin: Path) -> Iterator[Path]:
    """Every file of a folder, or the file itself; what is unfinished (`.tmp`, `.part`) is left out."""
    if origin.is_file():
        yield origin
    for file in sorted(origin.rglob("*")):
        unfinished = any(part.endswith((".tmp", ".part")) for part in file.relative_to(origin).parts)
        if file.is_file() and not unfinished:
            yield file


def _copy(file: Path, target: Path) -> None:
    """Copy one file, unless it is there already; go on with what an earlier copy has left."""
    if target.is_file() and target.stat().st_size == file.stat().st_size and _digest(target) == _digest(file):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    for begin in (part.stat().st_size if part.exists() else 0, 0):
        with file.open("rb") as reader, part.open("r+b" if begin else "wb") as writer:
            reader.seek(begin)
            writer.seek(begin)
            while block := reader.read(_BLOCK_BYTES):
                writer.write(block)
            writer.truncate()
        if _digest(part) == _digest(file):
            part.replace(target)
            return
    part.unlink()
    raise UnavailableError(f"{target}: what was copied is not what is at {file}")


def _digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
