"""`timeline_page`: a simulation result as one self-contained HTML page, without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from isthmus.core.text.html_page import fact_list, html_table, page_text, render_page
from isthmus.core.units import format_bytes, format_seconds
from isthmus.sim.output.fold_replicas import FoldedReplica, fold_replicas
from isthmus.sim.output.link_load import link_load
from isthmus.sim.simulation_result import SimulationResult, StageResult, TimelineSpan

_KINDS = {
    "forward": "forward", "backward": "backward", "backward_weight": "backward of weights", "update": "optimizer",
    "exchange": "exposed communication", "all-reduce": "exposed gradient reduction", "bubble": "bubble",
}  # fmt: skip
_WIDTH, _LABEL_WIDTH, _ROW_HEIGHT, _GAP, _LINK_HEIGHT = 1080, 250, 22, 5, 34
_MAX_SPANS = 20_000
_STYLE = """
.timeline svg { display: block; width: 100%; min-width: 720px; }
svg .critical { stroke: var(--ink); stroke-width: 1; }
svg .load { fill: var(--send); opacity: .85; }
svg g:focus-visible .lane { stroke: var(--forward); stroke-width: 2; opacity: 1; } svg g { outline-offset: 1px; }
"""


def timeline_page(run: SimulationResult, title: str) -> str:
    """Return the page: iteration time, the timeline of the stages and links, and tables of both.

    `run` must include details. Replicas that behave the same share their rows. The timeline shows at most the first
    20,000 spans and states if it omits some.
    """
    folded = fold_replicas(run)
    spans = sum(span.end_s > span.start_s for one in folded for span in one.spans)
    note = f" The timeline shows {_MAX_SPANS} of {spans} spans." if spans > _MAX_SPANS else ""
    facts = [
        ("iteration", format_seconds(run.iteration_s)),
        ("replicas", str(sum(len(one.replicas) for one in folded))),
        ("different replicas", str(len(folded))),
    ]
    body = (
        f"<p>Simulated, not measured.</p>{fact_list(facts)}"
        f'<section><h2>Timeline</h2>{_legend()}<div class="scroll timeline" tabindex="0">'
        f"{_timeline(run, folded)}</div>"
        f'<p class="hint">Rows of replicas that behave the same are drawn once. Below them: the share of time in which '
        f"messages between stages occupy each link.{note}</p></section>"
        f"<section><h2>Stages</h2>{_stage_table(run, folded)}</section>"
        f"<section><h2>Links</h2>{_link_table(run)}</section>"
    )
    return render_page(title, "isthmus · simulation", body, style=_STYLE)


def _legend() -> str:
    parts = "".join(f'<span><i class="mark k-{kind}"></i>{page_text(words)}</span>' for kind, words in _KINDS.items())
    return f'<div class="legend">{parts}<span class="aside">outlined: critical path</span></div>'


def _timeline(run: SimulationResult, folded: Sequence[FoldedReplica]) -> str:
    rows = [(one, stage) for one in folded for stage in one.stages]
    loads = link_load(run)
    links_top = len(rows) * (_ROW_HEIGHT + _GAP) + (12 if loads else 0)
    height = links_top + len(loads) * (_LINK_HEIGHT + _GAP) + 24
    scale = (_WIDTH - _LABEL_WIDTH) / max(run.total_s, 1e-12)
    critical = {(s.replica, s.stage, s.end_s) for s in run.critical_path}
    left = _MAX_SPANS
    about = f"Timeline of {len(rows)} rows of stages and {len(loads)} links over {format_seconds(run.total_s)}"
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="group" aria-label="{page_text(about)}; tables follow">']
    for row, (one, stage) in enumerate(rows):
        spans = [span for span in one.spans if span.stage == stage.stage and span.end_s > span.start_s][:left]
        left -= len(spans)
        parts.append(_stage_row(run, one, stage, spans, critical, row * (_ROW_HEIGHT + _GAP), scale))
    for number, (ends, shares) in enumerate(loads.items()):
        parts.append(_link_row(run, ends, shares, links_top + number * (_LINK_HEIGHT + _GAP)))
    return "".join([*parts, _axis(run.total_s, scale, height), "</svg>"])


def _stage_row(
    run: SimulationResult,
    one: FoldedReplica,
    stage: StageResult,
    spans: Sequence[TimelineSpan],
    critical: set[tuple[int, int, float]],
    y: float,
    scale: float,
) -> str:
    """Return the row of one stage, which is announced with its figures when it gets the focus."""
    name = f"{one.label}, stage {stage.stage}, {stage.cluster}"
    figures = f"busy {_share(stage.busy_s, run)}, bubble {_share(stage.bubble_s, run)}, exposed communication "
    figures += f"{_share(stage.exposed_communication_s, run)}, peak memory {format_bytes(stage.peak_memory_bytes)}"
    parts = [_row_start(f"{name}: {figures}", name, y, _ROW_HEIGHT)]
    for span in spans:
        on_path = any((replica, span.stage, span.end_s) in critical for replica in one.replicas)
        kind = "backward" if span.kind == "backward_input" else span.kind
        width = max((span.end_s - span.start_s) * scale, 0.2)
        tooltip = page_text(f"{span.what}: {span.kind}, {format_seconds(span.end_s - span.start_s)}")
        parts.append(
            f'<rect class="k-{kind}{" critical" if on_path else ""}" x="{_LABEL_WIDTH + span.start_s * scale:.2f}" '
            f'y="{y}" width="{width:.2f}" height="{_ROW_HEIGHT}"><title>{tooltip}</title></rect>'
        )
    return "".join([*parts, "</g>"])


def _link_row(run: SimulationResult, ends: tuple[str, str], shares: Sequence[float], y: float) -> str:
    """Return the row of one link: its busy share over time as an area."""
    name = f"{ends[0]} to {ends[1]}"
    mean, most = sum(shares) / len(shares), max(shares)
    at_s = shares.index(most) * run.total_s / len(shares)
    figures = f"busy {mean:.0%} of the time, most at {format_seconds(at_s)} with {most:.0%}"
    step = (_WIDTH - _LABEL_WIDTH) / len(shares)
    points = "".join(
        f"L{_LABEL_WIDTH + i * step:.1f} {y + _LINK_HEIGHT * (1 - share):.1f}H{_LABEL_WIDTH + (i + 1) * step:.1f}"
        for i, share in enumerate(shares)
    )
    base = y + _LINK_HEIGHT
    return (
        f"{_row_start(f'link {name}: {figures}', name, y, _LINK_HEIGHT)}"
        f'<path class="load" d="M{_LABEL_WIDTH} {base}{points}V{base}Z"><title>{page_text(figures)}</title></path></g>'
    )


def _row_start(announced: str, label: str, y: float, height: int) -> str:
    return (
        f'<g tabindex="0" role="img" aria-label="{page_text(announced)}">'
        f'<text x="0" y="{y + height / 2 + 4}">{page_text(label[:40])}</text>'
        f'<path class="lane" d="M{_LABEL_WIDTH} {y}H{_WIDTH}V{y + height}H{_LABEL_WIDTH}Z"/>'
    )


def _axis(total_s: float, scale: float, height: int) -> str:
    if total_s <= 0:
        return ""
    step_s: float = 10 ** math.floor(math.log10(total_s))
    step_s = step_s / 5 if total_s / step_s < 2.5 else step_s
    ticks = [i * step_s for i in range(int(total_s * 0.95 / step_s) + 1)]
    return "".join(
        f'<text x="{_LABEL_WIDTH + tick * scale:.1f}" y="{height - 6}">{page_text(format_seconds(tick))}</text>'
        for tick in ticks
    )


def _stage_table(run: SimulationResult, folded: Sequence[FoldedReplica]) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for one in folded:
            for stage in one.stages:
                times = (stage.busy_s, stage.bubble_s, stage.exposed_communication_s)
                figures = (f"{format_seconds(value)} ({_share(value, run)})" for value in times)
                memory = format_bytes(stage.peak_memory_bytes)
                yield (one.label, str(stage.stage), stage.cluster, *figures, memory)

    columns = ("replicas", "stage", "cluster", "busy", "bubble", "exposed communication", "peak memory")
    return html_table(columns, rows(), numbers=range(3, 7), caption="Per iteration; equal replicas share a row.")


def _share(seconds: float, run: SimulationResult) -> str:
    return f"{seconds / run.iteration_s if run.iteration_s else 0.0:.0%}"


def _link_table(run: SimulationResult) -> str:
    if not run.links:
        return '<p class="none">None.</p>'
    rows = [
        (f"{link.source} to {link.target}", format_bytes(link.num_bytes), f"{link.utilisation:.1%}")
        for link in run.links
    ]
    caption = "Bytes and mean use of the capacity, gradient reduction included."
    return html_table(("link", "bytes per iteration", "utilisation"), rows, numbers=(1, 2), caption=caption)
