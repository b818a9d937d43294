"""`PartProgram`: the program of a part, run by `rank_runner` in the work folder. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from isthmus.agent.courier.folder_client import EXIT
from isthmus.agent.courier.work_folder import Work, part_environment, replace_file
from isthmus.core.process.node_container import CONTAINER_FILE, DELETE, start_words
from isthmus.core.process.rank_runner import AFTER_FILE

ENDLESS = "1 1e15\n"
"""Renewals of a part that ends with no hold."""
KILLED_STATUS = 137

_END_S = 45.0


class PartProgram:
    """The program that `start.json` of the work folder names; it outlives this process, not its leases."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._runner: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the program, once: `pid` says that it was started in this work folder."""
        work = self._work
        plan_path = work.folder / "start.json"
        if self._runner is not None or (work.folder / "pid").exists():
            return
        if (work.hold / "released").exists() and not (work.folder / EXIT).exists():
            replace_file(work.folder / EXIT, f"{KILLED_STATUS}\n".encode(), 0o644)
        if (work.folder / EXIT).exists() or not plan_path.exists():
            return
        plan = json.loads(plan_path.read_bytes())
        program = [str(one) for one in plan["program"]]
        if "limits.json" in work.installed:
            program = [
                sys.executable, "-I", "-S", "-B", work.script("confined_start"), str(work.folder / "limits.json"),
                *program,
            ]  # fmt: skip
            (work.folder / "tmp").mkdir(mode=0o700, exist_ok=True)
        if "{node_container}" in program:
            self._write_after()
        program = [self._own_word(one) for one in program]
        hold = work.hold
        if not plan.get("ends_with_hold", True):  # the program watches the hold itself
            hold = work.hold.parent / "courier"
            replace_file(hold / "lease", ENDLESS.encode(), 0o600)
        environment = dict(part_environment(os.environ)) | {str(k): str(v) for k, v in plan["environment"].items()}
        environment["ISTHMUS_HOLD"] = str(work.hold)
        runner = (
            sys.executable, "-I", "-S", "-B", work.script("rank_runner"), str(work.folder), str(hold),
            str(plan.get("positions", "")), "start",
        )  # fmt: skip
        self._runner = subprocess.Popen(  # noqa: S603 - the agent's program, by the runner that it shipped
            [*runner, *program], env=environment, stdin=subprocess.DEVNULL, cwd="/", start_new_session=True
        )

    def _own_word(self, word: str) -> str:
        """Return a word of the program with this machine's Python and scripts."""
        if word == "{python}":
            return sys.executable
        return self._work.script(word[1:-1]) if word in ("{node_container}", "{container_start}") else word

    def _write_after(self) -> None:
        """Name the command that removes the container once every process of the program has ended.

        It is written before the program can change `container.json`.
        """
        asked = json.loads((self._work.folder / CONTAINER_FILE).read_bytes())
        scripts = (self._work.script("node_container"), DELETE, self._work.script("container_start"))
        command = [sys.executable, "-I", "-S", "-B", *scripts, *start_words(asked)]
        replace_file(self._work.folder / AFTER_FILE, json.dumps(command).encode(), 0o600)

    def has_ended(self) -> bool:
        """Return whether the program has ended, with every process of it; a dead runner counts as killed."""
        folder = self._work.folder
        if (folder / EXIT).exists():
            return True
        if self._runner is not None:
            gone = self._runner.poll() is not None
        elif (folder / "pid").exists():
            gone = not _is_runner(folder)
        else:
            return False
        if gone and not (folder / EXIT).exists():
            replace_file(folder / EXIT, f"{KILLED_STATUS}\n".encode(), 0o644)
        return gone

    def is_running(self) -> bool:
        """Return whether the program was started here and has not ended."""
        return (self._work.folder / "pid").exists() and not self.has_ended()

    def signal(self, number: int) -> None:
        """Pass a signal of the scheduler on to the program's runner."""
        if self._runner is None:
            (self._work.hold / "released").touch()
            return
        with contextlib.suppress(ProcessLookupError):
            self._runner.send_signal(number)

    def wait_ended(self) -> None:
        """Wait for the end of a program whose hold was marked as released."""
        if self._runner is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._runner.wait(timeout=_END_S)


def _is_runner(folder: Path) -> bool:
    """Return whether the runner that took the folder still runs here, by its command line (pids are used again)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = int((folder / "pid").read_text(encoding="ascii").split()[2])
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False
