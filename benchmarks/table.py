"""The rows that every benchmark prints: our figure, a peer's where there is one, the target, and if it is met."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

COLUMNS = ("what", "ours", "unit", "peer", "peer_value", "ratio", "target", "met")
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure. `ratio` is ours over the peer's; `target` says in words what `met` judges.

    `part` is the part of the benchmark that measured it, "" where a benchmark has no parts: pages keep a table for
    each part, with the commit that it measured.

    None in `peer`, `peer_value`, `ratio` or `met` means that there is none.
    """

    what: str
    ours: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None
    part: str = ""


def compared(what: str, ours: float, unit: str, peer: str, peer_value: float, **more: Any) -> Row:
    """Return a row beside a peer's figure, with `ratio` worked out (None where the peer's figure is 0)."""
    ratio = ours / peer_value if peer_value else None
    return Row(what=what, ours=ours, unit=unit, peer=peer, peer_value=peer_value, ratio=ratio, **more)


def run_parts(parts: Mapping[str, Callable[[], Sequence[Row]]], chosen: Iterable[str]) -> list[Row]:
    """Run the chosen parts of a benchmark, each named on standard error as it begins; return the rows of all."""
    rows: list[Row] = []
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += [replace(row, part=name) for row in parts[name]()]
    return rows


def markdown(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(getattr(row, name)) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def commit_of(folder: Path) -> str:
    """Return the short hash of the commit checked out in `folder`.

    It ends in `-dirty` when tracked files under `src` or `benchmarks` are modified, since only these decide what a
    benchmark measures. It is `unknown` outside a checkout.
    """
    try:
        commit = _git(folder, "rev-parse", "--short", "HEAD")
        is_dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if is_dirty else commit


@functools.cache
def printed_at() -> str:
    """Return the line below every printed table: the commit that it measured, as of the first call."""
    return f"Printed at commit `{commit_of(ROOT)}`."


def print_rows(rows: Sequence[Row], as_json: bool) -> None:
    """Print the rows on standard output: one JSON object a line, or one Markdown table with its commit."""
    if as_json:
        for row in rows:
            print(
                json.dumps({name: value for name, value in asdict(row).items() if name != "part" or value}), flush=True
            )
    else:
        print(f"{markdown(rows)}\n\n{printed_at()}", flush=True)


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return str(value).replace("|", "\\|")
