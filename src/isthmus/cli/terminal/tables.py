"""Terminal tables of plans, jobs, pool and chips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.job_statistics import predicted_tokens_per_s
from isthmus.cli.terminal.folding_table import FoldingTable
from isthmus.cli.terminal.plan_columns import (
    SETTING_COLUMNS,
    cost_note,
    cost_text,
    memory_text,
    mfu_text,
    setting_cells,
)
from isthmus.core.chip import Chip
from isthmus.core.plan import Plan, PlanSet, Prediction
from isthmus.core.pool import Link
from isthmus.core.runs.job_id import short_job_ids
from isthmus.core.units import format_bytes, format_seconds
from isthmus.core.views.api_views import JobView, PoolView

_STATE_STYLE = {"running": "cyan", "succeeded": "green", "failed": "red", "cancelled": "yellow"}


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: str = "") -> FoldingTable:
    """Return a plain table; columns listed in `right` (separated by `|`) are right-aligned.

    On narrow terminals text wraps between words, and the last columns follow their row.
    """
    return FoldingTable(title, columns, rows, right)


def state_text(state: str) -> Text:
    """Return a job's state in its colour."""
    return Text(state, style=_STATE_STYLE.get(state, "blue"))


def stages_text(plan: Plan) -> str:
    """Describe the stages of a plan: `qingyang 0-5 > hangzhou 6-11`, with the number of equal replicas.

    Different replicas are listed side by side with their micro-batches.
    """
    if len(plan.replica_kinds) == 1:
        return _pipeline_text(plan, 0) + (f"  × {plan.dp} replicas" if plan.dp > 1 else "")
    found = []
    for replicas in plan.replica_kinds:
        count, size = plan.micro_batches_of(replicas[0]), plan.micro_batch_size_of(replicas[0])
        batches = f" ({count} micro-batches" + (f" of {size})" if plan.replica_micro_batch_sizes else ")")
        times = f"  × {len(replicas)}" if len(replicas) > 1 else ""
        found.append(_pipeline_text(plan, replicas[0]) + batches + times)
    return " | ".join(found)


def _pipeline_text(plan: Plan, replica: int) -> str:
    pieces = []
    for stage in plan.pipeline(replica):
        first, last = stage.layers
        layers = f"{first}" if last == first + 1 else f"{first}-{last - 1}"
        pieces.append(f"{stage.cluster} {layers}" + (f" (tp {stage.tp})" if stage.tp > 1 else ""))
    return " > ".join(pieces)


def plans_table(plans: PlanSet) -> RenderableType:
    """Return the candidate plans, fastest first, their explanations, and the rejected combinations."""
    if not plans.plans:
        hint = "`isthmus plan JOB.yaml --pool POOL.yaml` tries what would give the job one."
        shown: list[RenderableType] = [Text(f"No candidate plans. {hint}")]
    else:
        figures = ("iteration", "tokens/s", "WAN Gbit/s", "cost/step", "MFU", "memory/chip")
        columns = ("plan", "stages: layers", *figures, *SETTING_COLUMNS)
        shown = [table("Candidate plans, fastest first", columns, map(_plan_row, plans.plans), "|".join(figures))]
    note = cost_note(plans.plans)
    shown += [Text(note, style="dim")] if note else []
    reasons = [(plan.id, plan.why) for plan in plans.plans if plan.why]
    if reasons:
        shown += [Text(""), table("Why", ("plan", "reason"), reasons)]
    if plans.refused:
        rejected = [(" + ".join(one.clusters), one.reason) for one in plans.refused]
        shown += [Text(""), table("Rejected", ("clusters", "reason"), rejected)]
    return Group(*shown)


def _plan_row(plan: Plan) -> tuple[str, ...]:
    predicted = plan.predicted
    if predicted is None:
        return (plan.id, stages_text(plan), *["-"] * 6, *setting_cells(plan))
    rate = predicted_tokens_per_s(plan)
    return (
        plan.id,
        stages_text(plan),
        format_seconds(predicted.iteration_s),
        f"{rate:,.0f}" if rate is not None else "-",
        _wan_text(predicted),
        cost_text(predicted.cost_per_iteration, predicted.currency),
        mfu_text(predicted.mfu_fraction),
        memory_text(plan),
        *setting_cells(plan),
    )


def _wan_text(predicted: Prediction) -> str:
    """Return the rate of each hop, and the largest gradient rate between two clusters, in Gbit/s."""
    rates = [f"{gbps:.3g}" for gbps in predicted.wan_gbps]
    if predicted.gradient_gbps:
        rates.append(f"{max(predicted.gradient_gbps.values()):.3g} (gradients)")
    return " ".join(rates) or "-"


def jobs_table(jobs: Sequence[JobView], now_s: float) -> RenderableType:
    """Return the table of jobs in the given order; `now_s` is in seconds since the epoch."""
    if not jobs:
        return Text("No jobs. Submit one with `isthmus submit job.yaml`.")
    short = short_job_ids(job.id for job in jobs)
    rows = [
        (
            short[job.id],
            job.name,
            job.user,
            state_text(job.state),
            format_seconds(max(0.0, now_s - job.submitted_s)) + " ago",
            " + ".join(job.plan.clusters) if job.plan else "-",
            job.reason,
        )
        for job in jobs
    ]
    return table("", ("job", "name", "user", "state", "submitted", "where", "reason"), rows)


def pool_table(pool: PoolView) -> RenderableType:
    """Return the tables of clusters with free chips, and of links."""
    rows = []
    for view in pool.clusters:
        groups = [
            f"{view.free_chips.get(group.name, 0)}/{group.num_chips} {group.chip}"
            + (" (virtual)" if group.virtual else "")
            for group in view.cluster.node_groups
        ]
        connected = Text("connected", style="green") if view.connected else Text("disconnected", style="red")
        rows.append((view.cluster.name, view.cluster.owner, view.cluster.region, connected, ", ".join(groups)))
    clusters = table("Clusters", ("cluster", "owner", "region", "agent", "free/total chips"), rows)
    notes = restore_notes(pool)
    if not pool.known_links:
        return Group(clusters, *notes)
    columns = ("link", "Gbit/s", "delay one way", "jitter", "loss", "class")
    shown = [*map(_link_row, pool.links), *(_link_row(link, "measured") for link in pool.measured)]
    links = table("Links", columns, shown, "Gbit/s|delay one way|jitter|loss")
    return Group(clusters, *notes, Text(""), links)


def restore_notes(pool: PoolView) -> list[Text]:
    """Return what the server does not know since it was restored from a backup, and what to do."""
    awaited = [view.cluster.name for view in pool.clusters if view.awaited]
    notes = []
    if awaited:
        text = f"The server was restored from a backup; its jobs wait until these sites report: {', '.join(awaited)}."
        notes.append(Text(text, style="yellow"))
    for view in pool.clusters:
        for part in view.unknown_parts:
            text = f"{view.cluster.name} runs {part.job}, attempt {part.attempt}, which is not in the server's log. "
            text += f"It goes on; `isthmus cancel {part.job}`, for an unknown job with --unknown, ends it."
            notes.append(Text(text, style="yellow"))
    return notes


def _link_row(link: Link, origin: str = "") -> tuple[str, ...]:
    return (
        f"{link.source} > {link.target}",
        f"{link.bandwidth_gbps:.4g}",
        f"{link.delay_ms:.4g} ms",
        f"{link.jitter_ms:g} ms",
        f"{link.loss:.3g}",
        f"{link.link_class}, {origin}" if origin else link.link_class,
    )


def chips_table(chips: Iterable[Chip]) -> RenderableType:
    """Return the table of built-in chips with their sources."""
    rows = [
        (
            chip.name,
            chip.vendor,
            f"{chip.flop_per_s('bf16') / 1e12:,.4g}",
            f"{chip.flop_per_s('fp32') / 1e12:,.4g}",
            format_bytes(chip.memory_bytes),
            f"{chip.memory_bandwidth_bytes_per_s / 1e12:.3g}",
            f"{chip.in_node_link.name} {chip.in_node_link.bandwidth_bytes_per_s / 1e9:g}",
            chip.collective_library,
            chip.source,
        )
        for chip in chips
    ]
    columns = (
        "chip", "vendor", "bf16 TFLOP/s", "fp32 TFLOP/s", "memory", "TB/s",
        "in-node GB/s", "library", "source",
    )  # fmt: skip
    return table("", columns, rows, "bf16 TFLOP/s|fp32 TFLOP/s|memory|TB/s")
