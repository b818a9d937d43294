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
    output, checkpoints = job.output, job.checkpoints.folder
    yield from _data_problems(job)
    for field, folder in (("output", output), ("checkpoints.folder", checkpoints)):
        if is_catalogue_name(folder):
            yield FieldProblem(field, folder, f"{folder} is an entry of the catalogue", "name a folder of the sites")
    if is_inside(output, checkpoints):
        hint = f"use a folder beside it, such as {_beside(checkpoints, 'output')}"
        yield FieldProblem("output", output, f"{output} lies in checkpoints.folder {checkpoints}", hint)
    for field, folder in (("output", output), ("checkpoints.folder", checkpoints)):
        if same_path(folder, job.model) or same_path(posixpath.join(folder, "config.json"), job.model):
            hint = f"use a folder beside it, such as {_beside(folder, field.partition('.')[0])}"
            yield FieldProblem(field, folder, f"{folder} is the folder of the model {job.model}", hint)
        if job.resume_folder is not None and same_path(folder, job.resume_folder):
            what = f"{folder} is the folder to resume from, which stays unchanged"
            yield FieldProblem(field, folder, what, f"use a folder beside it, such as {_beside(folder, 'resumed')}")


def _data_problems(job: Job) -> Iterator[FieldProblem]:
    """Yield data paths that are listed twice, and folders of the job that data paths would read."""
    seen: set[str] = set()
    for path in job.data.paths:
        if (name := _normal(path)) in seen:
            yield FieldProblem("data.paths", path, f"{path} is listed twice", "list it once: its text counts once")
        seen.add(name)
    for field, folder in (("output", job.output), ("checkpoints.folder", job.checkpoints.folder)):
        for path in job.data.paths:
            if reads_folder(path, folder):
                what = f"{folder} lies in data path {path}: its files would be read as training data"
                yield FieldProblem(field, folder, what, f"use a folder outside, such as {_outside(path, folder)}")
            elif is_inside(_static_root(path), folder):
                what = f"{folder} contains the training data {path}"
                yield FieldProblem(field, folder, what, f"use a folder of its own, such as {_beside(folder, 'run')}")


def reads_folder(data_path: str, folder: str) -> bool:
    """Return whether the data path, a file, folder or glob, names files that would be written to `folder`."""
    if not any(sign in data_path for sign in _WILDCARDS):
        return is_inside(folder, data_path)
    pattern = _normal(data_path)
    if "**" in pattern:
        return is_inside(folder, _static_root(pattern))
    steps, names = posixpath.dirname(pattern).split("/"), _normal(folder).split("/")
    written = any(fnmatchcase(name, posixpath.basename(pattern)) for name in _WRITTEN_FILES)
    return written and len(steps) == len(names) and all(map(fnmatchcase, names, steps))


def is_inside(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or lies in it, by name."""
    inner, outer = _normal(path), _normal(folder)
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def same_path(one: str, other: str) -> bool:
    """Return whether two names are the same path."""
    return _normal(one) == _normal(other)


def _normal(path: str) -> str:
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
