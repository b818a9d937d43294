"""`Shell`: what commands touch of the world, passed in so that tests need no process, clock or network."""

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

if TYPE_CHECKING:
    import httpx
    from rich.console import Console, RenderableType


class _Nowhere(io.StringIO):
    """In place of a stream that was closed before Python began (`>&-`), which it has as None."""

    def write(self, text: str) -> int:
        return len(text)


@dataclass
class Shell:
    """Where commands read settings and write answers; `as_json` is the command's `--json`.

    `transport` replaces the network (None: the real one); `now` is in seconds since the epoch.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    stdout: TextIO = field(default_factory=lambda: sys.stdout or _Nowhere())
    stderr: TextIO = field(default_factory=lambda: sys.stderr or _Nowhere())
    transport: httpx.BaseTransport | None = None
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.time
    as_json: bool = False

    def __post_init__(self) -> None:
        """Let a terminal that lacks a character show `?` instead."""
        if isinstance(self.stdout, io.TextIOWrapper):
            self.stdout.reconfigure(errors="replace")

    def console(self, stream: TextIO | None = None) -> Console:
        """Return a rich console on `stream` (standard output): coloured on a terminal, plain elsewhere."""
        from rich.console import Console

        target = stream or self.stdout
        columns = self.environ.get("COLUMNS", "")
        width = None if target.isatty() else int(columns if columns.isdecimal() else 0) or 160
        return Console(file=target, width=width, highlight=False, soft_wrap=not target.isatty())

    def answer(self, value: BaseModel | Sequence[BaseModel] | Any, show: Callable[[], Any]) -> None:
        """Print `value` as a line of JSON where `--json` asks for it, else what `show` returns."""
        if self.as_json:
            self.line(value)
            return
        self.print(show())

    def print(self, *shown: RenderableType) -> None:
        """Print for people on standard output; strings are taken literally, never as markup."""
        console = self.console()
        for one in shown:
            console.print(one, markup=False)

    def note(self, text: str) -> None:
        """Print an aside on standard error."""
        self.stderr.write(text + "\n")
        self.stderr.flush()

    def line(self, value: BaseModel | Sequence[BaseModel] | Any) -> None:
        """Print one line of JSON and flush it; escaped where the stream could not carry it otherwise."""
        unicode = (self.stdout.encoding or "utf-8").lower().startswith("utf")
        self.stdout.write(json.dumps(plain(value), ensure_ascii=not unicode) + "\n")
        self.stdout.flush()


def plain(value: Any) -> Any:
    """Return `value` as JSON's own types: models by their aliases, sequences element by element."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value
