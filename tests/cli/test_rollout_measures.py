"""What is to be seen of a job with task rl: measures of its samples, and its sites that decode, wherever one looks."""

from __future__ import annotations

import io

from rich.console import Console

from isthmus.cli.job_report.write_report import render_report
from isthmus.cli.job_statistics import JobStatistics
from isthmus.cli.rollout_measures import MEASURES, rollout_sites
from isthmus.cli.terminal.dashboard import dashboard, status_line, status_record
from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.messages.rollout_figures import ROLLOUT_FIGURES
from isthmus.core.plan_parts.rollout_place import RolloutPlace
from tests.cli.samples import make_job, make_pool, make_view

VIEW = make_view(state="running")
assert VIEW.plan is not None
DECODERS = [RolloutPlace(cluster=name, node_group="cpu") for name in ("b", "c")]
PLAN = VIEW.plan.model_copy(update={"rollouts": tuple(DECODERS)})
RL = RlConfig(max_prompt_tokens=4, max_response_tokens=4, reward={"exact": True})
RL_VIEW = VIEW.model_copy(update={"plan": PLAN, "job": make_job().model_copy(update={"task": "rl", "rl": RL})})
FIRST = len(PLAN.ranks)


def lines() -> list[StepMetrics]:
    """Two steps of the trainer, and of the first rank that decodes."""
    found = []
    for step in (0, 1):
        values = dict.fromkeys(MEASURES, 0.25 + step / 4) | {"loss": 0.1, "step_s": 2.0, "tokens_per_s": 9.0}
        decodes = {"rollout_tokens_per_s": 100.0, "decode_s": 6.0, "wait_samples_s": 3.0, "wait_link_s": 1.0}
        found += [
            StepMetrics(job="j", attempt=1, rank=rank, step=step, values=one)
            for rank, one in ((0, values), (FIRST, decodes))
        ]
    return found


def test_a_site_that_decodes_has_its_rate_and_its_time_by_cause() -> None:
    """A rank that has reported nothing is left out."""
    (site,) = rollout_sites(PLAN, JobStatistics(lines()), 10)
    assert (site.rank, site.cluster, site.tokens_per_s) == (FIRST, "b", 100.0)
    assert (site.total_s, site.waits_s) == (10.0, (3.0, 0.0, 1.0))


def test_watch_and_report_say_what_the_samples_are() -> None:
    """The record has numbers, the line the reward, the page and the report each measure; other jobs have no section."""
    stats = JobStatistics(lines())
    record = status_record(RL_VIEW, stats)
    assert record["samples"] == dict.fromkeys(MEASURES, 0.5)
    assert [one["cluster"] for one in record["rollouts"]] == ["b"]
    assert all(one["rank"] < FIRST for one in record["stages"])
    assert "reward 0.500" in status_line(RL_VIEW, stats)
    out = io.StringIO()
    Console(file=out, width=200).print(dashboard(RL_VIEW, stats))
    page = render_report(RL_VIEW, lines(), make_pool())
    for text in (out.getvalue(), page):
        assert all(name in text for name, _ in MEASURES.values())
        assert all(one in text for one in ("60", "no samples", "no link"))
    assert "<h2>Samples</h2>" not in render_report(VIEW, [], make_pool())


def test_monitoring_reads_what_people_see() -> None:
    """Each measure has a help text for Prometheus."""
    assert MEASURES.keys() < ROLLOUT_FIGURES.keys()
