"""The catalogue of models and data sets: names, manifests and where a version's files come from. Pure.

A version is the SHA-256 of its manifest, which lists every file with its size and SHA-256. Who fetches a version
can therefore check each file, whichever way it came. Entries belong to users: `NAME` is the caller's own, `OWNER/NAME`
one that another user has granted.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from isthmus.core.base_model import NAME_PATTERN, FrozenModel, Name
from isthmus.core.errors import InputError

EntryKind = Literal["model", "data"]
"""Kinds of entries: a model's folder, or a data set."""

CATALOGUE_PREFIX = "catalogue:"
"""Prefix by which a job names an entry: `catalogue:[OWNER/]NAME[@VERSION]`."""

MAX_FILES = 4096
"""Most files of a version."""

MAX_VERSION_BYTES = 1 << 50
"""Largest version, in bytes."""

MIN_VERSION_CHARS = 8
"""Fewest hexadecimal digits that name a version."""

SHORT_VERSION_CHARS = 12
"""Digits of a version that messages show."""

ContentDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_NAME = re.compile(
    r"catalogue:((?P<owner>[A-Za-z0-9][A-Za-z0-9._-]{0,62})/)?(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})"
    r"(@(?P<version>[0-9a-f]{8,64}))?"
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def check_file_path(path: str) -> str:
    """Return the path of a file below a folder; raise `ValueError` if it could name anything else on some system."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts):
        raise ValueError(f"'{path[:80]}' is no path below a folder: its parts are names of at most 255 bytes, no '..'")
    if "\\" in path or ":" in path or not path.isprintable():
        raise ValueError(f"{path[:80]!r} has a backslash, a colon or a character that cannot be printed")
    return path


def check_source(url: str) -> str:
    """Return the URL of a folder of files; raise `ValueError` for one that holds a secret or is ambiguous."""
    split = urlsplit(url)
    if not _SCHEME.fullmatch(split.scheme) or "://" not in url or not url.isascii() or not url.isprintable():
        raise ValueError(f"{url[:80]!r} is not a URL such as https://HOST/FOLDER, s3://BUCKET/FOLDER or file:///FOLDER")
    if split.query or split.fragment or "@" in split.netloc or "?" in url or "#" in url:
        raise ValueError(
            f"'{url.partition('?')[0].rpartition('@')[2][:80]}': a source has no password, query or fragment, since "
            "grantees and logs see it"
        )
    chained = "::" in url.replace(split.netloc, "", 1)
    if " " in url or "\\" in url or chained or "%2e" in url.lower() or ".." in split.path.split("/"):
        raise ValueError(f"'{url[:80]}': a source has no space, backslash, '::' or '..'")
    if split.scheme == "file" and split.netloc:
        raise ValueError(f"'{url[:80]}': a folder of the site is named file:///FOLDER")
    return url.rstrip("/") if split.netloc or split.path.strip("/") else url


FilePath = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(check_file_path)]
"""The path of a file below the folder of its version, with `/` between names."""

SourceUrl = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(check_source)]
"""The URL of a folder that holds the files of a version, by the paths of its manifest."""


class ManifestFile(FrozenModel):
    """A file of a version: its path below the folder, its size in bytes and its SHA-256."""

    path: FilePath
    num_bytes: Annotated[int, Field(ge=0, le=MAX_VERSION_BYTES)]
    sha256: ContentDigest


class FileManifest(FrozenModel):
    """The files of a version, in the order of their paths; no file is a folder of another."""

    files: Annotated[tuple[ManifestFile, ...], Field(min_length=1, max_length=MAX_FILES)]

    @model_validator(mode="after")
    def _check_files(self) -> FileManifest:
        paths = [one.path for one in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("files are listed once each, in the order of their paths")
        folders = {path[:place] for path in paths for place, sign in enumerate(path) if sign == "/"}
        if both := sorted(folders & set(paths)):
            raise ValueError(f"'{both[0][:80]}' is both a file and a folder")
        if self.num_bytes > MAX_VERSION_BYTES:
            raise ValueError(f"a version has at most {MAX_VERSION_BYTES} bytes")
        return self

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return sum(one.num_bytes for one in self.files)

    @property
    def canonical(self) -> str:
        """The manifest as JSON in the form that its digest is taken of."""
        rows = [[one.path, one.num_bytes, one.sha256] for one in self.files]
        return json.dumps(rows, ensure_ascii=True, separators=(",", ":"))

    @cached_property
    def version(self) -> str:
        """The SHA-256 of the manifest: the version that it makes."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    def has(self, path: str) -> bool:
        """Return whether a file of this path is listed."""
        return any(one.path == path for one in self.files)

    @classmethod
    def from_canonical(cls, text: str) -> FileManifest:
        """Return the manifest of a canonical form; raise `ValueError` for anything else."""
        rows = json.loads(text)
        files = [{"path": path, "num_bytes": num_bytes, "sha256": sha256} for path, num_bytes, sha256 in rows]
        return cls.model_validate({"files": files})


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueName:
    """The name of an entry in a job: `catalogue:[OWNER/]NAME[@VERSION]`; without an owner it is the user's own."""

    owner: str | None = None
    name: str
    version: str | None = None

    @classmethod
    def parse(cls, text: str) -> CatalogueName:
        """Parse a name; raise `InputError` for other text."""
        found = _NAME.fullmatch(text)
        if found is None:
            raise InputError(
                f"'{text[:160]}' names no entry of the catalogue",
                hint=f"write {CATALOGUE_PREFIX}NAME, {CATALOGUE_PREFIX}OWNER/NAME, and @VERSION behind it with at "
                f"least {MIN_VERSION_CHARS} digits",
            )
        return cls(owner=found["owner"], name=found["name"], version=found["version"])

    @property
    def is_pinned(self) -> bool:
        """Whether owner and full version are given."""
        return self.owner is not None and self.version is not None and len(self.version) == 64

    def __str__(self) -> str:
        owner = f"{self.owner}/" if self.owner else ""
        return f"{CATALOGUE_PREFIX}{owner}{self.name}" + (f"@{self.version}" if self.version else "")


def is_catalogue_name(path: str) -> bool:
    """Return whether a path of a job names an entry of the catalogue."""
    return path.startswith(CATALOGUE_PREFIX)


class CopyKey(FrozenModel):
    """What a site keeps a copy of: a version, apart by the owner of its entry.

    Two users' files are kept apart even if they are equal, so that who only knows a digest gets nothing by it.
    """

    owner: Annotated[str, Field(pattern=NAME_PATTERN)]
    version: ContentDigest

    def __str__(self) -> str:
        return f"{self.owner}@{self.version[:SHORT_VERSION_CHARS]}"


class HeldCopy(CopyKey):
    """A site's copy of a version: how many bytes of it are there, whether all are, or why it cannot be brought."""

    num_bytes: Annotated[int, Field(ge=0, le=MAX_VERSION_BYTES)]
    complete: bool = False
    problem: Annotated[str, Field(max_length=300)] = ""


class NeededVersion(CopyKey):
    """A version that a part of a job needs at a site, and where its files are."""

    kind: EntryKind
    name: Name
    source: SourceUrl
    num_bytes: Annotated[int, Field(ge=0, le=MAX_VERSION_BYTES)]
