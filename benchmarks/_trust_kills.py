"""A server process that is killed again and again under eight clients: what it has acknowledged, and when it is up.

Python's bytecode is kept from a first start on, as it is where Isthmus is installed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks._kill_client import NAME, TEMPLATE, request
from benchmarks.control_store import submission
from benchmarks.table import Row
from benchmarks.wan_links import cpu_s
from isthmus.control.server.server_config import ServerConfig, open_store
from isthmus.control.state.events import JobSubmitted

CLIENTS = 8
MOST_ALIVE_S, MOST_STARTING_S = 1.0, 2.0
"""A server is killed at most so long after it is up; one of five is killed at most so long after its start."""
LIMIT_S = 120.0
"""A server that is not up after so long, or a client that has not ended, has failed."""
TARGET_S = 3.0
BYTECODE = "bytecode"
"""The folder of the compiled modules."""

Start = tuple[float, float]
"""Wall seconds from the start of a server to its first answer, and its CPU seconds."""


def measure(quick: bool) -> list[Row]:
    """Return what was lost and doubled over all kills, and how long the starts took."""
    num_jobs, num_kills, num_starts = (2_000, 4, 2) if quick else (90_000, 60, 7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _fill(folder / "state", num_jobs)
        (folder / TEMPLATE).write_text(submission(NAME).model_dump_json())
        with _Killed(folder / "empty", folder / BYTECODE) as server:
            server.start()
        with _Killed(folder, folder / BYTECODE) as server:
            first = server.start()
            with _clients(folder, server.port):
                busy = _kill_by_seed(server, num_kills, random.Random(13))
            idle = [server.restart() for _ in range(num_starts)]
        acknowledged = _acknowledged(folder)
        lost, doubled, total = _compare(folder / "state", acknowledged)
    what = f"{num_kills} kills under {CLIENTS} clients, {len(acknowledged):,} acknowledged submissions"
    up = f"{total:,} jobs queued: from the start after a kill to the first answer"
    return [
        Row(what=f"{what}: lost", ours=lost, unit="", target="0", met=lost == 0),
        Row(what=f"{what}: doubled", ours=doubled, unit="", target="0", met=doubled == 0),
        _start_row(f"{up}, with clients that wait", busy),
        _start_row(f"{up}, left alone", idle),
        Row(
            what=f"{num_jobs:,} jobs queued: start without a snapshot, of {first[1]:.2f} s of CPU",
            ours=first[0],
            unit="s",
        ),
    ]


def _start_row(what: str, starts: list[Start]) -> Row:
    wall_s, used_s = [start[0] for start in starts], [start[1] for start in starts]
    middle_s, most_s = statistics.median(wall_s), max(wall_s)
    spread = f"median of {len(starts)}, at most {most_s:.2f} s; of {statistics.median(used_s):.2f} s of CPU"
    return Row(what=f"{what} ({spread})", ours=middle_s, unit="s", target=f"<= {TARGET_S:g}", met=middle_s <= TARGET_S)


class _Killed:
    """A server process on a state folder, which is started again on the same port; `bytecode` holds what it loads."""

    def __init__(self, folder: Path, bytecode: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self.port = folder, 0
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._environment = kept | {"PYTHONPYCACHEPREFIX": str(bytecode)}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Killed:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def launch(self) -> subprocess.Popen[str]:
        """Start its process."""
        command = [sys.executable, "-m", "isthmus", "serve", "--state", "state", "--port", str(self.port), "--json"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
        return self._process

    def start(self) -> Start:
        """Start it and wait until it has answered a request."""
        begun_s, process = time.monotonic(), self.launch()
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: {(self._folder / 'log').read_text()[-2000:]}")
        self.port = int(re.search(r":(\d+)", json.loads(line)["server"])[1])  # type: ignore[index]
        token = (self._folder / "state" / "admin.token").read_text().strip()
        while time.monotonic() - begun_s < LIMIT_S:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if request(self.port, "GET", "/v1/jobs?limit=1", None, {"Authorization": f"Bearer {token}"})[0] == 200:
                    return time.monotonic() - begun_s, cpu_s(process.pid)
        raise RuntimeError(f"the server does not answer: {(self._folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """kill -9, of its planners too."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def restart(self) -> Start:
        """Kill it, start it again, and wait until it has answered a request."""
        self.kill()
        return self.start()


def _kill_by_seed(server: _Killed, num_kills: int, chance: random.Random) -> list[Start]:
    """Kill a server so many times, while it is up or still on its way; return the starts that were not cut short."""
    found = list[Start]()
    for _ in range(num_kills):
        time.sleep(chance.uniform(0, MOST_ALIVE_S))
        server.kill()
        if chance.random() < 0.2:
            server.launch()
            time.sleep(chance.uniform(0, MOST_STARTING_S))
            server.kill()
        found.append(server.start())
    return found


@contextlib.contextmanager
def _clients(folder: Path, port: int) -> Iterator[None]:
    """Run the clients for the time of the block: each has submitted when it begins, and has its answers at its end."""
    command = [sys.executable, "-m", "benchmarks._kill_client", str(folder), str(port)]
    clients = [subprocess.Popen([*command, str(number)]) for number in range(CLIENTS)]
    try:
        _wait(lambda: len(_acknowledged_by(folder)) == CLIENTS, "each client submits")
        yield
        (folder / "stop").touch()
        _wait(lambda: all(client.poll() == 0 for client in clients), "each client ends")
    finally:
        for client in clients:
            client.kill()
            client.wait()


def _wait(happened: Callable[[], bool], what: str) -> None:
    begun_s = time.monotonic()
    while not happened():
        if time.monotonic() - begun_s > LIMIT_S:
            raise RuntimeError(f"{what}: not within {LIMIT_S:g} s")
        time.sleep(0.05)


def _acknowledged_by(folder: Path) -> list[str]:
    texts = [file.read_text() for file in folder.glob("acknowledged-*")]
    return [text for text in texts if text]


def _acknowledged(folder: Path) -> list[tuple[str, str]]:
    """Return key and id of each acknowledged submission."""
    lines = [line for text in _acknowledged_by(folder) for line in text.splitlines()]
    return [(key, job_id) for key, _, job_id in (line.partition(" ") for line in lines)]


def _fill(state: Path, num_jobs: int) -> None:
    """Make a store with queued jobs."""
    state.mkdir()
    store = open_store(ServerConfig(state=state))
    try:
        for first in range(0, num_jobs, 1000):
            names = [f"q{first + i}" for i in range(min(1000, num_jobs - first))]
            store.append([JobSubmitted(now_s=1.0, job_id=one, user="ann", submission=submission(one)) for one in names])
    finally:
        store.close()


def _compare(state: Path, acknowledged: list[tuple[str, str]]) -> tuple[int, int, int]:
    """Return the acknowledged submissions that the log lacks, those that it has twice, and the number of its jobs."""
    store = open_store(ServerConfig(state=state))
    try:
        logged = [(one.submission.key, one.job_id) for _, one in store.events() if isinstance(one, JobSubmitted)]
    finally:
        store.close()
    keys = Counter(key for key, _ in logged)
    return len(set(acknowledged) - set(logged)), sum(count - 1 for count in keys.values()), len(logged)
