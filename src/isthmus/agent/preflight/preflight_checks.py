"""`run_check`: executes one check of a job's preflight at this site. It reads and lists files, and executes nothing.

Work and memory are bounded: a check opens at most `MAX_FILES` files and parses at most `MAX_JSON_BYTES`. A file system
that does not answer blocks a check; the caller limits its time.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.preflight.data_samples import check_rows
from isthmus.core.errors import InputError, ModelError
from isthmus.core.messages.preflight import MAX_DETAIL_CHARS, CheckKind, CheckResult, SiteCheck
from isthmus.core.model import config_path, read_config
from isthmus.core.rights.storage_rules import Access
from isthmus.core.runs.run_folder import newest_checkpoint_step
from isthmus.core.units import format_bytes

MAX_FILES = 100
"""Data files that are opened to see whether they can be read."""

MAX_ENTRIES = 20_000
"""Entries of a folder or glob that are visited."""

MAX_JSON_BYTES = 64 << 20
"""Largest `config.json` or weight index that is parsed."""

_MAX_PASSED_CHARS = 100
_SAMPLE_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """Where checks run, and for the job of which `user`. `storage` places the paths of jobs."""

    site: str
    user: str = ""
    storage: SiteStorage = field(default_factory=SiteStorage)
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    # Files and folders that checks have made, for the caller to remove, the latest last.
    made_files: list[Path] = field(default_factory=list)
    made_folders: list[Path] = field(default_factory=list)
    # What the other sites of the job need to know, by name.
    facts: dict[str, str] = field(default_factory=dict)

    def local(self, path: str) -> Path:
        """Return the place of a path of the job at this site, by its name."""
        return Path(self.storage.local(path, self.user))

    def allowed(self, check: SiteCheck) -> Path:
        """Return the place of a check's path; raises `InputError` if the job's user may not use it."""
        return Path(self.storage.resolve(_FIELDS.get(check.name, check.name), check.path, _access(check), self.user))


_FIELDS = {"checkpoints": "checkpoints.folder", "storage": "checkpoints.folder", "data": "data.paths"}
"""Fields of a job whose checks have another name."""


def _access(check: SiteCheck) -> Access:
    return "write" if check.kind in ("write", "space", "marker") else "read"


def run_check(check: SiteCheck, context: CheckContext) -> CheckResult:
    """Return the result of a check; what the operating system refuses is a failed check with its reason."""
    try:
        detail = CHECKS[check.kind](check, context)
    except InputError as error:
        return failed(check, error)
    except OSError as error:
        where = error.filename or context.local(check.path)
        return _result(check, "failed", f"{where}: {error.strerror or error}", _hint_of(check, error))
    except (ValueError, RecursionError) as error:
        return _result(check, "failed", f"{context.local(check.path)}: {error}", "correct the file")
    return _result(check, "passed", detail[:_MAX_PASSED_CHARS])


def failed(check: SiteCheck, error: InputError) -> CheckResult:
    """Return the result of a check that `error` ended."""
    return _result(check, "failed", error.message, error.hint or "")


def unfinished(check: SiteCheck, context: CheckContext, limit_s: float) -> CheckResult:
    """Return the result of a check that has not finished in time."""
    detail = f"{context.local(check.path)}: the check has not finished within {limit_s:g} s"
    return _result(check, "unknown", detail, f"check the file system at {context.site}")


def _check_model(check: SiteCheck, context: CheckContext) -> str:
    """Check that the configuration is JSON and, for `weights`, that every weight file can be read."""
    file = config_path(context.allowed(check))
    _require_size(file)
    read_config(file)
    if check.value != "weights":
        return str(file)
    single, index = file.with_name("model.safetensors"), file.with_name("model.safetensors.index.json")
    names = {"model.safetensors"}
    if not single.is_file():
        if not index.is_file():
            raise ModelError(f"{file.parent} has no safetensors weights", hint="copy the model's weights to this site")
        _require_size(index)
        names = _weight_files(index)
    for name in sorted(names)[:MAX_ENTRIES]:
        _read_sample(file.parent / Path(name).name)
    return f"{file.parent}, {len(names)} weight file{'s' if len(names) > 1 else ''}"


def _check_data(check: SiteCheck, context: CheckContext) -> str:
    """Check that a file, folder or glob has content of the job's form, and not too little for one batch.

    A token stands for one byte at least, and each file adds one token at its end.
    """
    path = context.allowed(check)
    num_read = num_bytes = 0
    for file in itertools.islice(_visible_files(path), MAX_FILES):
        num_bytes += file.stat().st_size if _read_sample(file) else 0
        num_read += 1
        if check.value:
            check_rows(file, check.value)
    if num_bytes and num_read < MAX_FILES and num_bytes + num_read < check.num_bytes:
        raise InputError(
            f"{path}: {num_bytes} bytes are too little data for the {check.num_bytes} tokens of one batch",
            hint="add data, or lower training.sequence_length or training.global_batch_size",
        )
    if not num_bytes:
        found = f"{num_read} empty files" if num_read else "no file"
        raise InputError(f"{path}: {found}", hint=f"copy the data to {context.site}, or correct data.paths in the job")
    return str(path)


def _check_file(check: SiteCheck, context: CheckContext) -> str:
    """Check that the tokenizer is one: a file, or a folder with `tokenizer.json`."""
    path = context.allowed(check)
    file = path / "tokenizer.json" if path.is_dir() else path
    _read_sample(file)
    _require_size(file)
    parsed = json.loads(file.read_bytes())
    if not isinstance(parsed, dict) or "model" not in parsed:
        raise InputError(f"{file} is not a tokenizer: it has no 'model'", hint="set data.tokenizer to a tokenizer.json")
    return str(file)


def _check_write(check: SiteCheck, context: CheckContext) -> str:
    """Check that a file can be written and synced in a folder, which is made if it is missing."""
    folder = context.allowed(check)
    _require_file_name(check.value)
    missing = list(itertools.takewhile(lambda one: not one.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    context.made_folders.extend(reversed(missing))
    file = folder / (check.value or f".preflight-{os.getpid()}-{time.monotonic_ns()}")
    context.made_files.append(file)
    file.unlink(missing_ok=True)
    with file.open("xb") as stream:  # follows no link that another user has put there
        stream.write(b"written by the preflight of a job\n")
        stream.flush()
        os.fsync(stream.fileno())
    if not check.value:
        file.unlink()
    context.facts[check.name] = str(folder)[:MAX_DETAIL_CHARS]
    return str(folder)


def _check_resume(check: SiteCheck, context: CheckContext) -> str:
    """Check that the folder to resume from holds a complete checkpoint."""
    folder = context.allowed(check)
    if not newest_checkpoint_step(folder):
        raise InputError(
            f"{folder} holds no complete checkpoint",
            hint="give the checkpoints.folder of a run, which contains step-... folders",
        )
    return str(folder)


def _check_space(check: SiteCheck, context: CheckContext) -> str:
    """Check that the disk of a folder has room; checkpoints that are there already count as free."""
    folder = context.allowed(check)
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    free, own = shutil.disk_usage(existing).free, _size_of_checkpoints(folder)
    if free + own < check.num_bytes:
        already = f" and {format_bytes(own)} of the job's own checkpoints" if own else ""
        raise InputError(
            f"{folder} has {format_bytes(free)} free{already}; checkpoints and result need "
            f"{format_bytes(check.num_bytes)}",
            hint="free disk space, lower checkpoints.keep, or use another folder",
        )
    return f"{format_bytes(free)} free of {format_bytes(check.num_bytes)} needed"


def _check_marker(check: SiteCheck, context: CheckContext) -> str:
    """Find out whether a folder holds the file that another site has left in the same folder of the job."""
    folder = context.allowed(check)
    _require_file_name(check.value)
    if not (folder / check.value).is_file():
        return f"not shared with {check.peer}: each site keeps its own"
    return f"{folder} is shared with {check.peer}"


CHECKS: Mapping[CheckKind, Callable[[SiteCheck, CheckContext], str]] = MappingProxyType(
    {
        "model": _check_model,
        "data": _check_data,
        "file": _check_file,
        "write": _check_write,
        "space": _check_space,
        "marker": _check_marker,
        "resume": _check_resume,
    }
)
"""What each kind of check does: returns what it found, or raises `InputError` or `OSError`."""


def _result(check: SiteCheck, status: str, detail: str, hint: str = "") -> CheckResult:
    fields = {"name": check.name, "status": status, "detail": detail[:MAX_DETAIL_CHARS], "peer": check.peer}
    return CheckResult.model_validate(fields | {"hint": hint[:MAX_DETAIL_CHARS]})


def _hint_of(check: SiteCheck, error: OSError) -> str:
    if isinstance(error, PermissionError):
        need = "write to" if check.kind in ("write", "space") else "read"
        return f"let the agent's user (uid {os.geteuid()}) {need} it"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "give a folder, not a file"
    if isinstance(error, FileNotFoundError):
        return "copy it to this site, or correct the path in the job"
    return "check the file system at this site"


def _require_size(file: Path) -> None:
    if file.stat().st_size > MAX_JSON_BYTES:
        raise InputError(f"{file} is larger than {format_bytes(MAX_JSON_BYTES)}", hint="give another file")


def _require_file_name(name: str) -> None:
    if name and (Path(name).name != name or name == ".." or "\0" in name):
        raise InputError(f"'{name[:80]}' is not a file name", hint="use the same release of agent and server")


def _weight_files(index: Path) -> set[str]:
    """Return the file names in the `weight_map` of an index."""
    parsed = json.loads(index.read_bytes())
    weights = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise ModelError(f"{index} has no weight_map", hint="download the model again")
    return {str(name) for name in weights.values()}


def _read_sample(file: Path) -> int:
    """Read the first byte of a regular file; return the number of bytes read."""
    if file.exists() and not file.is_file():
        raise InputError(f"{file} is not a regular file", hint="give a file")
    with file.open("rb") as stream:
        return len(stream.read(_SAMPLE_BYTES))


def _visible_files(path: Path) -> Iterator[Path]:
    """Yield the regular, visible files of a file, folder or glob."""
    if path.is_file():
        yield path
        return
    first = next((place for place, part in enumerate(path.parts) if any(sign in part for sign in "*?[")), 0)
    if path.is_dir():
        next(path.iterdir(), None)  # a folder that cannot be listed is an error, which `rglob` would skip
        base, found = path, path.rglob("*")
    elif first:
        base = Path(*path.parts[:first])
        found = base.glob("/".join(path.parts[first:]))
    elif path.exists():
        raise InputError(f"{path} is neither a file nor a folder", hint="correct data.paths in the job")
    else:
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(path))
    for file in itertools.islice(found, MAX_ENTRIES):
        hidden = any(part.startswith(".") for part in file.relative_to(base).parts)
        if not hidden and file.is_file():
            yield file


def _size_of_checkpoints(folder: Path) -> int:
    """Return the bytes of the checkpoints in a folder."""
    files = itertools.islice(folder.glob("step-*/*"), MAX_ENTRIES)
    return sum(file.stat().st_size for file in files if file.is_file())
