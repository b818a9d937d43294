"""The rows of benchmarks: the contract that `make bench` and the validation read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.table import Row, commit_of, compared, markdown, print_rows, printed_at


def test_a_row_has_exactly_the_agreed_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object a line, with these keys in this order."""
    print_rows([Row(what="x", ours=1.0, unit="s"), Row(what="y", ours=2.0, unit="s", met=True)], as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(line) for line in lines] == [
        ["what", "ours", "unit", "peer", "peer_value", "ratio", "target", "met"]
    ] * 2


def test_the_ratio_is_ours_over_the_peers() -> None:
    """And none where the peer's figure is 0."""
    assert compared("x", 3.0, "s", "p", 2.0).ratio == 1.5
    assert compared("x", 3.0, "s", "p", 0.0).ratio is None


def test_a_missed_target_stands_out_and_a_bar_does_not_break_the_table() -> None:
    """The Markdown has one line per row, and as many cells as columns."""
    text = markdown([Row(what="a|b", ours=12345.6, unit="s", target="< 1 s", met=False)])
    assert text.splitlines()[2] == "| a\\|b | 12346 | s |  |  |  | < 1 s | **no** |"


def test_every_printed_table_names_its_commit(capsys: pytest.CaptureFixture[str]) -> None:
    """In the line below it."""
    print_rows([Row(what="x", ours=1.0, unit="s")], as_json=False)
    assert capsys.readouterr().out.splitlines()[-2:] == ["", printed_at()]


def test_a_modified_checkout_is_dirty(tmp_path: Path) -> None:
    """A commit alone would name what was not measured; files outside `src` and `benchmarks` measure nothing."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("src", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "First")
    commit = git("rev-parse", "--short", "HEAD")
    assert commit_of(tmp_path) == commit
    (tmp_path / "docs" / "file").write_text("2")
    assert commit_of(tmp_path) == commit
    (tmp_path / "src" / "file").write_text("2")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_outside_a_checkout_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark of an unpacked archive runs all the same."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) == "unknown"
