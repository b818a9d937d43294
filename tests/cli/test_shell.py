"""What commands write, whatever the stream can carry."""

from __future__ import annotations

import io
import json

from isthmus.cli.shell import Shell


def test_a_terminal_without_a_character_shows_something_else_and_json_loses_nothing() -> None:
    """People see `?`; a program reads back what was meant; nobody sees a traceback."""
    written = io.BytesIO()
    shell = Shell(stdout=io.TextIOWrapper(written, encoding="ascii"), environ={})
    shell.print("loss ▁▂█")
    shell.line({"reason": "no text in /daten/größe"})
    shown, told = written.getvalue().decode("ascii").splitlines()
    assert shown.rstrip() == "loss ???"
    assert json.loads(told) == {"reason": "no text in /daten/größe"}


def test_json_stays_readable_where_it_can() -> None:
    """On a stream of Unicode nothing is escaped."""
    shell = Shell(stdout=io.StringIO(), environ={})
    shell.line({"reason": "größe"})
    assert shell.stdout.getvalue() == '{"reason": "größe"}\n'  # type: ignore[attr-defined]
