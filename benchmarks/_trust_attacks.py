"""Seeded attacks on a real pool: server and two agents as processes, a running job, four attackers."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from benchmarks._trust_attackers import ATTACKS, NORTH, Target
from benchmarks.table import Row
from isthmus.core.pool import Owner
from isthmus.core.views.access_views import AuditPage
from isthmus.core.views.api_views import JobView
from tests.control.processes import RealPool, until
from tests.control.serving import POOL, report

NUM_ATTACKS, NUM_QUICK_ATTACKS = 1000, 60
CHECK_EVERY = 20
AUDIT_WAIT_S = 75.0
STEPS = 1_000_000
WITH_NORTH = POOL.model_copy(update={"owners": (*POOL.owners, Owner(name="owner-north"))})


class AttackedPool:
    """A pool with a running job of `ann`, and what must stay true of it whatever the attackers do."""

    def __init__(self, folder: Path) -> None:
        self.pool = RealPool(folder, WITH_NORTH)
        self.user_token = self.pool.create_token("user", "mallory")
        self.owner_token = self.pool.create_token("owner", "owner-north")
        training = {"steps": STEPS, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 2}
        job = self.pool.submit("victim", training=training)
        assert job is not None
        self.job = job
        until(lambda: self.pool.state(job) == "running" and self.pool.metrics(job), "the job runs")
        self.attempt = self._view().attempt
        output = str(folder / "out" / job)
        self.target = Target(self.pool.url, job, self.attempt, self.user_token, self.owner_token, output)
        body = report(NORTH, incarnation="north-1").model_dump(mode="json", by_alias=True)
        self.target.request(self.owner_token, "POST", "/v1/agents/north/sync", body).raise_for_status()

    def _view(self) -> JobView:
        found = self.pool.job(self.job)
        assert found is not None
        return found

    def broken_rule(self) -> str:
        """Return which rule an attack broke, "" if none."""
        view = self._view()
        if (view.state, view.attempt) != ("running", self.attempt):
            return f"the job is {view.state} in attempt {view.attempt}"
        if any(part.observed != "running" or "x" * 100 in part.detail for part in view.parts):
            return f"its parts are {view.parts}"
        call = f"/v1/jobs/{self.job}"
        logs = self.pool.call("GET", f"{call}/logs?limit=10000")
        metrics = self.pool.call("GET", f"{call}/metrics?newest=true")
        if logs is None or metrics is None:
            return "the server does not answer"
        if "FORGED" in logs.text or "-12345" in metrics.text:
            return "forged logs or metrics are stored"
        steps = [line["step"] for line in metrics.json()["metrics"]]
        if not steps:
            return "metrics no longer arrive"
        return "" if self.pool.free() | {"north": 2} == {"east": 1, "west": 1, "north": 2} else "chips are miscounted"

    def audited(self) -> Counter[str]:
        """Return how many refusals the audit log names or counts, by actor; strangers have the name ""."""
        found, after = Counter[str](), 1
        while True:
            answer = self.target.request(self.pool.admin_token(), "GET", f"/v1/audit?after={after}&limit=1000")
            page = AuditPage.model_validate(answer.raise_for_status().json())
            for record in page.records:
                if record.action in ("refused", "login-failed", "dropped"):
                    counted = re.match(r"(\d+) (requests|records)", record.detail)
                    found[record.actor] += int(counted[1]) if counted else 1
            if not page.records:
                return found
            after = page.next

    def num_unaudited(self) -> int:
        """Return how many refusals the audit log lacks; failed logins reach it once a minute."""
        deadline_s = time.monotonic() + AUDIT_WAIT_S
        while (missing := (self.target.refused - self.audited()).total()) and time.monotonic() < deadline_s:
            time.sleep(1)
        return missing

    def close(self) -> None:
        """Stop every process."""
        self.pool.call("POST", f"/v1/jobs/{self.job}/cancel")
        self.pool.close()


def measure(quick: bool) -> list[Row]:
    """Return how many of the seeded attacks gained something, and how many the audit log names."""
    count = NUM_QUICK_ATTACKS if quick else NUM_ATTACKS
    kinds = [(role, attack) for role, attacks in ATTACKS.items() for attack in attacks]
    gains = list[str]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        attacked = AttackedPool(Path(folder))
        try:
            begun_s, begun_cpu_s = time.monotonic(), time.process_time()
            for seed in range(count):
                role, attack = kinds[seed % len(kinds)]
                gained = attack(attacked.target, Random(seed))
                if not gained and (seed % CHECK_EVERY == 0 or seed == count - 1):
                    gained = attacked.broken_rule()
                if gained:
                    gains.append(f"{role}, {attack.__name__}, seed {seed}: {gained}")
                    print(gains[-1], flush=True)
            seconds, cpu_s = time.monotonic() - begun_s, time.process_time() - begun_cpu_s
            missing = attacked.num_unaudited()
        finally:
            attacked.close()
    what = f"{count} seeded attacks of {len(kinds)} kinds by 4 roles, {seconds:.0f} s, {cpu_s:.0f} s of CPU: succeeded"
    named = f"{attacked.target.refused.total()} refusals of these: not in the audit log"
    return [
        Row(what=what, ours=len(gains), unit="", target="0", met=not gains),
        Row(what=named, ours=missing, unit="", target="0", met=missing == 0),
    ]
