"""Manifests, entries and copies for the tests of the catalogue."""

from __future__ import annotations

import hashlib
from typing import Any

from isthmus.core.catalogue import CopyKey, FileManifest, HeldCopy, ManifestFile
from isthmus.core.views.catalogue_views import VersionAddition
from tests.control.serving import MODEL

SOURCE = "https://files.example.org/wiki"


def manifest(files: dict[str, bytes] | None = None) -> FileManifest:
    """The manifest of files by path."""
    given = {"text.txt": b"some text"} if files is None else files
    rows = [
        ManifestFile(path=path, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for path, content in sorted(given.items())
    ]
    return FileManifest(files=tuple(rows))


def addition(name: str = "wiki", files: dict[str, bytes] | None = None, **fields: Any) -> VersionAddition:
    """A data set, or with `kind="model"` a model with a tokenizer."""
    if fields.get("kind") == "model":
        fields = {"model": MODEL} | fields
        files = files or {"config.json": b"{}", "tokenizer.json": b"{}"}
    wanted = {"kind": "data", "name": name, "source": SOURCE, "manifest": manifest(files)} | fields
    return VersionAddition.model_validate(wanted)


def held(owner: str, of: FileManifest, *, complete: bool = True, problem: str = "") -> HeldCopy:
    """A site's copy of a version, half of it unless it is complete."""
    num_bytes = of.num_bytes if complete else of.num_bytes // 2
    return HeldCopy(owner=owner, version=of.version, num_bytes=num_bytes, complete=complete, problem=problem)


def key(owner: str, of: FileManifest) -> CopyKey:
    """The key of a version."""
    return CopyKey(owner=owner, version=of.version)
