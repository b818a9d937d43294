"""`python -m scripts.pictures`: draw the pictures of `docs/guide/simulate.md` by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus.core.files.user_files import load_plan, load_pool
from isthmus.core.model import load_model
from isthmus.plan import PlanForecast, predict

GUIDE = Path(__file__).parent.parent / "docs" / "guide"
EXAMPLE = GUIDE / "example"
SCHEDULES = {"1f1b": "#e45756", "overlapped": "#4c78a8"}
DELAYS_MS = (0, 2, 5, 10, 20, 40, 60, 80, 100)
COLOURS = {
    "forward": "#4c78a8", "backward": "#54a24b", "update": "#b279a2", "exchange": "#e45756",
    "bubble": "#eeeeee",
}  # fmt: skip


def forecast(schedule: str, round_trip_ms: float, *, details: bool = False) -> PlanForecast:
    """Return what the example takes under a schedule at a round trip."""
    plan, pool = load_plan(EXAMPLE / "plan.yaml"), load_pool(EXAMPLE / "pool.yaml")
    links = tuple(link.model_copy(update={"delay_ms": round_trip_ms / 2}) for link in pool.links)
    return predict(
        plan.model_copy(update={"schedule": schedule}),
        pool.model_copy(update={"links": links}),
        load_model(EXAMPLE / "config.json"),
        details=details,
    )


def curve() -> str:
    """Return the iteration by round trip, a line for each schedule."""
    lines = {name: [forecast(name, ms).iteration_s for ms in DELAYS_MS] for name in SCHEDULES}
    top = 7.0
    parts = [_head(720, 330), '<text x="10" y="18">seconds an iteration</text>']
    for tick in range(0, int(top) + 1, 1):
        y = _y(tick, top)
        parts.append(f'<line x1="50" x2="600" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="30" y="{y + 4:.1f}">{tick}</text>')
    for ms in DELAYS_MS[::2]:
        parts.append(f'<text x="{_x(ms) - 6:.1f}" y="300">{ms}</text>')
    parts.append('<text x="240" y="322">round trip, milliseconds</text>')
    for name, colour in SCHEDULES.items():
        points = " ".join(f"{_x(ms):.1f},{_y(s, top):.1f}" for ms, s in zip(DELAYS_MS, lines[name], strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(f'<text x="606" y="{_y(lines[name][-1], top) + 4:.1f}" fill="{colour}">{name}</text>')
    return "".join([*parts, "</svg>\n"])


def _x(ms: float) -> float:
    return 50 + 5.5 * ms


def _y(seconds: float, top: float) -> float:
    return 280 - 250 * seconds / top


def timeline(schedule: str, round_trip_ms: float) -> str:
    """Return the stages' time line of one iteration."""
    run = forecast(schedule, round_trip_ms, details=True).result
    rows = len({span.stage for span in run.spans})
    scale = 880 / 6.0  # six seconds on every picture, so that they compare
    parts = [_head(980, rows * 22 + 40)]
    for span in run.spans:
        x, width = 90 + span.start_s * scale, (span.end_s - span.start_s) * scale
        if width > 0.02 and span.kind in COLOURS:
            parts.append(
                f'<rect x="{x:.2f}" y="{span.stage * 22}" width="{width:.2f}" height="18" '
                f'fill="{COLOURS[span.kind]}" stroke="#fff" stroke-width="0.3"/>'
            )
    for stage in run.stages:
        parts.append(f'<text x="0" y="{stage.stage * 22 + 13}">{stage.stage} {stage.cluster}</text>')
    return "".join([*parts, _key(rows * 22 + 22), "</svg>\n"])


def _key(y: int) -> str:
    return "".join(
        f'<rect x="{90 + 130 * i}" y="{y - 11}" width="14" height="14" fill="{colour}" stroke="#bbb"/>'
        f'<text x="{110 + 130 * i}" y="{y}">{"waiting for the WAN" if kind == "exchange" else kind}</text>'
        for i, (kind, colour) in enumerate(COLOURS.items())
    )


def _head(width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12">'
    )


def main(names: Sequence[str] = tuple(SCHEDULES)) -> None:
    """Write every picture."""
    pictures = {"delay.svg": curve()} | {f"timeline-{name}.svg": timeline(name, 20) for name in names}
    for name, text in pictures.items():
        (GUIDE / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/guide/{name} ({len(text) // 1024} KiB)")


if __name__ == "__main__":
    main()
