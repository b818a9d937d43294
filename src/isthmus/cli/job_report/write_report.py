"""`write_report`: a job report as one self-contained HTML page; its script draws the charts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from isthmus.cli.history_text import untold_reason
from isthmus.cli.job_report import report_sections
from isthmus.cli.job_report.stage_trace import on_one_clock, trace_events, wan_transfers
from isthmus.cli.job_statistics import JobStatistics, Series, downsample, predicted_tokens_per_s, wan_links
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.plan import Plan
from isthmus.core.text.html_page import page_style, page_text
from isthmus.core.text.printable import printable
from isthmus.core.views.api_views import HistoryEvent, JobView, PoolView

__all__ = ["render_report", "trace_events", "write_report"]

MAX_POINTS = 1500
"""Maximum points per curve; more cannot be distinguished on a screen."""
MAX_TIMELINES = 16
"""Maximum steps in the timeline, evenly spaced among those with spans."""


def write_report(
    view: JobView,
    metrics: Sequence[StepMetrics],
    pool: PoolView | None,
    path: Path,
    *,
    history: Sequence[HistoryEvent] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the report of job `view` to `path` atomically.

    `pool` adds virtual chips, owners and link capacities to the page, `history` the events of the job. `extra` adds
    (label, value) lines to the measurements. Raises `UnavailableError` if the file cannot be written.
    """
    page = render_report(view, metrics, pool, history=history, extra=extra)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise UnavailableError(f"cannot write the report {path}: {error.strerror or error}") from error


def render_report(
    view: JobView,
    metrics: Sequence[StepMetrics],
    pool: PoolView | None,
    *,
    history: Sequence[HistoryEvent] = (),
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Return the page as HTML; see `write_report`."""
    figures = JobStatistics(metrics)
    parts = {
        "title": page_text(f"{view.name} · Isthmus report"),
        "css": page_style() + _asset("report.css"),
        "header": report_sections.header_section(view, figures, pool, untold_reason(view, history)),
        "tiles": report_sections.summary_tiles(view, figures),
        "history": report_sections.history_section(view, history),
        "samples": report_sections.samples_section(view, figures),
        "stages": report_sections.stages_section(view, figures, pool),
        "links": report_sections.links_section(view, figures, pool),
        "plan": report_sections.plan_section(view, figures, extra or {}),
        "refused": report_sections.not_chosen_section(view),
        "settings": report_sections.settings_section(view),
        "data": _script_json(_chart_data(view, figures)),
        "js": _asset("report.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark.group(1)], _asset("report.html"))


def _asset(name: str) -> str:
    return resources.files("isthmus.cli.job_report").joinpath("assets", name).read_text(encoding="utf-8")


def _script_json(data: Any) -> str:
    """Return `data` as JSON that cannot close the surrounding script element, whatever names it contains."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _chart_data(view: JobView, stats: JobStatistics) -> dict[str, Any]:
    plan = view.plan
    return {
        "loss": _rounded_points(stats.series("loss")),
        "validation": _rounded_points(stats.series("validation_loss")),
        "throughput": _rounded_points(stats.series("tokens_per_s")),
        "predicted_throughput": predicted_tokens_per_s(plan) if plan else None,
        "timelines": _timelines(stats, plan) if plan else [],
    }


def _rounded_points(series: Series) -> Series:
    return [(step, float(f"{value:.6g}")) for step, value in downsample(series, MAX_POINTS)]


def _timelines(stats: JobStatistics, plan: Plan) -> list[dict[str, Any]]:
    traced = [step for step in stats.steps if any(one.spans for one in stats.step_metrics(step))]
    chosen = [int(step) for step, _ in downsample([(step, 0.0) for step in traced], MAX_TIMELINES)]
    return [_timeline(step, stats.step_metrics(step), plan) for step in chosen]


def _timeline(step: int, metrics: Sequence[StepMetrics], plan: Plan) -> dict[str, Any]:
    """Return one step for the page: spans per rank and messages per link, in ms from its first span.

    A message is [kind, micro-batch, start, end, queued]: from its first byte leaving until its last byte arrived,
    after `queued` ms in the sender's queue.
    """
    metrics = on_one_clock(metrics, plan)
    spans, messages = [span for one in metrics for span in one.spans], wan_transfers(metrics, plan)
    zero_s = min(span.start_s for span in spans)
    end_s = max([span.end_s for span in spans] + [message.end_s for message in messages])

    def ms(at_s: float) -> float:
        return round((at_s - zero_s) * 1e3, 3)

    lanes = []
    for one in metrics:
        if one.rank >= len(plan.ranks):
            continue
        stage = plan.stage_of(one.rank)
        lanes.append(
            {
                "cluster": stage.cluster,
                "label": f"rank {one.rank} · layers {stage.layers[0]}–{stage.layers[1] - 1}",
                "spans": [[printable(x.kind), x.micro_batch, ms(x.start_s), ms(x.end_s)] for x in one.spans],
            }
        )
    lanes.sort(key=lambda lane: plan.clusters.index(str(lane["cluster"])))
    links: dict[str, list[Any]] = {}
    for one_way in messages:
        label = f"{plan.stage_of(one_way.source).cluster} → {plan.stage_of(one_way.target).cluster}"
        start_ms, queued_ms = ms(one_way.start_s), round((one_way.start_s - one_way.sent_s) * 1e3, 3)
        links.setdefault(label, []).append(
            [printable(one_way.kind), one_way.micro_batch, start_ms, ms(one_way.end_s), max(queued_ms, 0.0)]
        )
    wan = [{"label": label, "spans": spans} for label, spans in links.items()]
    expected = bool(wan_links(plan))
    return {"step": step, "length_ms": ms(end_s), "lanes": lanes, "links": wan, "has_links": expected}
