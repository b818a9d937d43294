"""`JsonLines`: a log for machines, one JSON object a line, with the fields that a record carries."""

from __future__ import annotations

import datetime
import json
import logging

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""What every record has: the rest are the fields that its logger gave it."""


class JsonLines(logging.Formatter):
    """Writes time (ISO 8601, UTC), level, logger, message, the record's own fields (job, part), error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
