"""`JsonLineFormatter`: a record of a log is one line of JSON, whatever the words of others in it."""

from __future__ import annotations

import datetime
import json
import logging

from isthmus.core.text.printable import visible_json

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}
"""Standard attributes of a log record; all others are extra fields."""


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
