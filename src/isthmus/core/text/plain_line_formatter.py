"""`PlainLineFormatter`: a record of a log is one line, whatever the words of others in it."""

from __future__ import annotations

import logging

from isthmus.core.text.printable import printable


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
