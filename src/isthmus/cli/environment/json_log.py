"""Formatters of logs: a record is one line, whatever the words of others in it; `JsonLineFormatter` writes JSON."""

from __future__ import annotations

import datetime
import json
import logging

from isthmus.core.text.printable import printable, visible_json

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}
"""Standard attributes of a log record; all others are extra fields."""


class PlainLineFormatter(logging.Formatter):
    """Writes time, level, logger and message on one line, with hidden characters shown; a traceback is indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and the indented lines of its traceback."""
        head, *rest = super().format(_one_line(record)).split("\n")
        return "\n".join([printable(head), *(f"    {printable(line)}" for line in rest)])


def _one_line(record: logging.LogRecord) -> logging.LogRecord:
    """Return the record with its message as one line."""
    return logging.makeLogRecord(vars(record) | {"msg": printable(record.getMessage()), "args": None})


class JsonLineFormatter(logging.Formatter):
    """Writes time (ISO 8601, UTC), level, logger, message, extra fields (job, part) and error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a record."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return visible_json(json.dumps(line, default=str, ensure_ascii=False))
