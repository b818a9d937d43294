"""A server process is killed between an act and its notice: nothing is lost, and a repetition is recognised."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.control.server.backup_file import check_store_of
from isthmus.control.server.server_config import ServerConfig
from isthmus.core.views.audit_chain import AuditReport
from tests.control.receivers import webhook_receiver
from tests.control.serving import submission

pytestmark = pytest.mark.integration


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Run `isthmus serve`; yield its URL; end it by SIGKILL."""
    options = ["--state", str(folder / "state"), "--port", "0", "--notify", str(folder / "notify.yaml"), "--json"]
    command = [sys.executable, "-m", "isthmus", "serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield str(json.loads(process.stdout.readline())["server"])
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(20)


def audit_of(folder: Path) -> AuditReport:
    found = check_store_of(ServerConfig(state=folder / "state"))
    assert found.problems == ()
    assert found.audit is not None
    return found.audit


def test_a_notice_outlives_the_server_and_each_act_its_answer(tmp_path: Path) -> None:
    """1. a job is cancelled, and answered; 2. the receiver fails; 3. SIGKILL; 4. the next server repeats it."""
    (tmp_path / "notify.yaml").write_text("networks: [127.0.0.0/8]\n")
    with webhook_receiver() as hook:
        hook.statuses = [503]
        with served(tmp_path) as url:
            token = (tmp_path / "state" / "admin.token").read_text().strip()

            def call(method: str, path: str, body: object = None) -> Any:
                headers = {"Authorization": f"Bearer {token}"}
                answer = httpx.request(method, url + path, json=body, headers=headers, timeout=20)
                assert answer.status_code < 300, answer.text
                return answer.json()

            call("PUT", "/v1/subscription", {"webhook": hook.url, "topics": ["state"]})
            job = call("POST", "/v1/jobs", submission().model_dump(mode="json"))["id"]
            call("POST", f"/v1/jobs/{job}/cancel")
            num_lines = call("GET", "/v1/audit")["records"][-1]["number"]
            assert hook.arrived.acquire(timeout=40)
        before = audit_of(tmp_path)
        assert (before.end.number >= num_lines, before.first) == (True, 1), "what was answered is in the log"
        with served(tmp_path):
            assert hook.arrived.acquire(timeout=40)
        after = audit_of(tmp_path)
    first, second = ((head["webhook-id"], json.loads(body)["notices"]) for head, body in hook.taken)
    assert first == second
    assert [(one["kind"], one["job"]) for one in first[1]] == [("cancelled", job)]
    assert after.end.number >= before.end.number
