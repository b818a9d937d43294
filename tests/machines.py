"""Machines made of network namespaces, joined by a bridge (root): each has an address, and may close ports."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.wan.netns import delete_namespaces, stale_namespaces

ROOT = Path(__file__).parents[1]
_numbers = itertools.count(1000)  # apart from those of `isthmus.wan.netns`


@dataclass
class Machine:
    """One machine: commands run in its namespace, in `folder`, with a home and exported variables of its own."""

    namespace: str
    address: str
    folder: Path
    home: Path
    exported: list[str] = field(default_factory=list)
    background: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, command: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
        """Run a shell command and return its exit status and output; an `export` holds for later commands."""
        if command.startswith("export "):
            self.exported.append(command)
        return subprocess.run(
            self._argv(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
            cwd=self.folder, env=self._environment(),
        )  # fmt: skip

    def start(self, command: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a shell command whose output goes to `log`; it is killed with the machine."""
        with log.open("wb") as stream:
            process = subprocess.Popen(
                self._argv(f"exec {command}"), stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=self.folder, env=self._environment(),
            )  # fmt: skip
        self.background.append(process)
        return process

    def close_ports(self, first: int, last: int) -> None:
        """Drop packets from other machines to these TCP ports, as a firewall does: the caller gets no answer."""
        ports = ("iif", "eth0", "ipproto", "tcp", "dport", f"{first}-{last}")
        self._rule("add", "pref", "1", *ports, "blackhole")
        self._rule("add", "pref", "2", "lookup", "local")  # the first rule of a namespace delivers all local packets
        self._rule("del", "pref", "0")

    def open_ports(self) -> None:
        """Undo `close_ports`."""
        self._rule("add", "pref", "0", "lookup", "local")
        self._rule("del", "pref", "1")
        self._rule("del", "pref", "2")

    def _rule(self, *words: str) -> None:
        _ip("-n", self.namespace, "rule", *words)

    def _argv(self, command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, "bash", "-c", "; ".join([*self.exported, command])]

    def _environment(self) -> Mapping[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS_")}
        return plain | {
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT / "src"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }


@contextmanager
def machines(names: Sequence[str], folder: Path) -> Iterator[dict[str, Machine]]:
    """Make a machine for each of `names`, at 10.0.0.1 and so on; `folder` is shared, homes are beside it."""
    delete_namespaces(stale_namespaces())
    number = next(_numbers)
    spaces = [f"isthmus-{os.getpid()}-{number}-{i}" for i in range(len(names) + 1)]
    found: dict[str, Machine] = {}
    try:
        for space in spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", spaces[-1], "link", "add", "bridge", "type", "bridge")
        _ip("-n", spaces[-1], "link", "set", "bridge", "up")
        for i, (name, space) in enumerate(zip(names, spaces, strict=False)):
            pair = ("type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", spaces[-1], "link", "add", f"port{i}", *pair)
            _ip("-n", spaces[-1], "link", "set", f"port{i}", "master", "bridge", "up")
            _ip("-n", space, "address", "add", f"10.0.0.{i + 1}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            home = folder.with_name(f"home-{name}")
            home.mkdir()
            found[name] = Machine(space, f"10.0.0.{i + 1}", folder, home)
        yield found
    finally:
        for process in [process for machine in found.values() for process in machine.background]:
            process.terminate()
        _wait_for_all([process for machine in found.values() for process in machine.background])
        delete_namespaces(spaces)


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], object], what: str, limit_s: float = 60) -> None:
    """Return once `condition` holds; raise `AssertionError` with `what` after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.1)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
