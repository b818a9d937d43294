"""`find_entry`: the entry of the catalogue that a word names, and the version of a job's model in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.core.catalogue import CATALOGUE_PREFIX, MIN_VERSION_CHARS, CatalogueName, EntryKind
from isthmus.core.errors import InputError, ModelError, NotFoundError
from isthmus.core.model import Model
from isthmus.core.views.catalogue_views import EntryView, VersionView

ListEntries = Callable[[EntryKind], Sequence[EntryView]]
"""Returns the entries of a kind that the user may use."""


@dataclass(frozen=True, kw_only=True)
class CatalogueModel:
    """A model of the catalogue: its full name, its dimensions, and whether it has a tokenizer."""

    name: str
    model: Model
    has_tokenizer: bool


def find_entry(entries: Sequence[EntryView], word: str) -> tuple[EntryView, str | None]:
    """Return the entry that `[OWNER/]NAME[@VERSION]` names, the caller's own first, and the digits of the version.

    Raises `InputError` for a word of another form, `NotFoundError` for no such entry.
    """
    given = CatalogueName.parse(word if word.startswith(CATALOGUE_PREFIX) else CATALOGUE_PREFIX + word)
    named = [one for one in entries if one.name == given.name and given.owner in (None, one.owner)]
    found = [one for one in named if one.own] or named
    if len(found) > 1:
        owners = ", ".join(f"{one.owner}/{one.name}" for one in found)
        raise InputError(f"'{given.name}' names several entries: {owners}", hint="write OWNER/NAME")
    if not found:
        known = ", ".join(f"{one.owner}/{one.name}" for one in entries[:8]) or "none"
        raise NotFoundError(f"no entry '{word[:160]}' in the catalogue", hint=f"entries that you may use: {known}")
    return found[0], given.version


def find_version(entry: EntryView, version: str | None) -> VersionView:
    """Return the version of an entry with these first digits, or the newest; raise `NotFoundError` without one."""
    found = [one for one in entry.versions if one.version.startswith(version or "")]
    if not found or (version is not None and len(found) > 1):
        known = ", ".join(one.version[:MIN_VERSION_CHARS] for one in entry.versions[-5:])
        raise NotFoundError(
            f"{entry.owner}/{entry.name} has {len(found)} versions '{version}'", hint=f"its newest: {known}"
        )
    return found[-1]


def find_model(list_entries: ListEntries | None, word: str) -> CatalogueModel:
    """Return the model that a job names; raise `ModelError` if there is no server to ask."""
    name = CatalogueName.parse(word)
    if list_entries is None:
        raise ModelError(
            f"{word} is a model of the server's catalogue, which this command does not ask",
            hint="`isthmus submit --dry-run` plans such a job",
        )
    owned = [one for one in list_entries("model") if name.owner is not None or one.own]
    entry, version = find_entry(owned, word)
    found = find_version(entry, version)
    if found.model is None:
        raise ModelError(f"{word} has no dimensions", hint="add the model again")
    full = str(CatalogueName(owner=entry.owner, name=entry.name, version=found.version))
    return CatalogueModel(
        name=full, model=found.model.model_copy(update={"path": full}), has_tokenizer=found.has_tokenizer
    )
