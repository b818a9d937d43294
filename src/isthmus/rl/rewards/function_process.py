"""`FunctionProcess`: a function of the user's, in a process that ends when a call takes too long."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from isthmus.core.errors import DataError

_HOST = Path(__file__).with_name("function_host.py")
_PIECE_BYTES = 1 << 16

FunctionKind = Literal["reward", "environment"]


class FunctionProcess:
    """Calls function `FILE.py:NAME` in one process, which starts again after a call that was late or ended it.

    What fails is an `error` that names the function as one of kind `kind`. An answer has at most `max_bytes`.
    """

    def __init__(
        self, function: str, kind: FunctionKind, timeout_s: float, error: type[DataError],
        clock: Callable[[], float] = time.monotonic, max_bytes: int = _PIECE_BYTES,
    ) -> None:  # fmt: skip
        self._file, _, self._name = function.rpartition(":")
        self._kind, self._timeout_s, self._error, self._clock = kind, timeout_s, error, clock
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, *arguments: Any) -> Any:
        """Return what the function answers to JSON values; raises the error if it raises, ends or is late."""
        process = self._process or self._start()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        try:
            process.stdin.write(json.dumps(arguments).encode() + b"\n")
            process.stdin.flush()
            found = json.loads(self._read_line(process.stdout.fileno()))
            if "error" in found:
                raise self._error(
                    f"{self._kind} {self._name} raised {found['error']}", hint=f"fix {self._file}"
                )  # fmt: skip
            return found["answer"]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            self.close()
            raise self._error(
                f"the process of {self._kind} {self._name} ended", hint=f"fix {self._file}"
            ) from problem  # fmt: skip

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(  # noqa: S603 - the user's function, under the limits of the worker
            [sys.executable, "-I", str(_HOST), self._kind, self._file, self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self._process

    def _read_line(self, source: int) -> bytes:
        """Return the next line of the pipe; raises the error after `timeout_s`."""
        line, deadline_s = b"", self._clock() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(deadline_s - self._clock(), 0.0)):
                    self.close()
                    raise self._error(
                        f"{self._kind} {self._name} took longer than {self._timeout_s:g} s",
                        hint=f"set timeout_s of the {self._kind}, or make the function faster",
                    )
                piece = os.read(source, _PIECE_BYTES)
                line += piece
                if not piece or len(line) > self._max_bytes:
                    raise ValueError("no answer")
        return line
