"""A real Prometheus and a real Alertmanager watch a real server, with the files of `deploy/monitoring`."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.control.placement import PlanRequest
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.service.notify.notify_settings import NotifySettings
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.core.messages.agent_messages import ObservedPart, StepMetrics, WorkerAddress
from isthmus.core.plan import PlanSet, Prediction
from isthmus.core.pool import Cluster
from scripts.dashboards import DASHBOARDS, FOLDER
from tests.control.processes import UNVERIFIED, until
from tests.control.receivers import WebhookReceiver, webhook_receiver
from tests.control.serving import EAST, POOL, WEST, plan_across, report, submission

PROMETHEUS, ALERTMANAGER = shutil.which("prometheus"), shutil.which("prometheus-alertmanager")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        PROMETHEUS is None or ALERTMANAGER is None,
        reason="Prometheus or Alertmanager is missing: apt-get install prometheus prometheus-alertmanager",
    ),
]
PREDICTED = Prediction(
    iteration_s=0.5, tgs_tokens_per_card_s=1.0, samples_per_s=1.0, peak_memory_bytes=(1, 1), wan_gbps=(0.1,)
)


def plan_with_prediction(asked: PlanRequest) -> PlanSet:
    """Plan as `plan_across`, with the time of a step and the traffic of the link."""
    found = plan_across(asked)
    plans = tuple(plan.model_copy(update={"predicted": PREDICTED}) for plan in found.plans)
    return found.model_copy(update={"plans": plans})


class WatchedPool:
    """A server with TLS in a thread, whose two agents report while they are `alive`."""

    def __init__(self, folder: Path) -> None:
        self.stop, self._ready = threading.Event(), threading.Event()
        config = ServerConfig(
            state=folder, port=0, pool=POOL, self_signed=True, rules=CoordinatorConfig(agent_timeout_s=2.0),
            notify=NotifySettings(networks=("127.0.0.0/8",)),
        )  # fmt: skip
        arguments: dict[str, Any] = {"stop": self.stop, "planner": plan_with_prediction}
        self._server = threading.Thread(target=run_server, args=(config, self._announce), kwargs=arguments)
        self._server.start()
        assert self._ready.wait(30)
        self.token, self.alive = (folder / "admin.token").read_text().strip(), {"east", "west"}
        self._parts: dict[str, ObservedPart] = {}
        self._checks: dict[str, list[dict[str, object]]] = {"east": [], "west": []}
        self.step = 0
        self._agents = threading.Thread(target=self._report)
        self._agents.start()

    def _announce(self, listening: ServerInfo) -> None:
        assert listening.certificate is not None
        self.url, self.trust = listening.url, listening.certificate.trust
        self._ready.set()

    def call(self, method: str, path: str, body: object = None) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=20, verify=UNVERIFIED)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def run_job(self) -> tuple[str, str]:
        """Submit a job and let both sites run it; a second one waits for the choice of a plan."""
        job = str(self.call("POST", "/v1/jobs", submission().model_dump(mode="json"))["id"])
        self._until_state(job, "preparing")
        for state, after in (("prepared", "starting"), ("running", "running")):
            for rank, site in enumerate((EAST, WEST)):
                address = WorkerAddress(rank=rank, cluster=site.name, host="127.0.0.1", port=4000 + rank)
                workers = (address,) if state == "running" else ()
                part = {"job": job, "attempt": 1, "state": state, "workers": workers}
                self._parts[site.name] = ObservedPart.model_validate(part)
            self._until_state(job, after)
        waiting = submission(name="next", output="out/next", policy="manual").model_dump(mode="json")
        return job, str(self.call("POST", "/v1/jobs", waiting)["id"])

    def cancel(self, *jobs: str) -> None:
        """Cancel jobs; the sites release their parts."""
        for job in jobs:
            self.call("POST", f"/v1/jobs/{job}/cancel")
        for name, part in self._parts.items():
            self._parts[name] = ObservedPart(job=part.job, attempt=1, state="released")

    def _until_state(self, job: str, state: str) -> None:
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
        part = self._parts.get(site.name)
        metrics = ()
        if part is not None and part.state == "running" and site is EAST:
            values = {"step_s": 1.2, "loss": 1.0}
            metrics = (StepMetrics(job=part.job, attempt=1, rank=0, step=min(self.step, 1), values=values),)
            self.step += 1
        address = {"host": "127.0.0.1", "port": 4999, "nonce": "0" * 32}
        told = report(
            site, *([part] if part else []), metrics=metrics, free_storage_bytes=10**12, peer_address=address,
            peer_checks=self._checks[site.name],
        )  # fmt: skip
        orders = self.call("POST", f"/v1/agents/{site.name}/sync", told.model_dump(mode="json", by_alias=True))
        self._checks[site.name] = [
            {"cluster": one["cluster"], "number": one["number"], "reached": True, "round_trip_s": 0.01, "gbps": 0.05}
            for one in orders["peers_to_check"]
        ]

    def close(self) -> None:
        self.stop.set()
        self._agents.join(20)
        self._server.join(20)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def program(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def monitoring(folder: Path, pool: WatchedPool, receiver: WebhookReceiver) -> Iterator[str]:
    """Run both programs on copies of the shipped files with short times; yield the URL of Prometheus."""
    shutil.copytree(FOLDER.parent, folder)
    prometheus, alertmanager = free_port(), free_port()
    text = (
        (folder / "prometheus.yml")
        .read_text()
        .replace("15s", "1s")
        .replace("127.0.0.1:9093", f"127.0.0.1:{alertmanager}")
    )
    text = text.replace("127.0.0.1:8470", pool.url.removeprefix("https://")).replace("    # scheme", "    scheme")
    text = re.sub(r"    # tls_config:.*", f"    tls_config: {{ca_file: {pool.trust}}}", text)
    (folder / "prometheus.yml").write_text(text)
    (folder / "isthmus.token").write_text(pool.token)
    alerts = re.sub(r"for: \d+[mh]", "for: 1s", (folder / "isthmus.alerts.yml").read_text())
    (folder / "isthmus.alerts.yml").write_text(alerts)
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


def told(receiver: WebhookReceiver, alert: str) -> list[str]:
    """Return the states of each notification about an alert, in order."""
    messages = [json.loads(body) for _, body in receiver.taken]
    return [one["status"] for one in messages if one["commonLabels"].get("alertname") == alert]


def test_every_query_has_data_and_each_alert_comes_once_and_ends(tmp_path: Path) -> None:
    """Each chart of each dashboard shows something; each fault makes one message, and its end one more.

    The agent of a site stops and is back; a job is slow, over a link worse than it has reserved, and ends; the server
    ends.
    """
    pool = WatchedPool(tmp_path / "server")
    try:
        with webhook_receiver() as alerts, webhook_receiver() as notices:
            pool.call("PUT", "/v1/subscription", {"webhook": notices.url, "topics": ["state", "sites"]})
            with monitoring(tmp_path / "monitoring", pool, alerts) as url:
                running, waiting = pool.run_job()
                queries = [query for _, panels in DASHBOARDS.values() for panel in panels for query, _ in panel.queries]
                for query in queries:
                    until(lambda query=query: has_data(url, query), query, 60)  # type: ignore[misc]
                assert told(alerts, "IsthmusSiteAway") == []
                pool.alive.remove("west")
                until(lambda: told(alerts, "IsthmusSiteAway") == ["firing"], "the alert")
                pool.alive.add("west")
                until(lambda: len(told(alerts, "IsthmusSiteAway")) > 1, "its end")
                assert told(alerts, "IsthmusSiteAway") == ["firing", "resolved"]
                for alert in ("IsthmusJobSlow", "IsthmusLinkWorseThanReserved"):
                    until(lambda alert=alert: told(alerts, alert) == ["firing"], alert)  # type: ignore[misc]
                pool.cancel(waiting, running)
                for alert in ("IsthmusJobSlow", "IsthmusLinkWorseThanReserved"):
                    until(lambda alert=alert: told(alerts, alert)[1:] == ["resolved"], alert)  # type: ignore[misc]
                pool.close()
                until(lambda: told(alerts, "IsthmusServerDown") == ["firing"], "the end of the server")
            kinds = [one["kind"] for _, body in notices.taken for one in json.loads(body)["notices"]]
            assert kinds.count("started") == 1
    finally:
        pool.close()
