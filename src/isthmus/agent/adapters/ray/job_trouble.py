"""`job_trouble`: why a job of Ray has failed, in one line, and what an administrator can do."""

from __future__ import annotations

import re

from isthmus.agent.adapters.ray.ray_rest import RayJob
from isthmus.core.text.printable import printable

_MAX_CHARS = 200
_OF_RAY = re.compile(r"Running entrypoint for job |\d{4}-\d\d-\d\d [^\t]*\tINFO ")
"""What Ray writes into the log of a job, sooner or later than the program."""
_PYTHON = "set options.python to a Python 3.11 or later with Ray, as Ray's head calls it"
_WAY = "set options.courier_host and courier_port to where Ray's nodes reach the agent"
_HINTS = (
    ("No module named 'ray'", _PYTHON), (": not found", _PYTHON), ("No such file or directory", _PYTHON),
    ("command not found", _PYTHON), ("needs Python", _PYTHON), ("gave up: ", _WAY),
)  # fmt: skip


def job_trouble(job: RayJob | None) -> str:
    """Return what Ray says of a job that it knows no more (None) or that has failed."""
    if job is None:
        return "Ray has forgotten its job"
    own = "\n".join(line for line in job.message.splitlines() if not _OF_RAY.match(line))
    return f"its job is {printable(job.status, max_chars=20)}: {last_line(own) or 'no message'}"


def last_line(text: str) -> str:
    """Return the last line of a message or log that says something: a program ends with its error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[-1], max_chars=_MAX_CHARS) if lines else ""


def trouble_hint(trouble: str) -> str:
    """Return what to do about a trouble, "" if nothing is known."""
    return next((hint for words, hint in _HINTS if words in trouble), "")
