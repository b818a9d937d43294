"""Rules, alerts and dashboards of `deploy/monitoring`: valid, tested one by one, and about series that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from isthmus.agent.metrics import agent_figures
from isthmus.control.queries.monitoring import pool_figures
from isthmus.control.service.metrics import render_metrics, server_metrics
from scripts.dashboards import DASHBOARDS, FOLDER, rendered

MONITORING = FOLDER.parent
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: apt-get install prometheus")


def promtool(*arguments: str, folder: Path = MONITORING) -> str:
    done = subprocess.run([str(PROMTOOL), *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def alerts() -> list[str]:
    (group,) = yaml.safe_load((MONITORING / "isthmus.alerts.yml").read_text())["groups"]
    return [rule["alert"] for rule in group["rules"]]


@needs_promtool
def test_rules_alerts_and_configuration_are_valid(tmp_path: Path) -> None:
    """By the checker of Prometheus itself; the configuration names the files beside it, and a token."""
    assert "SUCCESS: 8 rules found" in promtool("check", "rules", "isthmus.rules.yml")
    assert f"SUCCESS: {len(alerts())} rules found" in promtool("check", "rules", "isthmus.alerts.yml")
    shutil.copytree(MONITORING, tmp_path / "monitoring")
    (tmp_path / "monitoring" / "isthmus.token").write_text("token")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml", folder=tmp_path / "monitoring")


@needs_promtool
def test_each_alert_fires_on_its_fault_and_ends_with_it() -> None:
    """The unit tests of the rules pass, by promtool."""
    assert "SUCCESS" in promtool("test", "rules", "isthmus.test.yml")


def test_no_alert_is_without_a_test_of_its_beginning_and_end() -> None:
    """Each has a time at which it fires and one at which it does not, and says what to do."""
    told = yaml.safe_load((MONITORING / "isthmus.test.yml").read_text())
    seen = [(one["alertname"], bool(one["exp_alerts"])) for test in told["tests"] for one in test["alert_rule_test"]]
    assert set(seen) == {(name, fires) for name in alerts() for fires in (True, False)}
    (group,) = yaml.safe_load((MONITORING / "isthmus.alerts.yml").read_text())["groups"]
    assert all({"summary", "action"} == set(rule["annotations"]) for rule in group["rules"])
    assert {rule["labels"]["severity"] for rule in group["rules"]} == {"page", "warn"}


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_the_dashboards_are_those_of_the_script(name: str) -> None:
    """`python -m scripts.dashboards` writes them."""
    assert (FOLDER / f"{name}.json").read_text() == rendered(name)


def test_queries_name_series_that_the_server_has() -> None:
    """No dashboard and no rule asks for a misspelt or a removed series."""
    queries = [query for _, panels in DASHBOARDS.values() for panel in panels for query, _ in panel.queries]
    texts = [(MONITORING / name).read_text() for name in ("isthmus.rules.yml", "isthmus.alerts.yml")]
    recorded = set(re.findall(r"record: (\S+)", texts[0]))
    asked = set(re.findall(r"\bisthmus[_:][a-z0-9_:]+", " ".join([*queries, *texts])))
    modules = (pool_figures, render_metrics, server_metrics, agent_figures)
    sources = [Path(str(module.__file__)).read_text() for module in modules]
    sources.append((Path(str(server_metrics.__file__)).parents[1] / "control_service.py").read_text())
    sources.append((Path(str(server_metrics.__file__)).parents[2] / "server" / "run_server.py").read_text())
    made = set(re.findall(r'"(isthmus_[a-z0-9_]+)"', " ".join(sources)))
    known = recorded | made | {f"{name}{suffix}" for name in made for suffix in ("_total", "_bucket")}
    assert asked - known == set()


def test_the_guide_names_every_series_alert_and_field_of_the_logs() -> None:
    """What is scraped, what fires and what a log line may have is documented."""
    guide = (MONITORING.parents[1] / "docs" / "guide" / "monitoring.md").read_text()
    named = set(re.findall(r"`([\w.]+)`", guide))
    assert [alert for alert in alerts() if alert not in named] == []
    package = Path(str(render_metrics.__file__)).parents[3]
    for source in (
        "control/service/metrics/render_metrics.py", "control/service/control_service.py",
        "agent/metrics/agent_figures.py",
    ):  # fmt: skip
        series = re.findall(r'"(isthmus_[a-z_]+)"', (package / source).read_text())
        assert [one for one in series if one not in named] == []
    logger = (package / "control" / "service" / "job_state_logger.py").read_text()
    fields = set(re.findall(r'"(\w+)": ', " ".join(re.findall(r"(?:fields|more|extra) ?= ?.*\{.*\}", logger))))
    assert {"job", "attempt", "part"} <= fields
    assert fields <= named
