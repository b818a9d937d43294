"""`draw_plan` and `plan_page`: a plan as an SVG drawing, and as a self-contained HTML page with tables.

A row of boxes per kind of replica: chips and their rate, layers, time and memory of each stage, and the rate of each
hop between clusters beside the link's capacity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Pool
from isthmus.core.text.html_page import fact_list, html_table, page_style, page_text, render_page
from isthmus.core.units import format_bytes, format_seconds
from isthmus.plan.time.predict import PlanForecast
from isthmus.sim import StageResult

_BOX, _HEIGHT, _GAP, _LEFT, _TOP = 216, 126, 122, 2, 30
_STYLE = """
svg.plan { display: block; font: 12px system-ui, sans-serif; }
svg.plan .box { fill: var(--card); stroke: var(--line); stroke-width: 1.5; } svg.plan .name { font-weight: 600; }
svg.plan text { fill: var(--ink); } svg.plan .soft { fill: var(--soft); }
svg.plan .hop { stroke: var(--held); stroke-width: 2; stroke-dasharray: 4 3; }
svg.plan .near { stroke: var(--soft); stroke-width: 2; }
svg.plan .room { fill: var(--idle); } svg.plan .used { fill: var(--forward); } svg.plan .full { fill: var(--bad); }
"""
_MARKS = ("var(--forward)", "var(--backward)", "var(--update)", "var(--send)", "var(--receive)", "var(--rest)")


def draw_plan(plan: Plan, pool: Pool, forecast: PlanForecast) -> str:
    """Return the SVG drawing of a plan for light and dark backgrounds: equal replicas once."""
    return _svg(plan, pool, forecast, f"{page_style()}{_STYLE}svg.plan {{ background: var(--card); }}") + "\n"


def plan_page(plan: Plan, pool: Pool, forecast: PlanForecast, sentences: Sequence[str]) -> str:
    """Return a page with the drawing, what it means, and the figures as tables; it loads nothing."""
    facts = [
        ("iteration", format_seconds(forecast.iteration_s)),
        ("tokens per second", f"{forecast.tokens / forecast.iteration_s:,.0f}" if forecast.iteration_s else "-"),
        ("schedule", plan.schedule),
        ("replicas", str(plan.dp)),
        ("clusters", ", ".join(plan.clusters)),
    ]
    told = "".join(f"<li>{page_text(one)}</li>" for one in sentences)
    body = (
        f"<p>Predicted, not measured.</p>{fact_list(facts)}"
        '<section><h2>Stages and links</h2><div class="scroll" tabindex="0">'
        f"{_svg(plan, pool, forecast)}</div></section>"
        f"<section><h2>What it means</h2><ul>{told}</ul></section>"
        f"<section><h2>Stages</h2>{_stage_table(plan, pool, forecast)}</section>"
        f"<section><h2>Links</h2>{_link_table(pool, forecast)}</section>"
    )
    return render_page(f"Plan {plan.id}", "isthmus · plan", body, style=_STYLE)


def _svg(plan: Plan, pool: Pool, forecast: PlanForecast, style: str = "") -> str:
    parts, width, y = [], 0, _TOP
    marks = {name: _MARKS[i % len(_MARKS)] for i, name in enumerate(plan.clusters)}
    rates = _link_gbps(forecast)
    for replicas, counts in _equal_replicas(plan):
        first = replicas[0]
        equal = f"{len(replicas)} equal replicas" if len(replicas) > 1 else f"replica {first}"
        head = f"{equal}: {counts} micro-batches of {plan.micro_batch_size_of(first)}, {plan.schedule}"
        parts.append(f'<text x="{_LEFT}" y="{y - 10}" class="name">{page_text(head)}</text>')
        x, before = _LEFT, ""
        for stage, found in zip(plan.pipeline(first), _results(forecast, first), strict=True):
            if before:
                parts.append(_hop(before, stage.cluster, pool, rates, x, y))
                x += _GAP
            parts.append(_box(_stage_lines(plan, pool, stage, found, forecast), pool, stage, found, x, y, marks))
            x, before = x + _BOX, stage.cluster
        width, y = max(width, x), y + _HEIGHT + 46
    size = f'width="{width + 4}" height="{y - 34}" viewBox="0 0 {width + 4} {y - 34}"'
    about = f"Plan {plan.id}: {plan.dp} replicas on {', '.join(plan.clusters)}"
    sheet = f"<style>{style}</style>" if style else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" {size} role="group" aria-label="{page_text(about)}">'
        f"{sheet}<title>{page_text(about)}</title>{''.join(parts)}</svg>"
    )


def _equal_replicas(plan: Plan) -> Iterator[tuple[list[int], str]]:
    """Yield the replicas with equal stages and micro-batch size, and their numbers of micro-batches as text."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for replica in range(plan.dp):
        stages = (stage.model_copy(update={"replica": 0}) for stage in plan.pipeline(replica))
        kinds.setdefault((plan.micro_batch_size_of(replica), *stages), []).append(replica)
    for replicas in kinds.values():
        counts = sorted({plan.micro_batches_of(replica) for replica in replicas}, reverse=True)
        yield replicas, " or ".join(map(str, counts))


def _results(forecast: PlanForecast, replica: int) -> list[StageResult]:
    return [one for one in forecast.result.stages if one.replica == replica]


def _link_gbps(forecast: PlanForecast) -> dict[tuple[str, str], float]:
    """Return the mean rate over each link in an iteration, in 1e9 bit/s."""
    step_s = max(forecast.iteration_s, 1e-12)
    return {(one.source, one.target): one.num_bytes * 8e-9 / step_s for one in forecast.result.links}


def _chip_text(pool: Pool, stage: Stage) -> str:
    group = pool.node_group(stage.cluster, stage.node_group)
    return f"{stage.num_chips} x {group.chip}" + (" (virtual)" if group.virtual else "")


def _chip_rate(pool: Pool, stage: Stage) -> str:
    """Return the peak rate of one chip of a stage as text."""
    rate = pool.chip(pool.node_group(stage.cluster, stage.node_group)).flop_per_s("bf16") / 1e12
    return f"{rate:,.4g} TFLOP/s each"


def _degrees_text(stage: Stage) -> str:
    degrees = {"tp": stage.tp, "cp": stage.cp, "ep": stage.ep}
    return " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name == "tp")


def _memory_bytes(pool: Pool, stage: Stage) -> int:
    return pool.chip(pool.node_group(stage.cluster, stage.node_group)).memory_bytes


def _stage_lines(plan: Plan, pool: Pool, stage: Stage, found: StageResult, forecast: PlanForecast) -> list[str]:
    """Return the lines of text of a stage's box; the first is the cluster."""
    recomputed = 0 if stage.recompute == "none" else stage.recompute_layers or stage.num_layers
    layers = f"layers {stage.layers[0]}-{stage.layers[1] - 1}, {_degrees_text(stage)}"
    per_batch_s = found.busy_s / max(plan.micro_batches_of(found.replica), 1)
    busy = found.busy_s / forecast.iteration_s if forecast.iteration_s else 0.0
    return [
        stage.cluster,
        _chip_text(pool, stage),
        _chip_rate(pool, stage),
        layers + (f", {recomputed} recomputed" if recomputed else ""),
        f"{format_seconds(per_batch_s)} per micro-batch",
        f"busy {busy:.0%} of the step",
        f"memory {format_bytes(found.peak_memory_bytes)} of {format_bytes(_memory_bytes(pool, stage))}",
    ]


def _box(
    lines: Sequence[str], pool: Pool, stage: Stage, found: StageResult, x: int, y: int, marks: dict[str, str]
) -> str:
    """Return the box of a stage, which is announced with all its lines when it gets the focus."""
    words = "".join(
        f'<text x="{x + 14}" y="{y + 18 + 15 * i}" class="{"name" if i == 0 else "soft"}">{page_text(line[:34])}</text>'
        for i, line in enumerate(lines)
    )
    share = found.peak_memory_bytes / max(_memory_bytes(pool, stage), 1)
    used = max(2.0, min(share, 1.0) * (_BOX - 28))
    bar_y = y + _HEIGHT - 12
    return (
        f'<g tabindex="0" role="img" aria-label="{page_text("; ".join(lines))}">'
        f"<title>{page_text('; '.join(lines))}</title>"
        f'<rect class="box" x="{x}" y="{y}" width="{_BOX}" height="{_HEIGHT}" rx="8"/>'
        f'<rect x="{x}" y="{y + 8}" width="4" height="{_HEIGHT - 16}" rx="2" style="fill: {marks[stage.cluster]}"/>'
        f'{words}<rect class="room" x="{x + 14}" y="{bar_y}" width="{_BOX - 28}" height="5" rx="2"/>'
        f'<rect class="{"full" if share > 1 else "used"}" x="{x + 14}" y="{bar_y}" width="{used:.1f}" height="5"/></g>'
    )


def _hop(before: str, after: str, pool: Pool, rates: dict[tuple[str, str], float], x: int, y: int) -> str:
    """Return the line between two stages; between clusters with its rate, capacity and delay."""
    middle = y + _HEIGHT // 2
    if before == after:
        return f'<line class="near" x1="{x + 6}" y1="{middle}" x2="{x + _GAP - 6}" y2="{middle}"/>'
    link = pool.link(before, after)
    rate = f"{rates.get((before, after), 0.0):.3g}" + (f" of {link.bandwidth_gbps:g}" if link else "") + " Gbit/s"
    delay = f"{link.delay_ms:g} ms" if link else "no link"
    centre = x + _GAP // 2
    return (
        f'<g tabindex="0" role="img" aria-label="{page_text(f"link {before} to {after}: {rate}, {delay} one way")}">'
        f'<line class="hop" x1="{x + 6}" y1="{middle}" x2="{x + _GAP - 6}" y2="{middle}"/>'
        f'<text class="soft" x="{centre}" y="{middle - 8}" text-anchor="middle">{page_text(rate)}</text>'
        f'<text class="soft" x="{centre}" y="{middle + 18}" text-anchor="middle">{page_text(delay)}</text></g>'
    )


def _stage_table(plan: Plan, pool: Pool, forecast: PlanForecast) -> str:
    rows = []
    for replicas, _ in _equal_replicas(plan):
        for stage, found in zip(plan.pipeline(replicas[0]), _results(forecast, replicas[0]), strict=True):
            lines = _stage_lines(plan, pool, stage, found, forecast)
            rows.append((", ".join(map(str, replicas)), *lines))
    columns = ("replicas", "cluster", "chips", "peak rate (bf16)", "layers", "time", "busy", "memory per chip")
    return html_table(columns, rows, caption="Equal replicas share a row.")


def _link_table(pool: Pool, forecast: PlanForecast) -> str:
    rows = []
    for (source, target), gbps in _link_gbps(forecast).items():
        link = pool.link(source, target)
        capacity = f"{link.bandwidth_gbps:g}" if link else "-"
        delay = f"{link.delay_ms:g} ms" if link else "-"
        rows.append((f"{source} to {target}", f"{gbps:.3g}", capacity, delay))
    if not rows:
        return '<p class="none">The plan uses no wide-area links.</p>'
    return html_table(("link", "Gbit/s, mean", "capacity", "delay, one way"), rows, numbers=(1, 2, 3))
