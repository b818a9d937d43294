"""A real pool for tests: server and agents as processes to be killed, the real store, stand-in workers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx

from isthmus.agent import AgentConfig, run_agent
from isthmus.agent.adapters.check_adapter import is_running
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.service.auth import Role
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.events import Event, NoticeDue
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.core.pool import Cluster, Pool
from isthmus.core.views.access_views import AuditRecord
from isthmus.core.views.api_views import JobView, MetricsPage, PoolView, TokenRequest
from tests.control.serving import POOL, plan_across, submission
from tests.forks import FORKS, preload

UNVERIFIED = False
"""`verify` of a request without TLS: the certificates of all authorities, read for each, cost more than its answer."""
STAND_IN = (sys.executable, str(Path(__file__).parents[1] / "agent" / "stand_in.py"))
RULES = CoordinatorConfig(retry_s=0.2, agent_timeout_s=20)
preload("pytest", "isthmus.control.server.run_server", "isthmus.agent", "tests.control.replicas")


class CrashingStore(SqliteStore):
    """The real store, in a process that kills itself around its n-th append of events.

    `where`: before it, between write and flush (the rows are written, COMMIT is not), or after it, before
    any request is answered.
    """

    def __init__(self, path: Path, where: str, at: int) -> None:
        super().__init__(path)
        self._where, self._left = where, at

    def append(
        self,
        events: Sequence[Event],
        expected_last: int | None = None,
        audit: Sequence[AuditRecord] = (),
        notices: Sequence[NoticeDue] = (),
    ) -> int:
        self._left -= 1
        if self._left == 0 and self._where == "before":
            die()
        if self._left == 0 and self._where == "between":
            self.writer.set_trace_callback(lambda sql: die() if sql == "COMMIT" else None)
        number = super().append(events, expected_last, audit, notices)
        if self._left == 0 and self._where == "after":
            die()
        return number


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve(state: Path, port: int, crash: tuple[str, int], pool: Pool = POOL) -> None:
    """Be a server that notes its URL in `<state>/url`."""

    def announce(listening: ServerInfo) -> None:
        (state / "url.tmp").write_text(listening.url)
        (state / "url.tmp").replace(state / "url")

    run_server(
        ServerConfig(state=state, port=port, pool=pool, rules=RULES),
        announce,
        make_store=lambda config: CrashingStore(config.state / "isthmus.db", *crash),
        planner=plan_across,
    )


def act(url: str, token: str, cluster: Cluster, state: Path) -> None:
    """Be an agent."""
    run_agent(AgentConfig(server=url, token=token, cluster=cluster, state=state, worker_command=STAND_IN))


def until(happened: Callable[[], object], what: str, timeout_s: float = 40) -> float:
    """Wait until something happened; return the seconds that took."""
    begun = time.monotonic()
    while not happened():
        assert time.monotonic() - begun < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - begun


class RealPool:
    """One server with `pool` and the agents of POOL, each a process; anything may be killed and started again."""

    def __init__(self, folder: Path, pool: Pool = POOL) -> None:
        self.folder, self.port, self.url, self.pool = folder, 0, "", pool
        self.processes: dict[str, ForkServerProcess] = {}
        self.start_server()
        self.user = self.create_token("user", "ann")
        self._owners = {site.name: self.create_token("owner", site.owner) for site in POOL.clusters}
        for site in POOL.clusters:
            self.start(site.name)

    def start_server(self, crash: tuple[str, int] = ("", 0)) -> None:
        url = self.folder / "server" / "url"
        url.unlink(missing_ok=True)
        self._launch("server", serve, self.folder / "server", self.port, crash, self.pool)
        until(lambda: url.exists() or not self.alive("server"), "the server listens")
        if url.exists():
            self.url = url.read_text()
            self.port = httpx.URL(self.url).port or 0

    def start(self, name: str, crash: tuple[str, int] = ("", 0)) -> None:
        """Start the server or the agent of a cluster, with what its last life left."""
        if name == "server":
            self.start_server(crash)
            return
        self._launch(name, act, self.url, self._owners[name], POOL.cluster(name), self.folder / name)

    def alive(self, name: str) -> bool:
        return self.processes[name].is_alive()

    def kill(self, name: str) -> None:
        """kill -9."""
        self.processes[name].kill()
        self.processes[name].join()

    def end(self, name: str) -> int | None:
        """SIGTERM; return the exit status."""
        self.processes[name].terminate()
        self.processes[name].join(20)
        return self.processes[name].exitcode

    def close(self) -> None:
        """End what still runs, and every worker there ever was."""
        for name in self.processes:
            self.kill(name)
            self.processes[name].close()
        for *_, pid in self.starts():
            if is_running(int(pid)):
                os.killpg(os.getpgid(int(pid)), signal.SIGKILL)

    def call(self, method: str, path: str, body: object = None) -> httpx.Response | None:
        """Ask the server as the user; None where no answer came."""
        headers = {"Authorization": f"Bearer {self.user}"}
        try:
            return httpx.request(method, self.url + path, json=body, headers=headers, timeout=5, verify=UNVERIFIED)
        except httpx.HTTPError:
            return None

    def submit(self, key: str, **fields: object) -> str | None:
        """Submit a job under `key`; return its id once it is acknowledged, None where no answer came."""
        wanted = submission(key, output=str(self.folder / "out" / "{job}"), **fields)
        answer = self.call("POST", "/v1/jobs", wanted.model_dump(mode="json"))
        if answer is None:
            return None
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> JobView | None:
        answer = self.call("GET", f"/v1/jobs/{job_id}")
        if answer is None:
            return None
        assert answer.status_code == 200, f"acknowledged, then lost: {answer.text}"
        return JobView.model_validate(answer.json())

    def state(self, job_id: str) -> str:
        found = self.job(job_id)
        return found.state if found else ""

    def free(self) -> dict[str, int]:
        answer = self.call("GET", "/v1/pool")
        views = PoolView.model_validate(answer.json()).clusters if answer else ()
        return {view.cluster.name: view.free_chips["h20"] for view in views if view.connected}

    def metrics(self, job_id: str) -> list[tuple[int, int, int]]:
        answer = self.call("GET", f"/v1/jobs/{job_id}/metrics")
        assert answer is not None
        page = MetricsPage.model_validate(answer.json())
        return sorted((one.attempt, one.rank, one.step) for one in page.metrics)

    def starts(self) -> list[tuple[str, str, str, str]]:
        """Every start of a worker: job, attempt, rank, process id."""
        files = sorted((self.folder / "out").glob("*/starts"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [tuple(line.split()) for line in lines]  # type: ignore[misc]

    def workers(self, attempt: int) -> list[int]:
        """Process ids of the workers of an attempt."""
        return [int(pid) for _, of, _, pid in self.starts() if of == str(attempt)]

    def _launch(self, name: str, target: Callable[..., None], *args: object) -> None:
        self.processes[name] = FORKS.Process(target=target, args=args)
        self.processes[name].start()

    def admin_token(self) -> str:
        return (self.folder / "server" / "admin.token").read_text().strip()

    def create_token(self, role: Role, name: str) -> str:
        """Return a new token, made with the admin's."""
        token = self.admin_token()
        answer = httpx.post(
            f"{self.url}/v1/tokens",
            json=TokenRequest(role=role, name=name).model_dump(),
            headers={"Authorization": f"Bearer {token}"},
            verify=UNVERIFIED,
        )
        assert answer.status_code == 201, answer.text
        return str(answer.json()["token"])
