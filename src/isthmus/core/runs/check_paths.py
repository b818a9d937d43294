"""`path_problems`: folders of a job that would damage each other, by their names alone (no disk is read)."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from fnmatch import fnmatchcase

from isthmus.core.catalogue import is_catalogue_name
from isthmus.core.job import Job
from isthmus.core.runs.field_problem import FieldProblem

_WILDCARDS = "*?["
_WRITTEN_FILES = ("config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "model.safetensors.index.json")
"""Text files that a job writes to its folders."""


def path_problems(job: Job) -> Iterator[FieldProblem]:
    """Yield the folders of a job that lie in one another where the job or the next one would misread them."""
    folders = (("output", job.output), ("checkpoints.folder", job.checkpoints.folder))
    output, checkpoints = (_normal(folder) for _, folder in folders)
    yield from _data_problems(job, folders)
    for field, folder in folders:
        if is_catalogue_name(folder):
            yield FieldProblem(field, folder, f"{folder} is an entry of the catalogue", "name a folder of the sites")
    if _holds(checkpoints, output):
        hint = f"use a folder beside it, such as {_beside(checkpoints, 'output')}"
        what = f"{job.output} lies in checkpoints.folder {job.checkpoints.folder}"
        yield FieldProblem("output", job.output, what, hint)
    model, resume = _normal(job.model), None if job.resume_folder is None else _normal(job.resume_folder)
    for (field, folder), name in zip(folders, (output, checkpoints), strict=True):
        if model == name or (model.endswith("config.json") and model == _normal(posixpath.join(name, "config.json"))):
            hint = f"use a folder beside it, such as {_beside(folder, field.partition('.')[0])}"
            yield FieldProblem(field, folder, f"{folder} is the folder of the model {job.model}", hint)
        if name == resume:
            what = f"{folder} is the folder to resume from, which stays unchanged"
            yield FieldProblem(field, folder, what, f"use a folder beside it, such as {_beside(folder, 'resumed')}")


def _data_problems(job: Job, folders: tuple[tuple[str, str], ...]) -> Iterator[FieldProblem]:
    """Yield data paths that are listed twice, and `folders` (by field) of the job that data paths would read."""
    names = dict[str, tuple[str, bool]]()
    for path in job.data.paths:
        if (name := _normal(path)) in names:
            yield FieldProblem("data.paths", path, f"{path} is listed twice", "list it once: its text counts once")
        names[name] = path, _is_pattern(path)
    for field, folder in folders:
        inner = _normal(folder)
        for name, (path, is_pattern) in names.items():
            if reads_folder(path, folder) if is_pattern else _holds(name, inner):
                what = f"{folder} lies in data path {path}: its files would be read as training data"
                yield FieldProblem(field, folder, what, f"use a folder outside, such as {_outside(path, folder)}")
            elif _holds(inner, _normal(_static_root(path)) if is_pattern else name):
                what = f"{folder} contains the training data {path}"
                yield FieldProblem(field, folder, what, f"use a folder of its own, such as {_beside(folder, 'run')}")


def reads_folder(data_path: str, folder: str) -> bool:
    """Return whether the data path, a file, folder or glob, names files that would be written to `folder`."""
    if not _is_pattern(data_path):
        return is_inside(folder, data_path)
    pattern = _normal(data_path)
    if "**" in pattern:
        return is_inside(folder, _static_root(pattern))
    steps, names = posixpath.dirname(pattern).split("/"), _normal(folder).split("/")
    written = any(fnmatchcase(name, posixpath.basename(pattern)) for name in _WRITTEN_FILES)
    return written and len(steps) == len(names) and all(map(fnmatchcase, names, steps))


def is_inside(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or lies in it, by name."""
    return _holds(_normal(folder), _normal(path))


def _is_pattern(path: str) -> bool:
    return "*" in path or "?" in path or "[" in path


def _holds(folder: str, path: str) -> bool:
    """Return whether a normal name is that of a folder or lies in it."""
    return folder == path or path.startswith(folder.rstrip("/") + "/")


def same_path(one: str, other: str) -> bool:
    """Return whether two names are the same path."""
    return _normal(one) == _normal(other)


def _normal(path: str) -> str:
    if path and not ("/." in path or "//" in path or path.startswith(".") or path.endswith("/")):
        return path  # nothing to resolve, as in most names
    scheme, mark, rest = path.rpartition("://")
    return scheme + mark + posixpath.normpath(rest)


def _static_root(pattern: str) -> str:
    """Return the folder of a glob before its first wildcard; a path without one unchanged."""
    first = min((pattern.index(sign) for sign in _WILDCARDS if sign in pattern), default=len(pattern))
    return pattern if first == len(pattern) else posixpath.dirname(pattern[:first]) or "."


def _beside(folder: str, name: str) -> str:
    """Return a folder beside `folder`."""
    return posixpath.join(posixpath.dirname(_normal(folder)), f"{posixpath.basename(_normal(folder))}-{name}")


def _outside(data_path: str, folder: str) -> str:
    """Return a folder outside the data path, with the last name of `folder`."""
    root = posixpath.dirname(_normal(_static_root(data_path)))
    return posixpath.join(
        root,
        f"{posixpath.basename(_normal(data_path)).strip('*?[]. ') or 'data'}-{posixpath.basename(_normal(folder))}",
    )
