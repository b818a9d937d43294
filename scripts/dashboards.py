"""Write the Grafana dashboards of `deploy/monitoring/dashboards`; `tests/monitoring` checks that they are current.

python -m scripts.dashboards
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "deploy" / "monitoring" / "dashboards"
WIDTH, HEIGHT, COLUMNS = 12, 8, 2
"""Size of a panel in units of Grafana's grid of 24, and panels of a row."""


class Panel(NamedTuple):
    """A chart: its title, unit, and queries with the legend of each."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "pool": (
        "Isthmus: the pool",
        (
            Panel("Sites that report", "short", (("sum(isthmus_cluster_connected)", "connected"),
                                                 ("count(isthmus_cluster_connected)", "all"))),
            Panel("Chips in use", "percentunit", (("isthmus:cluster_chips_used:ratio", "{{cluster}}"),)),
            Panel("Chips by site", "short", (("sum by (cluster) (isthmus_chips)", "{{cluster}} installed"),
                                             ("sum by (cluster) (isthmus_chips_free)", "{{cluster}} free"))),
            Panel("Jobs by state", "short", (("isthmus_jobs", "{{state}}"),)),
            Panel("Waiting jobs", "short", (("isthmus_queue_jobs", "{{priority}}"),)),
            Panel("Longest wait now", "s", (("isthmus_queue_oldest_wait_seconds", "oldest"),)),
            Panel("Wait of started jobs, p95", "s", (("isthmus:queue_wait_seconds:p95_1h", "p95"),)),
            Panel("Parts by state", "short", (("sum by (cluster, state) (isthmus_parts)", "{{cluster}} {{state}}"),)),
            Panel("Links: reserved of capacity", "percentunit",
                  (("isthmus:link_reserved:ratio", "{{source}} > {{target}}"),)),
            Panel("Links: Gbit/s", "short", (("isthmus_link_capacity_gbps", "{{source}} > {{target}} capacity"),
                                             ("isthmus_link_reserved_gbps", "{{source}} > {{target}} reserved"),
                                             ("isthmus_link_measured_gbps", "{{source}} > {{target}} measured"))),
            Panel("Free storage", "bytes", (("isthmus_cluster_free_storage_bytes", "{{cluster}}"),)),
            Panel("Since the last report", "s",
                  (("time() - isthmus_agent_last_report_timestamp_seconds", "{{cluster}}"),)),
        ),
    ),
    "jobs": (
        "Isthmus: running jobs",
        (
            Panel("Progress", "percentunit", (("isthmus:job_progress:ratio", "{{job_id}}"),)),
            Panel("Time of a step", "s", (("isthmus_job_step_seconds", "{{job_id}}"),
                                          ("isthmus_job_predicted_step_seconds", "{{job_id}} predicted"))),
            Panel("Measured over predicted", "short", (("isthmus:job_slowdown:ratio", "{{job_id}}"),)),
            Panel("Since the last checkpoint, in intervals", "short",
                  (("isthmus:job_checkpoint_age:ratio", "{{job_id}}"),)),
            Panel("Workers replaced", "short", (("isthmus_job_worker_restarts", "{{job_id}}"),)),
            Panel("Attempts", "short", (("isthmus_job_attempt", "{{job_id}}"),)),
        ),
    ),
    "server": (
        "Isthmus: the server",
        (
            Panel("Leader", "short", (("isthmus_leader", "{{instance}}"), ("isthmus_epoch", "epochs"))),
            Panel("Events", "ops", (("isthmus:events:rate5m", "{{kind}}"),)),
            Panel("Time of a write, p99", "s", (("isthmus:append_seconds:p99_5m", "p99"),)),
            Panel("Ledger", "short", (("isthmus_ledger_entries", "entries"),
                                      ("isthmus_ledger_sum_millionths", "sum, millionths"),
                                      ("isthmus_ledger_unpaired_entries", "unpaired"))),
            Panel("Notices that wait", "short", (("isthmus_notices_waiting", "waiting"),)),
            Panel("Messages of notices", "short",
                  (("sum by (channel, outcome) (isthmus_notification_messages_total)", "{{channel}} {{outcome}}"),)),
            Panel("CPU", "percentunit", (('rate(process_cpu_seconds_total{job="isthmus"}[5m])', "{{instance}}"),)),
            Panel("Memory", "bytes", (('process_resident_memory_bytes{job="isthmus"}', "{{instance}}"),)),
            Panel("Alerts", "short",
                  (('ALERTS{alertname=~"Isthmus.+"} or vector(0)', "{{alertname}} {{alertstate}}"),)),
        ),
    ),
    "agent": (
        "Isthmus: a site's agent",
        (
            Panel("Devices", "short", (("isthmus_agent_devices", "{{node_group}}"),
                                       ("isthmus_agent_devices_of_pool", "{{node_group}} of the pool"))),
            Panel("Free devices in fragments", "short",
                  (("isthmus_agent_devices_free - isthmus_agent_devices_offered", "{{node_group}}"),)),
            Panel("Parts by state", "short", (("isthmus_agent_parts", "{{state}}"),)),
            Panel("Local jobs by state", "short", (("isthmus_agent_local_jobs", "{{state}}"),)),
            Panel("Parts without a place, and moves", "short",
                  (("isthmus_agent_parts_without_place", "without a place"),
                   ("isthmus_agent_moves_proposed", "moves proposed"),
                   ("isthmus_agent_moves_in_hour", "moves in the last hour"))),
            Panel("Since the server's last answer", "s",
                  (("time() - isthmus_agent_last_answer_timestamp_seconds", "{{instance}}"),)),
            Panel("Exchanges with the server", "short", (("isthmus_agent_syncs_total", "{{outcome}}"),)),
            Panel("Longest unsaved work", "s", (("isthmus_agent_unsaved_seconds", "{{instance}}"),)),
        ),
    ),
}  # fmt: skip


def dashboard(name: str) -> dict[str, Any]:
    """Return the JSON model of a dashboard, for Grafana 9 and later."""
    title, panels = DASHBOARDS[name]
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "uid": f"isthmus-{name}", "title": title, "tags": ["isthmus"], "schemaVersion": 37, "version": 1,
        "editable": True, "refresh": "30s", "time": {"from": "now-6h", "to": "now"}, "timezone": "",
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}]
        },
        "panels": list(_panels(panels, source)),
    }  # fmt: skip


def _panels(panels: tuple[Panel, ...], source: dict[str, str]) -> Iterator[dict[str, Any]]:
    for index, panel in enumerate(panels):
        yield {
            "id": index + 1, "type": "timeseries", "title": panel.title, "datasource": source,
            "gridPos": {"x": index % COLUMNS * WIDTH, "y": index // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(65 + number), "datasource": source, "expr": expr, "legendFormat": legend}
                for number, (expr, legend) in enumerate(panel.queries)
            ],
        }  # fmt: skip


def main() -> None:
    """Write all dashboards."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(rendered(name))


def rendered(name: str) -> str:
    """Return the text of a dashboard's file."""
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    main()
