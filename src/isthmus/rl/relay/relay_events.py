"""Events of a `VersionRelay`: what its sources, the sites that ask it, and the clock have said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Version(NamedTuple):
    """The weights after `step` training steps, named by their content."""

    step: int
    digest: str


class Coding(NamedTuple):
    """The chunks of a version as changes to `base`, or of whole weights (None)."""

    version: Version
    base: Version | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceJoined:
    """Chunks can be asked of a source; the one with the lowest `place` is the nearest."""

    source: str
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceExpected:
    """A source is being connected: farther ones are not asked before it has had some time."""

    source: str
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLost:
    """The connection to a source is gone, with all that it had not delivered."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOffered:
    """The newest version: it can be had whole, or as changes to one of `bases`."""

    version: Version
    bases: tuple[Version, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkArrived:
    """A chunk has arrived; `is_right` if what it makes has the digest that the version names."""

    source: str
    coding: Coding
    number: int
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLacks:
    """A source does not have the chunks of a coding, and will not get them."""

    source: str
    coding: Coding


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksAsked:
    """A site asks for chunks, each to be sent as soon as it is here."""

    child: str
    coding: Coding
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLost:
    """The connection of a site that asks is gone."""

    child: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTick:
    """Nothing has happened but time."""


RelayEvent = (
    SourceExpected | SourceJoined | SourceLost | VersionOffered | ChunkArrived | SourceLacks | ChunksAsked | ChildLost
    | RelayTick
)  # fmt: skip
