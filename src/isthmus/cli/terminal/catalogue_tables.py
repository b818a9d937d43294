"""Tables of the catalogue of models and data sets."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType

from isthmus.cli.terminal.tables import table
from isthmus.core.catalogue import SHORT_VERSION_CHARS
from isthmus.core.text.printable import printable
from isthmus.core.units import format_bytes, format_seconds
from isthmus.core.views.catalogue_views import CopyView, EntryView, VersionView


def entries_table(title: str, entries: Iterable[EntryView], now_s: float) -> RenderableType:
    """Return the entries with their newest versions; `now_s` is seconds since the epoch."""
    rows = [
        (
            f"{one.owner}/{one.name}",
            (newest := one.versions[-1]).version[:SHORT_VERSION_CHARS],
            f"{len(one.versions)}",
            f"{newest.num_files}",
            format_bytes(newest.num_bytes),
            f"{format_seconds(max(0.0, now_s - newest.added_s))} ago",
            ", ".join(copy.cluster for copy in newest.copies if copy.complete) or "none yet",
        )
        for one in entries
    ]
    columns = ("name", "newest version", "versions", "files", "size", "added", "complete at")
    return table(title.capitalize(), columns, rows)


def entry_page(entry: EntryView, now_s: float) -> RenderableType:
    """Return all that is known of one entry; `now_s` is seconds since the epoch."""
    lines = [f"{entry.kind} {entry.owner}/{entry.name}"]
    if entry.own:
        lines.append(f"granted to {', '.join(entry.grants) or 'no one'}")
    for one in reversed(entry.versions):
        lines += ["", *_version_lines(entry, one, now_s)]
    return "\n".join(lines)


def _version_lines(entry: EntryView, one: VersionView, now_s: float) -> list[str]:
    files = f"{one.num_files} file{'s' if one.num_files > 1 else ''}"
    return [
        f"version  {one.version}",
        f"added    {format_seconds(max(0.0, now_s - one.added_s))} ago; {files}, {format_bytes(one.num_bytes)}",
        f"source   {printable(one.source)}",
        f"in a job catalogue:{entry.owner}/{entry.name}@{one.version[:SHORT_VERSION_CHARS]}",
        *(f"at {copy.cluster}: {_copy_text(copy, one.num_bytes)}" for copy in one.copies),
    ]


def _copy_text(copy: CopyView, num_bytes: int) -> str:
    away = "" if copy.connected else "; the site is not connected"
    if copy.complete:
        return f"complete{away}"
    part = f"{format_bytes(copy.num_bytes)} of {format_bytes(num_bytes)}{away}"
    return f"{part}; {printable(copy.problem)}" if copy.problem else part
