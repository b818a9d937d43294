"""`CrossingProcesses`: the proxy and the gateways of a site, started, watched and started again."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from isthmus.core.errors import UnavailableError
from isthmus.core.pool import Pool
from isthmus.wan.crossing.part_spec import STARTED_FILE, GatewaySpec, ProxySpec
from isthmus.wan.crossing.plan_site import SitePlan, plan_site
from isthmus.wan.edge.apply_edge_settings import apply_edge_settings, remove_edge_settings
from isthmus.wan.emulator import ROUTES_FILE, write_json_atomically

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
RESTART_S = (0.1, 0.5, 2.0, 5.0)
"""Waits before a part is started again; the last one repeats, and after a minute of service the first one is next."""

_PORTS_FILE, _WATCH_S, _SERVED_S = "ports.json", 0.05, 60.0
_TAIL_BYTES = 1 << 14
"""What is read of the end of a part's log, which grows as long as the part runs."""
_log = logging.getLogger("isthmus.wan")


class _Part:
    def __init__(self, name: str, spec: ProxySpec | GatewaySpec, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts, self.num_failures = 0, 0
        self.started_s = self.due_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomically(folder / "spec.json", spec.model_dump(mode="json"))

    def start(self) -> None:
        (self.folder / STARTED_FILE).unlink(missing_ok=True)
        arguments = [str(self.folder / "spec.json"), str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 - this Python with a module of this package
                [sys.executable, "-m", "isthmus.wan.crossing.run_crossing_part", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.num_starts += 1
        self.started_s = time.monotonic()

    def last_line(self) -> str:
        with (self.folder / "log").open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            text = log.read(_TAIL_BYTES).decode(errors="replace").strip()
        line = text.splitlines()[-1] if text else "it wrote no log"
        try:
            found = json.loads(line)
        except ValueError:
            return line[-400:]
        return f"{found['error']} ({found['hint']})" if isinstance(found, dict) and "error" in found else line[-400:]


class CrossingProcesses:
    """The processes of `plan`, in a folder of their own each; a context manager from start to end."""

    def __init__(self, plan: SitePlan, state: Path) -> None:
        """Raise `FileError` for a key that cannot be read, `InputError` for what contradicts itself."""
        self.plan, self.state = plan, state
        specs: list[tuple[str, ProxySpec | GatewaySpec]] = [(f"gateway-{one.name}", one) for one in plan.gateways]
        if plan.proxy is not None:
            specs.append(("proxy", plan.proxy))
        for _, spec in specs:
            spec.config()
        self.parts = [_Part(name, spec, state / name) for name, spec in specs]
        self._stop, self._thread = (
            threading.Event(),
            threading.Thread(target=self._watch, name="crossings", daemon=True),
        )

    def __enter__(self) -> CrossingProcesses:
        """Start all; raise `UnavailableError` with the reason if one does not serve in time."""
        try:
            if self.plan.edge is not None and self.plan.edge_device is not None:
                apply_edge_settings(self.plan.edge_device, None, self.plan.edge)
            for part in self.parts:
                part.start()
            for part in self.parts:
                self._await(part)
        except BaseException:
            self._end()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all."""
        self._stop.set()
        self._thread.join()
        self._end()

    def _await(self, part: _Part) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (part.folder / STARTED_FILE).exists():
            if part.process is None or part.process.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"the {part.name} of this site does not start: {part.last_line()}",
                    hint=f"its log: {part.folder / 'log'}; correct `access` and `crossing` in the pool file",
                )
            time.sleep(0.02)

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_S):
            for part in self.parts:
                self._look_after(part, time.monotonic())

    def _look_after(self, part: _Part, now_s: float) -> None:
        if part.process is not None:
            if part.process.poll() is None:
                return
            if now_s - part.started_s > _SERVED_S:
                part.num_failures = 0
            wait_s = RESTART_S[min(part.num_failures, len(RESTART_S) - 1)]
            status, part.process = part.process.returncode, None
            part.num_failures, part.due_s = part.num_failures + 1, now_s + wait_s
            _log.warning("the %s ended with status %d and starts again: %s", part.name, status, part.last_line())
        if now_s >= part.due_s:
            try:
                part.start()
            except OSError as error:
                part.due_s = now_s + RESTART_S[-1]
                _log.warning("the %s cannot be started: %s", part.name, error.strerror)

    def _end(self) -> None:
        running = [part.process for part in self.parts if part.process is not None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.plan.edge is not None and self.plan.edge_device is not None:
            remove_edge_settings(self.plan.edge_device)


def site_crossings(
    pool: Pool, cluster: str, folder: Path, state: Path, routes: dict[str, str], via: Path | None
) -> CrossingProcesses | None:
    """Return the processes of `cluster`, None if no link of it states a crossing.

    Writes `routes.json` in `state`: `routes`, and those of the proxy in their place. `via` is the file that they are
    from, through which the proxy dials. Ports on loopback stay the same across restarts. Raises as `plan_site` and
    `CrossingProcesses` do, and `UnavailableError` if `state` cannot be written.
    """
    if not any(link.source == cluster and link.crossing is not None for link in pool.links):
        return None
    ports: dict[str, int] = {}
    try:
        state.mkdir(parents=True, exist_ok=True)
        ports = _read_ports(state / _PORTS_FILE)
        plan = plan_site(pool, cluster, folder, lambda name: _port_of(ports, name), via)
        write_json_atomically(state / _PORTS_FILE, ports)
        write_json_atomically(state / ROUTES_FILE, {cluster: {**routes, **plan.routes()}})
        return CrossingProcesses(plan, state)
    except OSError as error:
        raise UnavailableError(
            f"cannot write the files of proxies and gateways in {state}: {error.strerror}",
            hint="free space, or choose another state folder",
        ) from error


def _read_ports(file: Path) -> dict[str, int]:
    """Return the ports of the last start; those that are damaged are chosen again."""
    try:
        with file.open("rb") as ports:
            found = json.loads(ports.read(1 << 20))
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: port for name, port in found.items() if isinstance(port, int) and 1024 <= port < 65536}


def _port_of(ports: dict[str, int], name: str) -> int:
    if name not in ports:
        kind = socket.SOCK_STREAM if name.startswith("route") else socket.SOCK_DGRAM
        with closing(socket.socket(socket.AF_INET, kind)) as probe:
            probe.bind(("127.0.0.1", 0))
            ports[name] = int(probe.getsockname()[1])
    return ports[name]


def process_ids(crossings: CrossingProcesses) -> dict[str, int]:
    """Return the process of each part that runs, by its name."""
    return {part.name: one.pid for part in crossings.parts if (one := part.process) is not None and one.poll() is None}
