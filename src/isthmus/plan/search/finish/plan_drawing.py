"""`draw_plan`: an SVG drawing of a plan: a row of boxes per kind of replica, coloured by cluster."""

from __future__ import annotations

from html import escape

from isthmus.core.plan import Plan, Stage

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#bbbbbb")
BOX, HEIGHT, GAP, LEFT, TOP = 96, 58, 26, 12, 34


def draw_plan(plan: Plan) -> str:
    """Return the SVG drawing of a plan: equal replicas once, links between clusters as dashed red lines."""
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(plan.clusters)}
    kinds: dict[tuple[object, ...], list[int]] = {}
    for replica in range(plan.dp):
        stages = (stage.model_copy(update={"replica": 0}) for stage in plan.pipeline(replica))
        key = (plan.micro_batch_size_of(replica), *stages)
        kinds.setdefault(key, []).append(replica)
    parts, width, y = [], 0, TOP
    for replicas in kinds.values():
        counts = sorted({plan.micro_batches_of(replica) for replica in replicas}, reverse=True)
        counts_text = " or ".join(map(str, counts))
        parts.append(
            f'<text x="{LEFT}" y="{y - 8}" class="head">{len(replicas)} x, {counts_text} micro-batches of '
            f"{plan.micro_batch_size_of(replicas[0])}, {escape(plan.schedule)}</text>"
        )
        x, before = LEFT, ""
        for stage in plan.pipeline(replicas[0]):
            if before:
                parts.append(_arrow(x, y, before != stage.cluster))
                x += GAP
            parts.append(_box(stage, x, y, colours[stage.cluster]))
            x, before = x + BOX, stage.cluster
        width, y = max(width, x), y + HEIGHT + 44
    style = (
        "<style>text{font:11px sans-serif}.head{font-weight:bold}.on{fill:#fff}</style>"
        '<rect width="100%" height="100%" fill="#fff"/>'
    )
    size = f'width="{width + LEFT}" height="{y - 16}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(parts)}</svg>\n'


def _box(stage: Stage, x: int, y: int, colour: str) -> str:
    cut = f"tp {stage.tp}" + (f" cp {stage.cp}" if stage.cp > 1 else "")
    cut += f" ep {stage.ep}" if stage.ep > 1 else ""
    recomputed = 0 if stage.recompute == "none" else stage.recompute_layers or stage.num_layers
    lines = (
        stage.cluster[:15],
        f"layers {stage.layers[0]}-{stage.layers[1] - 1}",
        cut,
        f"{recomputed} recomputed" if recomputed else "",
    )
    words = "".join(
        f'<text x="{x + 6}" y="{y + 14 + 13 * i}" class="on">{escape(line)}</text>' for i, line in enumerate(lines)
    )
    return f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="4" fill="{colour}"/>{words}'


def _arrow(x: int, y: int, crosses: bool) -> str:
    middle = y + HEIGHT // 2
    dash = ' stroke-dasharray="4 3"' if crosses else ""
    colour = "#cc3311" if crosses else "#777777"
    return (
        f'<line x1="{x + 3}" y1="{middle}" x2="{x + GAP - 3}" y2="{middle}" stroke="{colour}" stroke-width="2"{dash}/>'
    )
