"""`write_report`: a job report as one self-contained HTML page; its script draws the charts."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from isthmus.cli.figures import Figures, Series, predicted_tokens_per_s, thin
from isthmus.cli.job_report import sections
from isthmus.cli.job_report.stage_trace import trace_events, transfers
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.messages.api_views import JobView, PoolView
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.plan import Plan

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
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the report of job `view` to `path` atomically.

    `pool` adds virtual chips, owners and link capacities to the page. `extra` adds (label, value) lines to
    the measurements. Raises `UnavailableError` if the file cannot be written.
    """
    page = render_report(view, metrics, pool, extra=extra)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise UnavailableError(f"cannot write the report {path}: {error.strerror or error}") from error


def render_report(
    view: JobView,
    metrics: Sequence[StepMetrics],
    pool: PoolView | None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Return the page as HTML; see `write_report`."""
    figures = Figures(metrics)
    parts = {
        "title": html.escape(f"{view.name} · Isthmus report"),
        "css": _asset("report.css"),
        "header": sections.header(view, figures, pool),
        "tiles": sections.tiles(view, figures),
        "stages": sections.stages(view, figures, pool),
        "links": sections.links(view, figures, pool),
        "plan": sections.plan(view, figures, extra or {}),
        "refused": sections.refused(view),
        "settings": sections.settings(view),
        "data": _script_json(_data(view, figures)),
        "js": _asset("report.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark.group(1)], _asset("report.html"))


def _asset(name: str) -> str:
    return resources.files("isthmus.cli.job_report").joinpath("assets", name).read_text(encoding="utf-8")


def _script_json(data: Any) -> str:
    """Return `data` as JSON that cannot close the surrounding script element, whatever names it contains."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(view: JobView, figures: Figures) -> dict[str, Any]:
    plan = view.plan
    return {
        "loss": _finite(figures.series("loss")),
        "validation": _finite(figures.series("validation_loss")),
        "throughput": _finite(figures.series("tokens_per_s")),
        "predicted_throughput": predicted_tokens_per_s(plan) if plan else None,
        "timelines": _timelines(figures, plan) if plan else [],
    }


def _finite(series: Series) -> Series:
    return [(step, float(f"{value:.6g}")) for step, value in thin(series, MAX_POINTS)]


def _timelines(figures: Figures, plan: Plan) -> list[dict[str, Any]]:
    traced = [step for step in figures.steps if any(one.spans for one in figures.of_step(step))]
    chosen = [int(step) for step, _ in thin([(step, 0.0) for step in traced], MAX_TIMELINES)]
    return [_timeline(step, figures.of_step(step), plan) for step in chosen]


def _timeline(step: int, metrics: Sequence[StepMetrics], plan: Plan) -> dict[str, Any]:
    """Return one step for the page: spans per rank and transfers per link, in ms from its first span."""
    spans = [span for one in metrics for span in one.spans]
    zero_s, end_s = min(span.start_s for span in spans), max(span.end_s for span in spans)

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
                "spans": [[x.kind, x.micro_batch, ms(x.start_s), ms(x.end_s)] for x in one.spans],
            }
        )
    lanes.sort(key=lambda lane: plan.clusters.index(str(lane["cluster"])))
    links: dict[str, list[Any]] = {}
    for one_way in transfers(metrics, plan):
        label = f"{plan.stage_of(one_way.source).cluster} → {plan.stage_of(one_way.target).cluster}"
        links.setdefault(label, []).append(
            [one_way.kind, one_way.micro_batch, ms(one_way.start_s), ms(one_way.end_s)]
        )
    wan = [{"label": label, "spans": spans} for label, spans in links.items()]
    return {"step": step, "length_ms": ms(end_s), "lanes": lanes, "links": wan}
