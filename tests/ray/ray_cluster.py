"""`RayCluster`: a real Ray cluster on loopback, a head and a second node with cards of their own, as a test fixture."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.courier.relay import CuttingRelay
from tests.free_ports import free_ports

INSTALL = 'pip install -c constraints.txt "ray[default]"'
_NUM_PORTS = 90
_NEVER_BYTES = 1 << 60
"""Bytes after which no connection to the dashboard breaks by itself."""
START_S = 600.0
"""Ray's dashboard is a dozen processes, each of which imports Ray: half a minute on two idle cores, minutes on busy."""

START_LIMITS = {
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{START_S:.0f}",
    "RAY_agent_register_timeout_ms": f"{1e3 * START_S:.0f}",
    "RAY_worker_register_timeout_seconds": f"{START_S:.0f}",
}
"""Ray ends a node of which a process is later than 30 or 60 s, as on a busy machine."""


class RayCluster:
    """Two nodes, `one` and `two`, with `cards` GPUs each, below `root`; `start` before use, `end` after."""

    def __init__(self, root: Path, cards: int = 2) -> None:
        self._root, self.num_cards, self.num_sessions = root, cards, 0
        self._starters: dict[tuple[Any, ...], psutil.Popen] = {}
        self._ports = free_ports(_NUM_PORTS)
        self._relay = CuttingRelay(self._ports[1], 0, _NEVER_BYTES)
        self.address = f"http://127.0.0.1:{self._relay.port}"

    @property
    def temporary(self) -> Path:
        """Where programs on the nodes make their temporary folders."""
        return self._root / "tmp"

    def start(self) -> None:
        """Start both nodes; wait until the dashboard lists both with their cards."""
        self.num_sessions += 1
        ports = self._ports
        place = f"{self._root}/{self.num_sessions}"
        head = (
            "--head", f"--port={ports[0]}", "--dashboard-host=127.0.0.1", f"--dashboard-port={ports[1]}",
            f"--ray-client-server-port={ports[2]}", f"--temp-dir={place}", "--include-dashboard=true",
        )  # fmt: skip
        self._start("one", ports[3:45], *head)
        self._wait_port(ports[0])
        self._start("two", ports[45:], f"--address=127.0.0.1:{ports[0]}")
        self.wait_answer()

    def wait_answer(self, num_nodes: int = 2, timeout_s: float | None = None) -> None:
        """Wait until the dashboard lists the nodes, and its jobs answer."""
        deadline_s = time.monotonic() + (timeout_s or START_S)
        while True:
            with contextlib.suppress(httpx.HTTPError, KeyError, TypeError, ValueError):
                listed = self._get("/api/v0/nodes?detail=1")["data"]["result"]["result"]
                usage = self._get("/api/cluster_status")["data"]["clusterStatus"]["loadMetricsReport"]["usageByNode"]
                with_cards = [one for one in listed if one["state"] == "ALIVE" and "GPU" in one["resources_total"]]
                jobs = self._get("/api/jobs/")
                if len(with_cards) >= num_nodes and len(usage) >= num_nodes and isinstance(jobs, list):
                    return
            assert time.monotonic() < deadline_s, f"Ray does not answer: {self._root}"
            self._revive()
            time.sleep(0.1)

    def _wait_port(self, port: int) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
            assert time.monotonic() < deadline_s, f"Ray's head does not start: {self._root}"
            self._revive()
            time.sleep(0.1)

    def jobs(self) -> list[dict[str, object]]:
        """Return the jobs that Ray lists."""
        return self._get("/api/jobs/")

    def used_cards(self) -> float:
        """Return how many cards Ray counts as used."""
        usage = self._get("/api/cluster_status")["data"]["clusterStatus"]["loadMetricsReport"]["usageByNode"]
        return sum(amounts.get("GPU", [0.0])[0] for amounts in usage.values())

    def wait_unused(self, is_held: Callable[[], bool], timeout_s: float) -> None:
        """Wait until nothing is held and Ray counts no card as used."""
        deadline_s = time.monotonic() + timeout_s
        while is_held() or self.used_cards():
            assert time.monotonic() < deadline_s, f"{self.used_cards()} cards are lost"
            time.sleep(0.5)

    def cut_dashboard(self) -> None:
        """Let the dashboard be out of reach: connections break, and new ones are refused."""
        self._relay.close()

    def mend_dashboard(self) -> None:
        """Let the dashboard be reached again."""
        self._relay = CuttingRelay(self._ports[1], 0, _NEVER_BYTES, at=self._relay.port)

    def kill(self) -> None:
        """End every process of both nodes at once, as a loss of power does."""
        found = self._processes()
        for one in found:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs([*found, *self._starters.values()], timeout=10)
        self._starters = {}

    def end(self) -> None:
        """End every process."""
        self.kill()
        self._relay.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def _start(self, name: str, ports: list[int], *options: str) -> None:
        command = (
            sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", f"--node-name={name}",
            "--node-ip-address=127.0.0.1", "--num-cpus=4", f"--num-gpus={self.num_cards}",
            "--object-store-memory=80000000", "--block", f"--dashboard-agent-listen-port={ports[0]}",
            f"--min-worker-port={ports[1]}", f"--max-worker-port={ports[-1]}", *options,
        )  # fmt: skip
        self.temporary.mkdir(exist_ok=True)
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": str(self.temporary)}
        environment |= START_LIMITS
        environment.pop("ISTHMUS_TOKEN", None)
        with (Path(self._root) / f"{name}.log").open("ab") as out:
            started = psutil.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._root
            )  # fmt: skip
        self._starters[name, tuple(map(str, ports)), *options] = started

    def _revive(self) -> None:
        """Start a node again that has ended: a limit of Ray's start, 30 s for a raylet, cannot be changed."""
        for (name, ports, *options), starter in list(self._starters.items()):
            if starter.poll() is not None:
                self._start(name, list(map(int, ports)), *options)

    def _processes(self) -> list[psutil.Process]:
        """Return Ray's processes here; not couriers, which leave their parents, nor what they run."""
        found: dict[int, psutil.Process] = {}
        for one in self._starters.values():
            with contextlib.suppress(psutil.Error):
                found |= {child.pid: child for child in (one, *one.children(recursive=True))}
        return list(found.values())

    def _get(self, path: str) -> object:
        # Without TLS; to read the certificates of all authorities for each request takes more CPU than its answer.
        answer = httpx.get(self.address + path, timeout=5.0, trust_env=False, verify=False)
        return answer.raise_for_status().json()


def missing_ray() -> str:
    """Return the command that installs what a cluster needs, empty if it is there."""
    return "" if importlib.util.find_spec("ray") is not None else INSTALL
