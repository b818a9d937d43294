"""Output of `watch`: a live page, a line, or a JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from isthmus.cli.history_text import event_line, perplexity, restarts_text
from isthmus.cli.job_statistics import JobStatistics, wan_links
from isthmus.cli.rollout_measures import latest_measures, measures_text, rollout_sites
from isthmus.cli.terminal.charts import area_chart, stacked_bar
from isthmus.core.runs.job_id import short_job_id
from isthmus.core.text.printable import printable
from isthmus.core.units import format_seconds
from isthmus.core.views.api_views import HistoryEvent, JobView, PoolView

if TYPE_CHECKING:
    from rich.console import RenderableType

RECENT_EVENTS = 6
"""Newest events of the history on the live page."""
RECENT_STEPS = 10
"""Rates and time breakdowns are means over this many latest steps."""


def status_record(view: JobView, stats: JobStatistics, events: Sequence[HistoryEvent] = ()) -> dict[str, Any]:
    """Return the current state of a job, and new events, as a JSON object for `isthmus watch --json`."""
    held_out = stats.latest("validation_loss")
    plan, ranks = view.plan, stats.ranks
    shares = {rank: stats.step_breakdown(rank, last_steps=RECENT_STEPS) for rank in ranks}
    traffic = stats.link_traffic_mbps(plan, last_steps=RECENT_STEPS) if plan else {}
    return {
        "job": view.id,
        "name": view.name,
        "state": view.state,
        "reason": view.reason,
        "attempt": view.attempt,
        "restarts": view.restarts,
        "worker_restarts": view.worker_restarts,
        "events": [event.model_dump(mode="json") for event in events],
        "step": stats.steps[-1] if stats.steps else None,
        "steps_done": stats.num_steps_done(view.job.training.steps),
        "steps": view.job.training.steps,
        "loss": stats.latest("loss"),
        "validation_loss": held_out,
        "perplexity": perplexity(held_out),
        "tokens_per_s": stats.latest("tokens_per_s"),
        "eta_s": stats.eta_s(view.job.training.steps),
        "stages": [
            {
                "rank": rank,
                "cluster": plan.stage_of(rank).cluster if plan and rank < len(plan.ranks) else None,
                "compute_s": share.compute_s,
                "exposed_communication_s": share.exposed_communication_s,
                "idle_s": share.idle_s,
            }
            for rank, share in shares.items()
            if share is not None and (plan is None or rank < len(plan.ranks))
        ],
        "samples": latest_measures(stats),
        "rollouts": [asdict(one) for one in rollout_sites(plan, stats, RECENT_STEPS)],
        "links": [{"from": a, "to": b, "mbps": rate} for (a, b), rate in traffic.items()],
    }


def status_line(view: JobView, stats: JobStatistics) -> str:
    """Return the current state of a job as one line of text."""
    if not stats.steps or view.state != "running":
        state = f"{view.state}: {printable(view.reason)}" if view.reason else view.state
        return f"{short_job_id(view.id)}  {state}{_next_step(view)}"
    eta_s = stats.eta_s(view.job.training.steps)
    left = f"  {format_seconds(eta_s)} left" if eta_s is not None else ""
    return f"{short_job_id(view.id)}  running  {newest_measures(view, stats)}{left}"


def newest_measures(view: JobView, stats: JobStatistics) -> str:
    """Return the newest step of a job and what was measured in it, as text."""
    loss, rate, reward = (stats.latest(name) for name in ("loss", "tokens_per_s", "reward"))
    pieces = [f"step {stats.num_steps_done(view.job.training.steps)}/{view.job.training.steps}"]
    pieces += [f"reward {reward:.3f}"] if reward is not None else []
    pieces += [f"loss {loss:.4f}"] if loss is not None else []
    pieces += [f"{rate:,.0f} tokens/s"] if rate is not None else []
    return "  ".join(pieces)


def dashboard(
    view: JobView,
    stats: JobStatistics,
    pool: PoolView | None = None,
    history: Sequence[HistoryEvent] = (),
    *,
    server_down: bool = False,
) -> RenderableType:
    """Return the live page: state and progress, loss curve, stages, links, newest events."""
    from rich.console import Group
    from rich.text import Text

    blocks: list[RenderableType] = [_headline(view, stats, server_down=server_down)]
    rewards = [value for _, value in stats.series("reward")]
    losses = [value for _, value in stats.series("loss")]
    if rewards:
        told = "  ".join(f"{name} {value}" for name, value in measures_text(stats).items())
        blocks += [Text("\n".join(["", "reward", *area_chart(rewards, width=64, height=6)]), style="cyan"), Text(told)]
    elif losses:
        blocks.append(Text("\n".join(["", "loss", *area_chart(losses, width=64, height=6)]), style="cyan"))
    if view.plan is not None:
        blocks += [Text(""), _stages_table(view, stats)]
        if view.plan.rollouts:
            blocks += [Text(""), _rollouts_table(view, stats)]
        if wan_links(view.plan):
            blocks += [Text(""), _links_table(view, stats, pool)]
    if history:
        blocks += [Text(""), *(Text(event_line(event), style="dim") for event in history[-RECENT_EVENTS:])]
    return Group(*blocks)


def _headline(view: JobView, stats: JobStatistics, *, server_down: bool) -> RenderableType:
    from rich.text import Text

    from isthmus.cli.terminal.tables import state_text

    text = Text.assemble((f"{view.name} ", "bold"), (short_job_id(view.id), "dim"), "  ", state_text(view.state))
    text.append(f"  {printable(view.reason)}" if view.reason else "")
    text.append(_next_step(view), style="bold")
    text.append(f"  {restarts_text(view)}" if restarts_text(view) else "", style="yellow")
    text.append("  server unreachable, retrying" if server_down else "", style="red")
    if not stats.steps:
        return text
    steps = view.job.training.steps
    done = stats.num_steps_done(steps)
    text.append("\n" + stacked_bar((done, steps - done), "━─", 40) + f" {done}/{steps}")
    eta_s, loss = stats.eta_s(steps), stats.latest("loss")
    rate, held_out = stats.latest("tokens_per_s"), stats.latest("validation_loss")
    text.append(f"  {format_seconds(eta_s)} left" if eta_s and view.state == "running" else "")
    text.append(f"  loss {loss:.4f}" if loss is not None else "")
    text.append(f"  validation loss {held_out:.4f}" if held_out is not None else "")
    value = perplexity(held_out)
    text.append(f" (perplexity {value:,.2f})" if value is not None else "")
    text.append(f"  {rate:,.0f} tokens/s" if rate is not None else "")
    return text


def needs_choice(view: JobView) -> bool:
    """Return whether the job waits for its user to choose a plan."""
    return view.state == "choosing" and view.job.policy == "manual"


def _next_step(view: JobView) -> str:
    if needs_choice(view):
        job = short_job_id(view.id)
        return f"  (choose a plan: isthmus plans {job}, then isthmus choose {job} PLAN)"
    return ""


def _stages_table(view: JobView, stats: JobStatistics) -> RenderableType:
    from isthmus.cli.terminal.tables import table

    rows = []
    states = {rank: part.observed for part in view.parts for rank in part.ranks}
    plan = view.plan
    for rank, stage in enumerate(plan.stage_of(rank) for rank in range(len(plan.ranks))) if plan else ():
        share = stats.step_breakdown(rank, last_steps=RECENT_STEPS)
        cells: tuple[str, ...] = ("", "", "", "")
        if share is not None:
            parts = (share.compute_s, share.exposed_communication_s, share.idle_s)
            percent = [100 * part / share.total_s if share.total_s else 0.0 for part in parts]
            cells = (*(f"{value:.0f} %" for value in percent), stacked_bar(parts, "█▒·", 18))
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


def _rollouts_table(view: JobView, stats: JobStatistics) -> RenderableType:
    from isthmus.cli.terminal.tables import table

    rows = []
    for one in rollout_sites(view.plan, stats, RECENT_STEPS):
        spent_s = (one.decode_s, *one.waits_s)
        percent = (f"{100 * part / one.total_s:.0f} %" if one.total_s else "" for part in spent_s)
        bar = stacked_bar(spent_s, "█▒░·", 18) if one.total_s else ""
        rows.append((str(one.rank), one.cluster, f"{one.tokens_per_s:,.0f}", *percent, bar))
    columns = ("rank", "cluster", "tokens/s", "decodes", "no samples", "no weights", "no link", "share of time")
    return table("Rollouts", columns, rows, "rank|tokens/s|decodes|no samples|no weights|no link")


def _links_table(view: JobView, stats: JobStatistics, pool: PoolView | None) -> RenderableType:
    from isthmus.cli.terminal.tables import table

    rows = []
    capacity = {(link.source, link.target): link.bandwidth_gbps * 1e3 for link in (pool.known_links if pool else ())}
    for link, rate in (stats.link_traffic_mbps(view.plan, last_steps=RECENT_STEPS) if view.plan else {}).items():
        link_mbps = capacity.get(link)
        share = stacked_bar((rate, max(0.0, link_mbps - rate)), "█·", 24) if link_mbps else ""
        rows.append((f"{link[0]} > {link[1]}", f"{rate:.1f}", f"{link_mbps:g}" if link_mbps else "?", share))
    return table("Links", ("link", "Mbit/s", "of", "used"), rows, "Mbit/s|of")
