"""`WatchedPool`: a real server with scripted agents that make faults; a real Prometheus and Alertmanager watch it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx

from isthmus.agent.metrics.agent_figures import agent_figures
from isthmus.agent.metrics.metrics_listener import MetricsListener
from isthmus.agent.metrics.sync_counts import SyncCounts
from isthmus.control.placement import PlanRequest
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.service.notify.notify_settings import NotifySettings
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.core.job import CheckpointConfig
from isthmus.core.messages.agent_messages import ObservedPart, StepMetrics
from isthmus.core.plan import PlanSet, Prediction
from isthmus.core.pool import Cluster
from isthmus.site import SiteMachine, make_allocator
from scripts.dashboards import FOLDER
from tests.control.processes import UNVERIFIED, until
from tests.control.receivers import WebhookReceiver
from tests.control.serving import EAST, POOL, WEST, plan_across, report, submission
from tests.free_ports import free_ports

PROMETHEUS, ALERTMANAGER = shutil.which("prometheus"), shutil.which("prometheus-alertmanager")
RULES = CoordinatorConfig(agent_timeout_s=2.0, retry_s=1.0, max_retry_s=2.0)
PREDICTED = Prediction(
    iteration_s=0.5, tgs_tokens_per_card_s=1.0, samples_per_s=1.0, peak_memory_bytes=(1, 1), wan_gbps=(0.1,)
)


def plan_with_prediction(asked: PlanRequest) -> PlanSet:
    """Plan as `plan_across`, with the time of a step and the traffic of the link."""
    found = plan_across(asked)
    plans = tuple(plan.model_copy(update={"predicted": PREDICTED}) for plan in found.plans)
    return found.model_copy(update={"plans": plans})


class Watched(Protocol):
    """What Prometheus is told of a pool: its server, the CA of that, the token, the page of an agent."""

    url: str
    trust: Path | None
    token: str
    agent_port: int


class WatchedPool:
    """A server in a thread with two scripted agents, and further fields of its configuration.

    Agents report while they are `alive`, with a checkpoint each time, and refuse parts while they are in `refusing`.
    """

    def __init__(self, folder: Path, *, port: int = 0, alive: Iterable[str] = ("east", "west"), **config: Any) -> None:
        self.folder, self.alive, self.refusing = folder, set(alive), set[str]()
        self.step = self._num_saved = 0
        self._parts: dict[str, dict[tuple[str, int], ObservedPart]] = {"east": {}, "west": {}}
        self._checks: dict[str, list[dict[str, object]]] = {"east": [], "west": []}
        self.config = ServerConfig(
            state=folder, port=port, pool=POOL, rules=RULES, notify=NotifySettings(networks=("127.0.0.0/8",)),
            **({"self_signed": True} | config),
        )  # fmt: skip
        self.start()

    def start(self, **changes: Any) -> None:
        """Start the server, with changes of its configuration, and the agents."""
        self.config = self.config.__class__(**(self.config.__dict__ | changes))
        self.stop, self._ready = threading.Event(), threading.Event()
        self._page = MetricsListener("127.0.0.1", 0)
        self._page.show(_page_of_an_agent())
        self.agent_port = self._page.address[1]
        arguments: dict[str, Any] = {"stop": self.stop, "planner": plan_with_prediction}
        self._server = threading.Thread(target=run_server, args=(self.config, self._announce), kwargs=arguments)
        self._server.start()
        assert self._ready.wait(30)
        self.token = (self.folder / "admin.token").read_text().strip()
        self._agents = threading.Thread(target=self._report)
        self._agents.start()

    def close(self) -> None:
        self.stop.set()
        self._page.close()
        self._agents.join(20)
        self._server.join(20)

    def _announce(self, listening: ServerInfo) -> None:
        assert listening.certificate is not None
        self.url, self.trust = listening.url, listening.certificate.trust
        self._ready.set()

    def call(self, method: str, path: str, body: object = None, token: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {token or self.token}"}
        answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=20, verify=UNVERIFIED)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def submit(self, name: str, token: str | None = None, **fields: object) -> str:
        """Submit a job that saves at each step; return its id."""
        saving = CheckpointConfig(folder="checkpoints/{job}", every_steps=1)
        wanted = submission(name=name, output=f"out/{name}", checkpoints=saving, **fields)
        return str(self.call("POST", "/v1/jobs", wanted.model_dump(mode="json"), token)["id"])

    def run_job(self) -> str:
        """Submit a job and let both sites run it."""
        job = self.submit("tiny")
        self.until_state(job, "running")
        return job

    def cancel(self, *jobs: str) -> None:
        for job in jobs:
            self.call("POST", f"/v1/jobs/{job}/cancel")

    def until_state(self, job: str, state: str) -> None:
        until(lambda: self.call("GET", f"/v1/jobs/{job}")["state"] == state, f"the job is {state}")

    def _report(self) -> None:
        while not self.stop.wait(0.3):
            for site in (EAST, WEST):
                if site.name in self.alive:
                    try:
                        self._sync(site)
                    except httpx.TransportError:  # the server ends by the same event
                        if not self.stop.is_set():
                            raise

    def _sync(self, site: Cluster) -> None:
        parts = [self._with_events(part) for part in self._parts[site.name].values()]
        training = [part for part in parts if part.state == "running"] if site is EAST else []
        values = {"step_s": 1.2, "loss": 1.0}
        metrics = [
            StepMetrics(job=part.job, attempt=part.attempt, rank=0, step=min(self.step, 1), values=values)
            for part in training
        ]
        self.step += bool(training)
        told = report(
            site, *parts, metrics=metrics, free_storage_bytes=10**12, peer_checks=self._checks[site.name],
            peer_address={"host": "127.0.0.1", "port": 4999, "nonce": "0" * 32},
        )  # fmt: skip
        orders = self.call("POST", f"/v1/agents/{site.name}/sync", told.model_dump(mode="json", by_alias=True))
        self._checks[site.name] = [
            {"cluster": one["cluster"], "number": one["number"], "reached": True, "round_trip_s": 0.01, "gbps": 0.05}
            for one in orders["peers_to_check"]
        ]
        self._parts[site.name] = {
            (order["job"], order["attempt"]): self._obey(site.name, order) for order in orders["parts"]
        }

    def _with_events(self, part: ObservedPart) -> ObservedPart:
        """Return a part whose workers, if they run, have saved a checkpoint."""
        if part.state != "running":
            return part
        rank = part.workers[0].rank
        self._num_saved += 1
        event = {"rank": rank, "number": self._num_saved, "kind": "saved", "time_s": time.time(), "step": 1}
        return ObservedPart.model_validate(part.model_dump() | {"events": [event]})

    def _obey(self, site: str, order: dict[str, Any]) -> ObservedPart:
        before = self._parts[site].get((order["job"], order["attempt"]))
        state = order["desired"]
        if state in ("ready", "prepared") and (site in self.refusing or (before and before.state == "refused")):
            state = "refused"
        rank = ("east", "west").index(site)
        address = {"rank": rank, "cluster": site, "host": "127.0.0.1", "port": 4000 + rank}
        told = {"job": order["job"], "attempt": order["attempt"], "state": state}
        return ObservedPart.model_validate(told | ({"workers": [address]} if state == "running" else {}))


def _page_of_an_agent() -> bytes:
    """Return the page of an agent that has exchanged reports with its server."""
    machine, syncs = SiteMachine("east", make_allocator(EAST)), SyncCounts()
    syncs.add_answer(0.1, time.time())
    return agent_figures(machine, syncs, now_s=0.0, num_deferred=0, wall_s=time.time())


@contextmanager
def program(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


SHORT_TIMES = (
    (r"keep_firing_for: \d+[mh]", "keep_firing_for: 20s"),
    (r"(?<!20s)\n( +)labels: {severity", r"\n\1keep_firing_for: 6s\n\1labels: {severity"),
    (r"\bfor: \d+[mh]", "for: 1s"),
    (r"> 3600\b", "> 2"),
    (r"> 600\b", "> 3"),
    (r"\[(1h|15m|5m)\]", "[8s]"),
)
"""Times of the shipped rules, and those of the tests. On a busy machine a scrape may fail: no alert ends by that."""
ALERT_LIMIT_S = 120.0


@contextmanager
def monitoring(folder: Path, pool: Watched, receiver: WebhookReceiver) -> Iterator[str]:
    """Run both programs on copies of the shipped files with short times; yield the URL of Prometheus."""
    shutil.copytree(FOLDER.parent, folder)
    prometheus, alertmanager = free_ports(2)
    text = (
        (folder / "prometheus.yml")
        .read_text()
        .replace("15s", "1s")
        .replace("127.0.0.1:9093", f"127.0.0.1:{alertmanager}")
    )
    scheme, _, server = pool.url.partition("://")
    text = text.replace("127.0.0.1:8470", server).replace("    # scheme: https", f"    scheme: {scheme}")
    trust = f"ca_file: {pool.trust}" if pool.trust else "insecure_skip_verify: true"
    text = re.sub(r"    # tls_config:.*", f"    tls_config: {{{trust}}}", text)
    text = text.replace("127.0.0.1:8471", f"127.0.0.1:{pool.agent_port}")
    (folder / "prometheus.yml").write_text(text)
    (folder / "isthmus.token").write_text(pool.token)
    for name in ("isthmus.alerts.yml", "isthmus.rules.yml"):
        text = (folder / name).read_text()
        for pattern, short in SHORT_TIMES:
            text = re.sub(pattern, short, text)
        (folder / name).write_text(text)
    text = (folder / "alertmanager.yml").read_text().replace("http://127.0.0.1:9095/alerts", receiver.url)
    text = re.sub(r"group_wait: \d+s", "group_wait: 1s", text).replace("group_interval: 5m", "group_interval: 2s")
    (folder / "alertmanager.yml").write_text(text)
    with ExitStack() as stack:
        stack.enter_context(program(
            str(ALERTMANAGER), f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/alerts",
            f"--web.listen-address=127.0.0.1:{alertmanager}", "--cluster.listen-address=",
        ))  # fmt: skip
        stack.enter_context(program(
            str(PROMETHEUS), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{prometheus}",
        ))  # fmt: skip
        yield f"http://127.0.0.1:{prometheus}"


def has_data(url: str, query: str) -> bool:
    try:
        found = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=5).json()
    except httpx.TransportError:
        return False
    assert found["status"] == "success", found
    return bool(found["data"]["result"])


class Alerts:
    """The notifications that Alertmanager has sent, each of which must come once."""

    def __init__(self, receiver: WebhookReceiver) -> None:
        self._receiver = receiver

    def states(self, alert: str) -> list[str]:
        """Return the states of each notification about an alert, in order."""
        messages = [json.loads(body) for _, body in self._receiver.taken]
        return [one["status"] for one in messages if one["commonLabels"].get("alertname") == alert]

    def fires(self, alert: str, limit_s: float = ALERT_LIMIT_S) -> None:
        """Wait until an alert has fired, for the first time and once."""
        until(lambda: self.states(alert) == ["firing"], f"{alert} fires", limit_s)

    def ends(self, alert: str, limit_s: float = ALERT_LIMIT_S) -> None:
        """Wait until an alert that fired once has ended, once."""
        until(lambda: self.states(alert) == ["firing", "resolved"], f"{alert} ends", limit_s)
