"""`CliEnvironment`: the environment of commands (variables, streams, clock, network), replaceable in tests."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import BaseModel

from isthmus.core.text.printable import LINE_BREAKS, printable, visible_json

if TYPE_CHECKING:
    import httpx
    from rich.console import Console, RenderableType


MAX_ANSWER_CHARS = 4096
"""Longest line that is read as the answer to a question."""


class _NullStream(io.StringIO):
    """Discards output; replaces a standard stream that was closed before start (`>&-`)."""

    def write(self, text: str) -> int:
        return len(text)


@dataclass
class CliEnvironment:
    """Environment variables, streams, network and clock of a command."""

    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    stdout: TextIO = field(default_factory=lambda: sys.stdout or _NullStream())
    stderr: TextIO = field(default_factory=lambda: sys.stderr or _NullStream())
    stdin: TextIO = field(default_factory=lambda: sys.stdin or _NullStream())
    # Replaces the network in tests (None: the real one).
    transport: httpx.BaseTransport | None = None
    sleep: Callable[[float], None] = time.sleep
    # Seconds since the epoch.
    now: Callable[[], float] = time.time
    # The command's `--json`.
    as_json: bool = False

    def __post_init__(self) -> None:
        """Print `?` for characters that the terminal cannot encode."""
        if isinstance(self.stdout, io.TextIOWrapper):
            self.stdout.reconfigure(errors="replace")

    @property
    def interactive(self) -> bool:
        """Whether a person can answer questions: input and output are terminals, and the output is not JSON."""
        return not self.as_json and self.stdin.isatty() and self.stdout.isatty()

    def read_answer(self, question: str) -> str | None:
        """Print `question` and return the stripped line that the user enters, None at the end of the input."""
        self.stdout.write(printable(question, keep=LINE_BREAKS))
        self.stdout.flush()
        line = self.stdin.readline(MAX_ANSWER_CHARS)
        return line.strip() if line else None

    def console(self, stream: TextIO | None = None) -> Console:
        """Return a console on `stream` (default: standard output), with colour on a terminal only.

        It interprets no markup and shows the hidden characters of words from others.
        """
        from isthmus.cli.environment.safe_console import SafeConsole

        target = stream or self.stdout
        columns = self.variables.get("COLUMNS", "")
        width = None if target.isatty() else int(columns if columns.isdecimal() else 0) or 160
        return SafeConsole(
            file=target, width=width, soft_wrap=not target.isatty(), highlight=False, markup=False, emoji=False
        )

    def answer(self, value: BaseModel | Sequence[BaseModel] | Any, show: Callable[[], Any]) -> None:
        """Print `value` as a JSON line with `--json`, else what `show` returns."""
        if self.as_json:
            self.print_json(value)
            return
        self.print(show())

    def print(self, *shown: RenderableType) -> None:
        """Print on standard output; strings are literal text, not markup."""
        console = self.console()
        for one in shown:
            console.print(printable(one, keep=LINE_BREAKS) if isinstance(one, str) else one)

    def print_note(self, text: str) -> None:
        """Print a note on standard error."""
        self.stderr.write(printable(text, keep=LINE_BREAKS) + "\n")
        self.stderr.flush()

    def write_text(self, text: str, *, raw: bool = False) -> None:
        """Write the text of a file or log to standard output: unchanged to a pipe or file, or if `raw`.

        A terminal gets it with its hidden characters shown, since it would execute them.
        """
        self.stdout.write(text if raw or not self.stdout.isatty() else printable(text, keep=LINE_BREAKS))

    def print_json(self, value: BaseModel | Sequence[BaseModel] | Any) -> None:
        """Print one line of JSON and flush; hidden characters are escaped, and all non-ASCII unless it is UTF."""
        unicode = (self.stdout.encoding or "utf-8").lower().startswith("utf")
        self.stdout.write(visible_json(json.dumps(to_json_types(value), ensure_ascii=not unicode)) + "\n")
        self.stdout.flush()


def to_json_types(value: Any) -> Any:
    """Convert `value` to JSON types: models by alias, containers recursively."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, Mapping):
        return {str(key): to_json_types(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(one) for one in value]
    return value
