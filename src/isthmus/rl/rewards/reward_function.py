"""`RewardFunction`: a function of the user's, in a process that ends when a call takes too long."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from isthmus.rl.rewards.reward_error import RewardError

_HOST = Path(__file__).with_name("function_host.py")
_MAX_ANSWER_BYTES = 1 << 16


class RewardFunction:
    """Calls function `FILE.py:NAME` in one process, which starts again after a call that was late or ended it."""

    def __init__(self, function: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, _, self._name = function.rpartition(":")
        self._timeout_s, self._clock = timeout_s, clock
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Return the reward of a response; raises `RewardError` if the function raises, ends or is late."""
        process = self._process or self._start()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        try:
            process.stdin.write(json.dumps([prompt, response, answer]).encode() + b"\n")
            process.stdin.flush()
            found = json.loads(self._read_line(process.stdout.fileno()))
            if "error" in found:
                raise RewardError(f"reward {self._name} raised {found['error']}", hint=f"fix {self._file}")
            return float(found["reward"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise RewardError(f"the process of reward {self._name} ended", hint=f"fix {self._file}") from error

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(  # noqa: S603 - the user's function, under the limits of the worker
            [sys.executable, "-I", str(_HOST), self._file, self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self._process

    def _read_line(self, source: int) -> bytes:
        """Return the next line of the pipe; raises `RewardError` after `timeout_s`."""
        line, deadline_s = b"", self._clock() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(deadline_s - self._clock(), 0.0)):
                    self.close()
                    raise RewardError(
                        f"reward {self._name} took longer than {self._timeout_s:g} s",
                        hint="set timeout_s of the reward, or make the function faster",
                    )
                piece = os.read(source, _MAX_ANSWER_BYTES)
                line += piece
                if not piece or len(line) > _MAX_ANSWER_BYTES:
                    raise ValueError("no answer")
        return line
