"""Bodies of the REST interface for the catalogue of models and data sets, shared by server and command line."""

from __future__ import annotations

from pydantic import Field, model_validator

from isthmus.core.base_model import FrozenModel, Name, NonNegativeInt, PositiveInt
from isthmus.core.catalogue import ContentDigest, EntryKind, FileManifest, SourceUrl
from isthmus.core.model import Model


class CopyView(FrozenModel):
    """A site's copy of a version: complete, partial with `num_bytes` of it there, or with a problem."""

    cluster: Name
    connected: bool
    num_bytes: NonNegativeInt
    complete: bool
    problem: str = ""


class VersionView(FrozenModel):
    """A version of an entry: the digest of its manifest, where its files come from, and which sites have copies."""

    version: ContentDigest
    source: SourceUrl
    num_files: PositiveInt
    num_bytes: NonNegativeInt
    added_s: float
    has_tokenizer: bool = False
    model: Model | None = None
    copies: tuple[CopyView, ...] = ()


class EntryView(FrozenModel):
    """An entry of the catalogue with its versions, oldest first. `own`: it is the caller's, who sees its `grants`."""

    kind: EntryKind
    owner: Name
    name: Name
    grants: tuple[Name, ...] = ()
    own: bool = False
    versions: tuple[VersionView, ...] = Field(min_length=1)


class VersionAddition(FrozenModel):
    """A new version of an entry of the caller, which is made if it is new. A model has its dimensions."""

    kind: EntryKind
    name: Name
    source: SourceUrl
    manifest: FileManifest
    model: Model | None = None

    @model_validator(mode="after")
    def _check_model(self) -> VersionAddition:
        if (self.kind == "model") != (self.model is not None):
            raise ValueError("a model has its dimensions, read from its config.json; data has none")
        if self.kind == "model" and not self.manifest.has("config.json"):
            raise ValueError("a model has a config.json at the top of its folder")
        return self


class GrantChange(FrozenModel):
    """Grant an entry to `user`, or with `granted: false` take the grant back."""

    user: Name
    granted: bool = True
