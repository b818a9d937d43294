"""The log for machines."""

from __future__ import annotations

import json
import logging
import sys

from isthmus.cli.environment.json_log import JsonLineFormatter


def line(**fields: object) -> dict[str, object]:
    record = logging.makeLogRecord(
        {
            "name": "isthmus.server",
            "levelname": "INFO",
            "created": 0.5,
            "msg": "job %s: %s",
            "args": ("a", "b"),
        }
        | fields
    )
    text = JsonLineFormatter().format(record)
    assert "\n" not in text
    found: dict[str, object] = json.loads(text)
    return found


def test_a_line_has_time_level_message_and_the_records_own_fields() -> None:
    """What was logged with a record, job and part above all, are fields of its line."""
    assert line(job="a", part="a/1@east") == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "info",
        "logger": "isthmus.server",
        "message": "job a: b",
        "job": "a",
        "part": "a/1@east",
    }


def test_an_error_stays_on_its_line() -> None:
    """A traceback is one field, so that a line is always a whole document."""
    try:
        raise ValueError("no")
    except ValueError:
        assert "ValueError: no" in str(line(exc_info=sys.exc_info())["error"])


def test_what_json_does_not_know_is_written_as_text() -> None:
    """A field of any kind never breaks the log."""
    assert line(where={1})["where"] == "{1}"
