"""What commands write, whatever the stream can carry."""

from __future__ import annotations

import errno
import io
import json

import pytest

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment


def test_a_terminal_without_a_character_shows_something_else_and_json_loses_nothing() -> None:
    """The terminal shows `?`; a program reads the original characters; no traceback is shown."""
    written = io.BytesIO()
    shell = CliEnvironment(stdout=io.TextIOWrapper(written, encoding="ascii"), variables={})
    shell.print("loss ▁▂█")
    shell.print_json({"reason": "no text in /daten/größe"})
    shown, told = written.getvalue().decode("ascii").splitlines()
    assert shown.rstrip() == "loss ???"
    assert json.loads(told) == {"reason": "no text in /daten/größe"}


def test_json_stays_readable_where_it_can() -> None:
    """On a stream of Unicode nothing is escaped."""
    shell = CliEnvironment(stdout=io.StringIO(), variables={})
    shell.print_json({"reason": "größe"})
    assert shell.stdout.getvalue() == '{"reason": "größe"}\n'  # type: ignore[attr-defined]


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, _text: str) -> int:
        """Refuse as the system does."""
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("words", [["chips"], ["chips", "--json"], ["schema", "job"]])
def test_a_full_disk_behind_the_output_is_an_error_like_any(words: list[str]) -> None:
    """It is named on standard error, with the exit status of what cannot be had."""
    shell = CliEnvironment(stdout=Full(), stderr=io.StringIO(), variables={})
    assert main(words, env=shell) == 8
    assert shell.stderr.getvalue().startswith("error: cannot write: No space left")  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", ["", "0", "wide", "-4", "90"])
def test_a_width_that_is_none_is_passed_over(columns: str) -> None:
    """`COLUMNS` comes from people's shells, and may be anything."""
    shell = CliEnvironment(stdout=io.StringIO(), variables={"COLUMNS": columns})
    assert shell.console().width == (90 if columns == "90" else 160)


def test_closed_streams_are_written_to_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has None for a stream that was closed before it began (`isthmus agent >&- 2>&-`)."""
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert main(["chips"], env=CliEnvironment(variables={})) == 0
    assert main(["chisp"], env=CliEnvironment(variables={})) == 2
