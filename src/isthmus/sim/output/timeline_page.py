"""`timeline_page`: a simulation result as one self-contained HTML page, without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from isthmus.core.units import format_bytes, format_seconds
from isthmus.sim.simulation_result import SimulationResult, TimelineSpan

_COLOURS = {
    "forward": "#4c78a8", "backward": "#54a24b", "backward_input": "#54a24b", "backward_weight": "#9fd18b",
    "update": "#b279a2", "exchange": "#e45756", "all-reduce": "#f58518", "bubble": "#e8e8e8",
}  # fmt: skip
_WIDTH, _LABEL_WIDTH, _ROW_HEIGHT, _GAP = 1200, 170, 22, 4
_MAX_SPANS = 20_000

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1240px; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid
#ddd; } td:first-child, th:first-child { text-align: left; } svg text { font: 11px system-ui, sans-serif; }
.key span { display: inline-block; padding: 0 .6em; margin-right: .5em; border-radius: 3px; }
"""


def timeline_page(run: SimulationResult, title: str) -> str:
    """Return the page: iteration time, the timeline of the stages, and tables of stages and links.

    `run` must include details. The timeline shows at most the first 20,000 spans and states if it omits some.
    """
    shown = [span for span in run.spans if span.end_s > span.start_s]
    note = ""
    if len(shown) > _MAX_SPANS:
        note = f"<p>The timeline shows {_MAX_SPANS} of {len(shown)} spans.</p>"
        shown = shown[:_MAX_SPANS]
    name = escape(title)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1>"
        f"<p>An iteration takes <b>{format_seconds(run.iteration_s)}</b>. Simulated, not measured.</p>"
        f"{_legend()}{_timeline(run, shown)}{note}<h2>Stages</h2>{_stage_table(run)}"
        f"<h2>Links</h2>{_link_table(run)}</body></html>"
    )


def _legend() -> str:
    kinds = [kind for kind in _COLOURS if kind != "backward_input"]
    parts = "".join(f'<span style="background:{_COLOURS[kind]}">{escape(kind)}</span>' for kind in kinds)
    return f'<p class="key">{parts} black outline: critical path</p>'


def _timeline(run: SimulationResult, spans: list[TimelineSpan]) -> str:
    rows = {key: row for row, key in enumerate(sorted({(s.replica, s.stage) for s in spans}))}
    clusters = {(stage.replica, stage.stage): stage.cluster for stage in run.stages}
    height = (len(rows) + 1) * (_ROW_HEIGHT + _GAP)
    scale = (_WIDTH - _LABEL_WIDTH) / max(run.total_s, 1e-12)
    critical = {(s.replica, s.stage, s.end_s) for s in run.critical_path}
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" role="img" aria-label="timeline">']
    for (replica, stage), row in rows.items():
        label = escape(f"{replica}/{stage} {clusters.get((replica, stage), '')}")
        parts.append(f'<text x="0" y="{row * (_ROW_HEIGHT + _GAP) + 15}">{label}</text>')
    for span in spans:
        x, y = _LABEL_WIDTH + span.start_s * scale, rows[span.replica, span.stage] * (_ROW_HEIGHT + _GAP)
        width = max((span.end_s - span.start_s) * scale, 0.2)
        on_path = (span.replica, span.stage, span.end_s) in critical
        edge = ' stroke="#000" stroke-width="1"' if on_path else ""
        tooltip = escape(f"{span.what}: {span.kind}, {format_seconds(span.end_s - span.start_s)}")
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW_HEIGHT}" '
            f'fill="{_COLOURS[span.kind]}"{edge}><title>{tooltip}</title></rect>'
        )
    return "".join([*parts, _axis(run.total_s, scale, height), "</svg>"])


def _axis(total_s: float, scale: float, height: int) -> str:
    if total_s <= 0:
        return ""
    step_s: float = 10 ** math.floor(math.log10(total_s))
    step_s = step_s / 5 if total_s / step_s < 2.5 else step_s
    ticks = [i * step_s for i in range(int(total_s / step_s) + 1)]
    return "".join(
        f'<text x="{_LABEL_WIDTH + tick * scale:.1f}" y="{height - 8}">{escape(format_seconds(tick))}</text>'
        for tick in ticks
    )


def _stage_table(run: SimulationResult) -> str:
    head = ("replica/stage", "cluster", "busy", "bubble", "exposed communication", "peak memory")
    rows = [
        (f"{s.replica}/{s.stage}", s.cluster, *(_seconds_and_share(x, run) for x in
         (s.busy_s, s.bubble_s, s.exposed_communication_s)), format_bytes(s.peak_memory_bytes))
        for s in run.stages
    ]  # fmt: skip
    return _table(head, rows)


def _seconds_and_share(seconds: float, run: SimulationResult) -> str:
    share = seconds / run.iteration_s if run.iteration_s else 0.0
    return f"{format_seconds(seconds)} ({share:.0%})"


def _link_table(run: SimulationResult) -> str:
    if not run.links:
        return "<p>None.</p>"
    rows = [
        (f"{link.source} to {link.target}", format_bytes(link.num_bytes), f"{link.utilisation:.1%}")
        for link in run.links
    ]
    return _table(("link", "bytes per iteration", "utilisation"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(tag: str, cells: tuple[str, ...]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"
