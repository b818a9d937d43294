"""What the report's sections are made of: tables, bars, numbers as text. Text goes through `escape`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from isthmus.core.units import format_seconds


def share_bar(parts: Sequence[float]) -> str:
    """Return a bar of computing, exposed communication and idling, as shares of their sum."""
    total = sum(parts) or 1.0
    kinds = ("compute", "exposed", "idle")
    pieces = "".join(
        f'<i class="{kind}" style="width:{100 * part / total:.2f}%" title="{kind} {part / total:.0%}"></i>'
        for kind, part in zip(kinds, parts, strict=True)
    )
    return f'<span class="share">{pieces}</span>'


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    raw: Sequence[int] = (),
) -> str:
    """Return a table; columns in `numbers` align right, those in `raw` are HTML already."""
    right = set(numbers)

    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="number"' if index in right else ""
        return f"<{tag}{kind}>{text if tag == 'td' and index in raw else escape(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(columns))
    body = "".join("<tr>" + "".join(cell("td", i, x) for i, x in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def none(text: str) -> str:
    """Return the words for a table that has no rows."""
    return f'<p class="none">{escape(text)}</p>'


def moment(at_s: float) -> str:
    """Return a time since the epoch as people read it."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def seconds(value: float | None) -> str:
    """Return a time, or a dash for one that is not known."""
    return "–" if value is None else format_seconds(value)


def rate(value: float | None) -> str:
    """Return a number with its thousands set apart, or a dash."""
    return "–" if value is None else f"{value:,.0f}"


def ratio(measured: float | None, foreseen: float | None) -> str:
    """Return measured over foreseen, or a dash."""
    return f"{measured / foreseen:.2f}" if measured is not None and foreseen else "–"


def setting(value: Any) -> str:
    """Return the value of a setting as text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
