"""Output of `watch`: a live page, a line, or a JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isthmus.cli.figures import Figures, wan_links
from isthmus.cli.terminal.charts import bar, curve
from isthmus.core.messages.api_views import JobView, PoolView
from isthmus.core.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

RECENT_STEPS = 10
"""Rates and time breakdowns are means over this many latest steps."""


def as_record(view: JobView, figures: Figures) -> dict[str, Any]:
    """Return the current state of a job as a JSON object for `isthmus watch --json`."""
    plan, ranks = view.plan, figures.ranks
    shares = {rank: figures.share(rank, last_steps=RECENT_STEPS) for rank in ranks}
    traffic = figures.link_mbps(plan, last_steps=RECENT_STEPS) if plan else {}
    return {
        "job": view.id,
        "name": view.name,
        "state": view.state,
        "reason": view.reason,
        "attempt": view.attempt,
        "step": figures.steps[-1] if figures.steps else None,
        "steps_done": figures.done(view.job.training.steps),
        "steps": view.job.training.steps,
        "loss": figures.last("loss"),
        "validation_loss": figures.last("validation_loss"),
        "tokens_per_s": figures.last("tokens_per_s"),
        "eta_s": figures.eta_s(view.job.training.steps),
        "stages": [
            {
                "rank": rank,
                "cluster": plan.stage_of(rank).cluster if plan and rank < len(plan.ranks) else None,
                "compute_s": share.compute_s,
                "exposed_communication_s": share.exposed_communication_s,
                "idle_s": share.idle_s,
            }
            for rank, share in shares.items()
            if share is not None
        ],
        "links": [{"from": a, "to": b, "mbps": rate} for (a, b), rate in traffic.items()],
    }


def as_line(view: JobView, figures: Figures) -> str:
    """Return the current state of a job as one line of text."""
    if not figures.steps or view.state != "running":
        state = f"{view.state}: {view.reason}" if view.reason else view.state
        return f"{view.id}  {state}{_next_step(view)}"
    loss, rate = figures.last("loss"), figures.last("tokens_per_s")
    eta_s = figures.eta_s(view.job.training.steps)
    pieces = [
        f"{view.id}  running",
        f"step {figures.done(view.job.training.steps)}/{view.job.training.steps}",
    ]
    pieces += [f"loss {loss:.4f}"] if loss is not None else []
    pieces += [f"{rate:,.0f} tokens/s"] if rate is not None else []
    pieces += [f"{format_seconds(eta_s)} left"] if eta_s is not None else []
    return "  ".join(pieces)


def dashboard(
    view: JobView, figures: Figures, pool: PoolView | None = None, *, away: bool = False
) -> RenderableType:
    """Return the live page: state and progress, loss curve, stages, links."""
    from rich.console import Group
    from rich.text import Text

    blocks: list[RenderableType] = [_headline(view, figures, away=away)]
    losses = [value for _, value in figures.series("loss")]
    if losses:
        blocks.append(Text("\n".join(["", "loss", *curve(losses, width=64, height=6)]), style="cyan"))
    if view.plan is not None:
        blocks += [Text(""), _stages(view, figures)]
        if wan_links(view.plan):
            blocks += [Text(""), _links(view, figures, pool)]
    return Group(*blocks)


def _headline(view: JobView, figures: Figures, *, away: bool) -> RenderableType:
    from rich.text import Text

    from isthmus.cli.terminal.tables import state_text

    text = Text.assemble((f"{view.name} ", "bold"), (view.id, "dim"), "  ", state_text(view.state))
    text.append(f"  {view.reason}" if view.reason else "")
    text.append(_next_step(view), style="bold")
    text.append(f"  restarts: {view.restarts}" if view.restarts else "", style="yellow")
    text.append("  server unreachable, retrying" if away else "", style="red")
    if not figures.steps:
        return text
    steps = view.job.training.steps
    done = figures.done(steps)
    text.append("\n" + bar((done, steps - done), "━─", 40) + f" {done}/{steps}")
    eta_s, loss = figures.eta_s(steps), figures.last("loss")
    rate, held_out = figures.last("tokens_per_s"), figures.last("validation_loss")
    text.append(f"  {format_seconds(eta_s)} left" if eta_s and view.state == "running" else "")
    text.append(f"  loss {loss:.4f}" if loss is not None else "")
    text.append(f"  validation loss {held_out:.4f}" if held_out is not None else "")
    text.append(f"  {rate:,.0f} tokens/s" if rate is not None else "")
    return text


def _next_step(view: JobView) -> str:
    if view.state == "choosing" and view.job.policy == "manual":
        return f"  (choose a plan: isthmus plans {view.id}, then isthmus choose {view.id} PLAN)"
    return ""


def _stages(view: JobView, figures: Figures) -> RenderableType:
    from isthmus.cli.terminal.tables import table

    rows = []
    states = {rank: part.observed for part in view.parts for rank in part.ranks}
    plan = view.plan
    for rank, stage in enumerate(plan.stage_of(rank) for rank in range(len(plan.ranks))) if plan else ():
        share = figures.share(rank, last_steps=RECENT_STEPS)
        cells: tuple[str, ...] = ("", "", "", "")
        if share is not None:
            parts = (share.compute_s, share.exposed_communication_s, share.idle_s)
            percent = [100 * part / share.total_s if share.total_s else 0.0 for part in parts]
            cells = (*(f"{value:.0f} %" for value in percent), bar(parts, "█▒·", 18))
        layers = f"{stage.layers[0]}-{stage.layers[1] - 1}"
        rows.append((str(rank), stage.cluster, stage.node_group, layers, states.get(rank, ""), *cells))
    columns = (
        "rank",
        "cluster",
        "chips",
        "layers",
        "part",
        "compute",
        "exposed comm.",
        "idle",
        "share of step",
    )
    return table("Stages", columns, rows, "rank|compute|exposed comm.|idle")


def _links(view: JobView, figures: Figures, pool: PoolView | None) -> RenderableType:
    from isthmus.cli.terminal.tables import table

    rows = []
    capacity = {
        (link.source, link.target): link.bandwidth_gbps * 1e3 for link in (pool.links if pool else ())
    }
    for link, rate in (figures.link_mbps(view.plan, last_steps=RECENT_STEPS) if view.plan else {}).items():
        link_mbps = capacity.get(link)
        share = bar((rate, max(0.0, link_mbps - rate)), "█·", 24) if link_mbps else ""
        rows.append((f"{link[0]} > {link[1]}", f"{rate:.1f}", f"{link_mbps:g}" if link_mbps else "?", share))
    return table("Links", ("link", "Mbit/s", "of", "used"), rows, "Mbit/s|of")
