"""Records of the catalogue: entries with their versions and grants, and the versions that a job uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from isthmus.core.catalogue import CATALOGUE_PREFIX, CatalogueName, EntryKind, FileManifest, is_catalogue_name
from isthmus.core.job import Job, job_accesses
from isthmus.core.model import Model

EntryKey = tuple[EntryKind, str, str]
"""Kind, owner and name of an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """A version of an entry. The manifest is kept in its canonical form."""

    version: str
    source: str
    num_files: int
    num_bytes: int
    added_s: float
    manifest_json: str
    # The files of the manifest at its top folder that make a tokenizer.
    has_tokenizer: bool = False
    # The dimensions of a model; empty for data.
    model_json: str = ""

    @property
    def manifest(self) -> FileManifest:
        """The manifest."""
        return FileManifest.from_canonical(self.manifest_json)

    @property
    def model(self) -> Model | None:
        """The dimensions of a model, None for data."""
        return Model.model_validate_json(self.model_json) if self.model_json else None


@dataclass(slots=True, kw_only=True)
class EntryRecord:
    """An entry: a name of its owner for one model or data set, with its versions, oldest first."""

    kind: EntryKind
    owner: str
    name: str
    versions: dict[str, VersionRecord] = field(default_factory=dict)
    # Users that may see and use it.
    grants: set[str] = field(default_factory=set)

    @property
    def newest(self) -> VersionRecord:
        """The version that was added last."""
        return next(reversed(self.versions.values()))

    def admits(self, user: str | None) -> bool:
        """Return whether `user` (None: an operator) may see and use it."""
        return user is None or user == self.owner or user in self.grants


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVersion:
    """A version that a job uses: at all sites of its plan, or only where training data is read."""

    kind: EntryKind
    owner: str
    name: str
    version: str
    everywhere: bool

    @property
    def key(self) -> EntryKey:
        """The key of its entry."""
        return self.kind, self.owner, self.name

    def __str__(self) -> str:
        return f"{self.owner}/{self.name}@{self.version[:12]}"


def kind_of_field(field_name: str) -> EntryKind:
    """Return the kind of the entries that a field of a job may name."""
    return "data" if field_name == "data.paths" else "model"


def job_versions(job: Job) -> tuple[JobVersion, ...]:
    """Return the versions that a settled job names, each once."""
    return tuple(dict.fromkeys(_versions(job))) if may_name_entries(job) else ()


def may_name_entries(job: Job) -> bool:
    """Return False if no path of a job names an entry of the catalogue, as in most jobs, without going through all."""
    named = (job.model, job.output, job.checkpoints.folder, job.data.tokenizer, *job.data.paths)
    others = (job.resume_folder or "", job.runtime.code or "")
    return f"\n{CATALOGUE_PREFIX}" in "\n".join(("", *named, *others))


def _versions(job: Job) -> Iterator[JobVersion]:
    for field_name, path, _ in job_accesses(job):
        if not is_catalogue_name(path):
            continue
        name = CatalogueName.parse(path)
        if name.owner is not None and name.version is not None:
            kind = kind_of_field(field_name)
            everywhere = field_name != "data.paths"
            yield JobVersion(kind=kind, owner=name.owner, name=name.name, version=name.version, everywhere=everywhere)
