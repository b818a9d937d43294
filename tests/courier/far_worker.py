"""`FarWorker`: a run folder at an agent's courier, and the real process of the worker's end that serves it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from isthmus.agent.courier.courier import Courier
from isthmus.agent.courier.courier_archive import courier_archive
from isthmus.agent.courier.start_file import write_start
from isthmus.core.messages.worker_folder import WorkerFolder, write_atomically


def until(what: str, happened: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until something has happened."""
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


class FarWorker:
    """One worker below `root`, which runs `program`; `close` ends every process of it."""

    def __init__(self, root: Path, program: Sequence[str], *, lease_s: float = 60.0) -> None:
        self.root, self.folder, self.hold, self.work = root, root / "state/run", root / "state/hold", root / "work"
        self.folder.mkdir(parents=True)
        self.renewals = 0
        self.lease_s = lease_s
        self.renew()
        self.courier = Courier(root / "state")
        write_start(self.folder, program, {"ISTHMUS_CARDS": "g/n/0"})
        self._archive = root / "courier.pyz"
        self._archive.write_bytes(courier_archive())
        self.processes: list[subprocess.Popen[bytes]] = []

    def renew(self) -> None:
        """Renew the hold's lease, as an adapter does."""
        self.renewals += 1
        write_atomically(self.hold / "lease", f"{self.renewals} {self.lease_s}\n")

    def ticket(self, port: int | None = None) -> Path:
        """Write the ticket file; with `port` the worker dials that instead of the agent's."""
        found = json.loads(self.courier.ticket(self.folder, self.hold))
        file = self.root / "ticket"
        file.write_text(json.dumps(found | ({"port": port} if port else {})))
        return file

    def start(self, ticket: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start the worker's end from the archive, in its work folder, by a Python without Isthmus."""
        command = (sys.executable, "-S", str(self._archive), "--ticket", str(ticket), "--work", str(self.work))
        variables = {"PATH": os.environ["PATH"], **(environment or {})}
        self.processes.append(
            subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        )
        return self.processes[-1]

    def restart_agent(self) -> None:
        """End the agent's courier, and let another process of the agent serve the same state."""
        self.courier.close()
        self.courier = Courier(self.root / "state")

    @property
    def status(self) -> int | None:
        """The exit status on the agent's disk."""
        return WorkerFolder(self.folder).read_exit()

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the worker's end and return its process's status."""
        return self.processes[-1].wait(timeout=timeout_s)

    def close(self) -> None:
        """End every process."""
        (self.hold / "released").touch()
        (self.work / "hold").mkdir(parents=True, exist_ok=True)
        (self.work / "hold" / "released").touch()
        for process in self.processes:
            if process.poll() is None:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
            assert process.stderr is not None
            process.stderr.close()
        self.courier.close()
