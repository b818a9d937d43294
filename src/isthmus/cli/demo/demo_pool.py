"""`DemoPool`: starts and stops the demo's processes (links, server, one agent per site)."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from isthmus.cli.demo.demo_sites import DemoSites
from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import read_token
from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.pool import Pool
from isthmus.core.views.api_views import TokenRequest

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
_PR_SET_PDEATHSIG = 1

DEMO_USER = "demo"
"""The only user of the pool."""


class DemoPool:
    """A local pool: a context manager that starts all its processes and stops them on exit.

    `folder` contains `pool.yaml` and optionally a `policy.yaml` for all owners; it receives the state, logs
    and tokens of each process. `storage` has a folder for each cluster, its own storage; None: all share one. With
    `sites` the agents run there, and their links are emulated already.
    """

    def __init__(self, folder: Path, pool: Pool, storage: Path | None = None, sites: DemoSites | None = None) -> None:
        self.folder, self.pool, self._storage, self._sites = folder, pool, storage, sites
        self.port = _free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._arguments: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._client: ApiClient | None = None

    @property
    def server(self) -> str:
        """URL of the server."""
        if self._sites is not None:
            return f"https://{self._sites.server_host}:{self.port}"
        return f"http://127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path | None:
        """File of the CA that signed the server's certificate; None without TLS."""
        return self.folder / "server" / "tls" / "ca.pem" if self._sites is not None else None

    @property
    def client(self) -> ApiClient:
        """The client of the demo's user."""
        if self._client is None:
            raise UnavailableError("the demo's pool is not running")
        return self._client

    def __enter__(self) -> DemoPool:
        try:
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_all(self) -> None:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        pool = str(self.folder / "pool.yaml")
        if self._sites is None:
            self._start_links()
        self._start(
            "server",
            "serve",
            "--state",
            str(self.folder / "server"),
            "--pool",
            pool,
            "--port",
            str(self.port),
            "--high-priority-user",
            DEMO_USER,
            *(("--host", self._sites.server_host, "--self-signed") if self._sites is not None else ()),
        )
        admin_token = self.folder / "server" / "admin.token"
        self._wait("server", lambda: admin_token.exists() and self._is_healthy())
        with ApiClient(self.server, read_token(admin_token), self.ca) as admin:
            for owner in dict.fromkeys(cluster.owner for cluster in self.pool.clusters):
                created = admin.create_token(TokenRequest(role="owner", name=owner))
                write_secret(self.folder / f"{owner}.token", created.token)
            user = admin.create_token(TokenRequest(role="user", name=DEMO_USER))
        write_secret(self.folder / "user.token", user.token)
        if self._sites is None:
            self._wait_links()
        self._start_agents(self.folder / "pool.yaml")
        self._client = ApiClient(self.server, user.token, self.ca)
        self._wait(None, self._all_connected)

    def _start_agents(self, pool_file: Path) -> None:
        policy = self.folder / "policy.yaml"
        for cluster in self.pool.clusters:
            options: tuple[str, ...] = ("--routes", str(self.folder / "routes.json"))
            prefix: tuple[str, ...] = ()
            if self._sites is not None:
                prefix = self._sites.prefixes[cluster.name]
                options = ("--host", self._sites.hosts[cluster.name])
            self._start(
                f"agent-{cluster.name}",
                *("agent", "--server", self.server, "--pool", str(pool_file), "--cluster", cluster.name),
                *("--state", str(self.folder / cluster.name), *options),
                *("--token-file", str(self.folder / f"{cluster.owner}.token")),
                *(("--policy", str(policy)) if policy.exists() else ()),
                *(("--storage", str(self._storage / cluster.name)) if self._storage else ()),
                *(("--ca", str(self.ca)) if self.ca is not None else ()),
                prefix=prefix,
            )

    def restart_agents(self, pool_file: Path) -> None:
        """Restart the agents between runs with another pool file; workers then connect without emulated links."""
        self._stop([name for name in self._processes if name.startswith("agent")])
        if self._sites is None:
            self.use_wide_area_links(False)
        self._start_agents(pool_file)
        self._wait(None, self._all_connected)

    def restart_links(self, *, runs_first: bool) -> None:
        """Restart the link emulation between runs; `runs_first` prioritises runs over other traffic."""
        links = self._processes.pop("links")
        links.terminate()
        _wait_or_kill(links)
        self._start_links(*(("--runs-first",) if runs_first else ()))
        self._wait_links()

    def _start_links(self, *options: str) -> None:
        state = str(self.folder / "links")
        self._start("links", "links", str(self.folder / "pool.yaml"), "--state", state, *options)

    def _wait_links(self) -> None:
        self._wait("links", (self.folder / "links" / "routes.json").exists)
        self.use_wide_area_links(True)

    def kill_and_restart(self, name: str) -> None:
        """Kill a process of the pool without warning, and start it again as before."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(STOP_TIMEOUT_S)
        prefix, arguments = self._arguments[name]
        self._start(name, *arguments, prefix=prefix)
        self._wait(name, self._is_healthy)

    def use_wide_area_links(self, emulated: bool) -> None:
        """Route runs that start from now on through the emulated links, or directly."""
        routes = json.loads((self.folder / "links" / "routes.json").read_text(encoding="utf-8"))
        write_atomically(self.folder / "routes.json", json.dumps(routes if emulated else {}))

    def check_processes(self) -> None:
        """Raise `UnavailableError` with the end of its log if a process of the pool has exited."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                log = (self.folder / "logs" / f"{name}.log").read_text(errors="replace").strip()
                raise UnavailableError(
                    f"the demo's {name} exited with status {process.returncode}: {log[-400:]}",
                    hint=f"log: {self.folder / 'logs' / (name + '.log')}",
                )

    def stop(self) -> None:
        """Stop all processes, agents first because they stop the workers. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        with _ignore_interrupts():
            names = sorted(self._processes, key=lambda name: not name.startswith("agent"))
            self._stop([name for name in names if name.startswith("agent")])
            self._stop([name for name in names if not name.startswith("agent")])

    def _stop(self, names: list[str]) -> None:
        for name in names:
            self._processes[name].terminate()
        for name in names:
            _wait_or_kill(self._processes.pop(name))

    def _start(self, name: str, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        self._arguments[name] = (prefix, arguments)
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603 - this Python with modules of this package
                [*prefix, sys.executable, "-m", "isthmus", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only the demo, which stops them in order
                preexec_fn=_terminate_with_parent,
                env={key: value for key, value in os.environ.items() if not key.startswith("ISTHMUS_")},
            )

    def _is_healthy(self) -> bool:
        if self.ca is not None and not self.ca.exists():
            return False
        try:
            with ApiClient(self.server, ca=self.ca, sleep=lambda _: None) as probe:
                probe.health()
        except UnavailableError:
            return False
        return True

    def _all_connected(self) -> bool:
        view = self.client.pool()
        known = {cluster.cluster.name for cluster in view.clusters if cluster.connected}
        return known >= {cluster.name for cluster in self.pool.clusters}

    def _wait(self, name: str | None, ready: object) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self.check_processes()
            if callable(ready) and ready():
                return
            if time.monotonic() > deadline:
                what = name or "agents"
                raise UnavailableError(
                    f"the demo's {what} did not start within {START_TIMEOUT_S:.0f} s",
                    hint=f"logs: {self.folder / 'logs'}",
                )
            time.sleep(0.05)


def write_secret(file: Path, text: str) -> None:
    """Write a secret to a file with mode 0600."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(text + "\n", encoding="utf-8")


def _terminate_with_parent() -> None:
    """Make Linux send SIGTERM to this process when the demo process ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore further Ctrl-C while processes are stopped."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: signals do not arrive here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


MODULE_LIMIT_S = 3600.0
"""Longest run of a module of the demo."""


def run_module(arguments: list[str], log: Path) -> str:
    """Run a Python module and return its output; raise `IsthmusError` with the end of its errors."""
    with log.open("wb") as errors:
        done = subprocess.run(  # noqa: S603 - this Python with modules of this package
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            check=False,
            timeout=MODULE_LIMIT_S,
        )
    if done.returncode:
        tail = log.read_text(errors="replace").strip()[-600:]
        raise IsthmusError(f"{arguments[0]} failed with status {done.returncode}: {tail}", hint=f"log: {log}")
    return done.stdout.decode()
