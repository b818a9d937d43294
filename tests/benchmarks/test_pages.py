"""Rules of the pages of benchmarks: every benchmark has one place, tables survive, the summary shows their rows."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.__main__ as command
from benchmarks.pages import FOLDER, read_tables, render_pages, row_of, tables_of, updated_table, write_pages
from benchmarks.subjects import SUBJECTS
from benchmarks.table import Row, markdown


def test_every_benchmark_belongs_to_one_subject() -> None:
    """A new benchmark is named in `benchmarks.subjects`, once."""
    assert Counter(name for subject in SUBJECTS for name in subject.benchmarks) == Counter(command.names())


@pytest.mark.parametrize("name", render_pages({}))
def test_pages_are_current(name: str) -> None:
    """The words of a page are those of the docstrings, and the summary has the figures of its tables."""
    expected = render_pages(read_tables())[name]
    assert (FOLDER / name).read_text(encoding="utf-8") == expected, "run `python -m benchmarks --render`"


@pytest.mark.parametrize("name", sorted(read_tables()))
def test_every_table_names_its_commit(name: str) -> None:
    """The last line below it does, also where each part of a benchmark has a table of its own."""
    for table in re.split(r"^### .*$", read_tables()[name], flags=re.MULTILINE):
        if table.strip():
            last = table.strip().splitlines()[-1]
            assert last.startswith("Printed")
            assert "commit" in last


def test_every_figure_of_the_summary_has_its_row() -> None:
    """As long as its benchmark has a table: a label that changed is changed in `benchmarks.subjects` too."""
    tables = read_tables()
    figures = [figure for subject in SUBJECTS for figure in subject.figures if figure.benchmark in tables]
    assert not [figure for figure in figures if row_of(figure, tables) is None]


def test_a_table_written_is_a_table_read(tmp_path: Path) -> None:
    """What a benchmark printed stays as it is while other pages are written again."""
    table = markdown([Row(what="gangs placed | whole way", ours=1.0, unit="1/CPU-s", target="2", met=False)])
    write_pages({"control_core": f"{table}\n\nPrinted at commit `abc`."}, tmp_path)
    tables = read_tables(tmp_path)
    assert tables == {"control_core": f"{table}\n\nPrinted at commit `abc`."}
    assert "| 1 1/CPU-s | **no** |" in (tmp_path / "index.md").read_text(encoding="utf-8")


def test_a_part_that_did_not_run_keeps_its_table(tmp_path: Path) -> None:
    """A run of one part replaces the table of this part alone, with the line that names its commit."""
    both = [
        Row(what=what, ours=1.0, unit="s", part=part)
        for what, part in (("x", "one"), ("y", "loss 1.0%"), ("z", "loss 1.0%"))
    ]
    first = updated_table("", both, "Printed at commit `abc`.")
    again = updated_table(first, [replace(both[1], ours=2.0)], "Printed at commit `def`.")
    assert again.split("\n\n")[:3] == first.split("\n\n")[:3] == [
        "### `one`", markdown(both[:1]), "Printed at commit `abc`.",
    ]  # fmt: skip
    assert again.split("\n\n")[3:] == [
        "### `loss 1.0%`", markdown([replace(both[1], ours=2.0)]), "Printed at commit `def`.",
    ]  # fmt: skip
    write_pages({"trust": again}, tmp_path)
    assert read_tables(tmp_path) == {"trust": again}


def test_a_benchmark_without_parts_has_one_table() -> None:
    """It replaces all that was kept."""
    row = Row(what="x", ours=1.0, unit="s")
    assert updated_table("| old |", [row], "Printed.") == f"{markdown([row])}\n\nPrinted."


def test_a_benchmark_without_a_table_has_none() -> None:
    """Neither where its section has only words, nor where there is no section."""
    assert tables_of("# Page\n") == {}
    assert tables_of("# Page\n\n## `python -m benchmarks.gpu`\n\nWords.\n") == {}
