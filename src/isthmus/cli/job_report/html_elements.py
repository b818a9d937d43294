"""HTML elements of the report: bars, formatted numbers. All text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from isthmus.core.text.html_page import page_text
from isthmus.core.units import format_seconds


def share_bar(parts: Sequence[float]) -> str:
    """Return a stacked bar of compute, exposed communication and idle time, as shares of their sum."""
    total = sum(parts) or 1.0
    kinds = ("compute", "exposed", "idle")
    pieces = "".join(
        f'<i class="{kind}" style="width:{100 * part / total:.2f}%" title="{kind} {part / total:.0%}"></i>'
        for kind, part in zip(kinds, parts, strict=True)
    )
    return f'<span class="share">{pieces}</span>'


def empty_section(text: str) -> str:
    """Return a paragraph that replaces an empty table."""
    return f'<p class="none">{page_text(text)}</p>'


def utc_text(at_s: float) -> str:
    """Format a time in seconds since the epoch as UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration_text(duration_s: float | None) -> str:
    """Format a duration in seconds, or a dash for None."""
    return "–" if duration_s is None else format_seconds(duration_s)


def number_text(value: float | None) -> str:
    """Format a number with thousands separators, or a dash for None."""
    return "–" if value is None else f"{value:,.0f}"


def ratio_text(measured: float | None, predicted: float | None) -> str:
    """Format measured over predicted, or a dash."""
    return f"{measured / predicted:.2f}" if measured is not None and predicted else "–"


def setting_text(value: Any) -> str:
    """Format the value of a setting."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
