"""The pages under `docs/benchmarks`: one per subject with the tables of its benchmarks, and a summary of all.

The pages keep the tables: what a benchmark printed stays until it is run again. All other words come from the
benchmarks' docstrings and `benchmarks.subjects`, so `python -m benchmarks --render` writes them again.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.subjects import SUBJECTS, Figure, Subject
from benchmarks.table import COLUMNS, Row, markdown

BENCHMARKS = Path(__file__).parent
FOLDER = BENCHMARKS.parent / "docs" / "benchmarks"
HEADING = re.compile(r"^## `python -m benchmarks\.(\w+)`$", re.MULTILINE)
PART = re.compile(r"^### `([^`\n]+)`$\n\n", re.MULTILINE)
"""The heading of a part of a benchmark, above the table of its rows."""
TABLE = re.compile(r"^\| |^### `", re.MULTILINE)
COLUMN_TEXT = f"Columns: {', '.join(COLUMNS)}. `ratio` is ours over the peer's. Compare figures within one table."

INTRODUCTION = """\
`make bench` (`python -m benchmarks`) runs every benchmark and writes these pages; `python -m benchmarks NAME` runs one
of them, and `python -m benchmarks --list` names them all. Each subject has a page with the whole tables, and each table
names its commit. The table below gives the figures to know first, with their goals and, where there is one, the figure
of a peer in the same test."""


def description_of(name: str) -> str:
    """Return the docstring of a benchmark."""
    return (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8").split('"""')[1].strip()


def tables_of(page: str) -> dict[str, str]:
    """Return what a page keeps of each benchmark: everything from its first table on."""
    headings = list(HEADING.finditer(page))
    starts = [one.start() for one in headings]
    sections = {one[1]: page[one.end() : end] for one, end in zip(headings, [*starts[1:], len(page)], strict=False)}
    tables = {name: TABLE.search(text) for name, text in sections.items()}
    return {name: sections[name][first.start() :].strip() for name, first in tables.items() if first}


def updated_table(kept: str, rows: Sequence[Row], stamp: str) -> str:
    """Return what a page keeps of a benchmark after a run: a table, or one for each of its parts.

    Parts that did not run stay as they are in `kept`. `stamp` is the line below each table that this run printed.
    """
    if any(not row.part for row in rows):
        return f"{markdown(rows)}\n\n{stamp}"
    words = PART.split(kept)
    parts = {name: text.strip() for name, text in zip(words[1::2], words[2::2], strict=True)}
    for name in dict.fromkeys(row.part for row in rows):
        parts[name] = f"{markdown([row for row in rows if row.part == name])}\n\n{stamp}"
    return "\n\n".join(f"### `{name}`\n\n{text}" for name, text in parts.items())


def read_tables(folder: Path = FOLDER) -> dict[str, str]:
    """Return the kept tables of all pages by the name of their benchmark."""
    pages = (page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.md")))
    return {name: table for page in pages for name, table in tables_of(page).items()}


def write_pages(tables: Mapping[str, str], folder: Path = FOLDER) -> None:
    """Write every page with these tables."""
    folder.mkdir(exist_ok=True)
    for name, text in render_pages(tables).items():
        (folder / name).write_text(text, encoding="utf-8")


def render_pages(tables: Mapping[str, str]) -> dict[str, str]:
    """Return the text of every page by its file name."""
    pages = {f"{subject.page}.md": _subject_page(subject, tables) for subject in SUBJECTS}
    return {"index.md": _summary(tables), **pages}


def row_of(figure: Figure, tables: Mapping[str, str]) -> dict[str, str] | None:
    """Return the cells of a figure's row by column, None where its benchmark has no such row."""
    for line in tables.get(figure.benchmark, "").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(COLUMNS) and re.match(figure.row, cells[0]):
            return dict(zip(COLUMNS, cells, strict=True))
    return None


def _subject_page(subject: Subject, tables: Mapping[str, str]) -> str:
    parts = [f"# Benchmarks: {subject.title.lower()}", subject.question, COLUMN_TEXT]
    for name in subject.benchmarks:
        parts += [f"## `python -m benchmarks.{name}`", description_of(name)]
        parts.append(tables.get(name, "No run is recorded yet."))
    return "\n\n".join(parts) + "\n"


def _summary(tables: Mapping[str, str]) -> str:
    parts = [
        "# Benchmarks",
        INTRODUCTION,
        "\n".join(
            textwrap.fill(f"- [{one.title}]({one.page}.md): {one.question}", 120, subsequent_indent="  ")
            for one in SUBJECTS
        ),
        "\n".join(["| subject | what | goal | figure | met | peer |", "|" + "---|" * 6, *_summary_rows(tables)]),
    ]
    return "\n\n".join(parts) + "\n"


def _summary_rows(tables: Mapping[str, str]) -> Sequence[str]:
    lines = []
    for subject in SUBJECTS:
        for figure in subject.figures:
            if row := row_of(figure, tables):
                goal = row["target"].partition(";")[0]
                value = f"{row['ours']} {row['unit']}".strip()
                peer = f"{row['peer']}: {row['peer_value']}" if row["peer_value"] else ""
                cells = [f"[{subject.title}]({subject.page}.md)", figure.label, goal, value, row["met"], peer]
                lines.append("| " + " | ".join(cells) + " |")
    return lines
