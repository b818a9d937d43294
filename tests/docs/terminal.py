"""`Terminal`: what a page says to type, with commands that stay in the background, in one folder."""

from __future__ import annotations

import doctest
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.docs.follow_guide import ROOT

STAYS = ("isthmus serve", "isthmus agent", "isthmus links")
"""Commands that go on in the background once they have printed what the page shows."""
COMMAND_TIMEOUT_S = 90.0


class Terminal:
    """The two terminals of the page, in one folder; `changes` are words of the page and what is typed instead."""

    def __init__(self, folder: Path, changes: dict[str, str], timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.folder, self.changes, self._timeout_s = folder, changes, timeout_s
        self.exports: dict[str, list[str]] = {"pool": [], "site": []}
        self.running: list[subprocess.Popen[str]] = []

    def type_in(self, side: str, command: str, expected: str) -> str:
        """Type a command and compare what it prints, where `...` stands for any text; return it, if it ends."""
        if command.startswith("export "):
            self.exports[side].append(command)
            return ""
        if command.startswith(STAYS):
            self._watch("; ".join([*self.exports[side], f"exec {command}"]), expected.partition("\n")[0])
            return ""
        got = self._run("; ".join([*self.exports[side], command]))
        assert fits(expected, got), f"{side}$ {command}\nexpected:\n{expected}\ngot:\n{got}"
        return got

    def end(self) -> None:
        """Stop what stays in the background, and wait for it."""
        for process in self.running:
            process.send_signal(signal.SIGINT)
        for process in self.running:
            process.communicate(timeout=COMMAND_TIMEOUT_S)

    def _start(self, text: str) -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ISTHMUS_")}
        environment |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
        }
        environment |= {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.Popen(
            ["bash", "-c", text], cwd=self.folder / "desk", env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _run(self, text: str) -> str:
        process = self._start(text)
        got, _ = process.communicate(timeout=self._timeout_s)
        assert process.returncode == 0, f"$ {text}\n{got}"
        return got

    def _watch(self, text: str, expected: str) -> None:
        """Start a command and wait for the line that the page shows first."""
        process = self._start(text)
        self.running.append(process)
        assert process.stdout is not None
        lines, limit = list[str](), threading.Timer(COMMAND_TIMEOUT_S, process.kill)
        limit.start()
        for line in process.stdout:
            lines.append(line)
            if fits(f"{expected}\n", line):
                limit.cancel()
                return
        raise AssertionError(f"$ {text} has ended:\n{''.join(lines)}")


def fits(expected: str, got: str) -> bool:
    """Return whether output is what a page shows."""
    got = "".join(f"{line.rstrip()}\n" for line in got.splitlines())
    return not expected or doctest.OutputChecker().check_output(expected, got, doctest.ELLIPSIS)
