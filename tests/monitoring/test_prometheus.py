"""A real Prometheus and a real Alertmanager watch a real server, with the files of `deploy/monitoring`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.dashboards import DASHBOARDS
from tests.control.processes import until
from tests.control.receivers import webhook_receiver
from tests.monitoring.watched_pool import ALERTMANAGER, PROMETHEUS, Alerts, WatchedPool, has_data, monitoring

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        PROMETHEUS is None or ALERTMANAGER is None,
        reason="Prometheus or Alertmanager is missing: apt-get install prometheus prometheus-alertmanager",
    ),
]


def test_every_query_has_data_and_each_alert_comes_once_and_ends(tmp_path: Path) -> None:
    """Each chart of each dashboard shows something; each fault makes one message, and its end one more.

    The agent of a site stops and is back; a job is slow, over a link worse than it has reserved; a user's webhook
    leads to a private network; a site refuses all parts, and takes them again; the server ends. `test_server_faults.py`
    makes the faults of the server, the store and the ledger, `test_full_disk.py` that of checkpoints.
    """
    pool = WatchedPool(tmp_path / "server")
    try:
        with webhook_receiver() as receiver, webhook_receiver() as notices:
            alerts = Alerts(receiver)
            pool.call("PUT", "/v1/subscription", {"webhook": notices.url, "topics": ["state", "sites"]})
            with monitoring(tmp_path / "monitoring", pool, receiver) as url:
                running, waiting = pool.run_job(), pool.submit("next", policy="manual")
                queries = [query for _, panels in DASHBOARDS.values() for panel in panels for query, _ in panel.queries]
                for query in queries:
                    until(lambda query=query: has_data(url, query), query, 60)  # type: ignore[misc]
                assert alerts.states("IsthmusSiteAway") == []
                pool.alive.remove("west")
                alerts.fires("IsthmusSiteAway")
                pool.alive.add("west")
                alerts.ends("IsthmusSiteAway")
                for alert in ("IsthmusJobSlow", "IsthmusLinkWorseThanReserved"):
                    alerts.fires(alert)
                lost = _job_of_user_with_private_webhook(pool)
                alerts.fires("IsthmusNoticesDropped")
                pool.cancel(waiting, running)
                for alert in ("IsthmusJobSlow", "IsthmusLinkWorseThanReserved", "IsthmusNoticesDropped"):
                    alerts.ends(alert)
                assert alerts.states("IsthmusQueueStuck") == [], f"jobs wait for a choice alone: {waiting}, {lost}"
                pool.refusing = {"west"}
                stuck = pool.submit("stuck")
                alerts.fires("IsthmusQueueStuck")
                pool.refusing = set()
                pool.until_state(stuck, "running")
                alerts.ends("IsthmusQueueStuck")
                pool.close()
                alerts.fires("IsthmusServerDown")
            kinds = [one["kind"] for _, body in notices.taken for one in json.loads(body)["notices"]]
            assert kinds.count("started") >= 1
            ids = [json.loads(body)["id"] for _, body in notices.taken]
            assert len(set(ids)) == len(ids), "each message comes once"
    finally:
        pool.close()


def _job_of_user_with_private_webhook(pool: WatchedPool) -> str:
    """Let a user subscribe to notices at a private address, which the operator has not allowed, and cancel a job."""
    user = pool.call("POST", "/v1/tokens", {"role": "user", "name": "mallory"})["token"]
    pool.call("PUT", "/v1/subscription", {"webhook": "https://10.1.2.3/hook", "topics": ["state"]}, user)
    job = pool.submit("theirs", user, policy="manual")
    pool.call("POST", f"/v1/jobs/{job}/cancel", token=user)
    return job
