"""Sections of the report as HTML. Every value from a user or a site is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from isthmus.cli.history_text import event_text, next_steps, perplexity, restarts_text, result_place
from isthmus.cli.job_report import html_elements
from isthmus.cli.job_statistics import JobStatistics, predicted_tokens_per_s
from isthmus.cli.rollout_measures import MEASURES, measures_text, rollout_sites
from isthmus.client.resolve_job import TERMINAL_STATES
from isthmus.core.plan import Plan
from isthmus.core.pool import NodeGroup
from isthmus.core.text.html_page import fact_list, html_table, page_text
from isthmus.core.units import format_bytes, format_seconds
from isthmus.core.views.api_views import HistoryEvent, JobView, PoolView


def header_section(view: JobView, stats: JobStatistics, pool: PoolView | None, shown_reason: str) -> str:
    """Return the page header: name, state, model, clusters, times, result, and a note on virtual chips."""
    facts = [
        ("job", view.id),
        ("user", view.user),
        ("model", view.job.model_source or _model_name(view.job.model)),
        ("task", view.job.task),
        ("tokenizer", view.job.data.tokenizer),
    ]
    if view.plan:
        owners = _owners(view, pool)
        sites = (f"{name} ({owners[name]})" if name in owners else name for name in view.plan.clusters)
        facts.append(("clusters", ", ".join(sites)))
    facts.append(("submitted", html_elements.utc_text(view.submitted_s)))
    if view.state in TERMINAL_STATES:
        facts.append(("ended", html_elements.utc_text(view.changed_s)))
    result = result_place(view)
    if result is not None:
        facts.append(("result", result))
    reason = f'<p class="reason">{page_text(shown_reason)}</p>' if shown_reason else ""
    return (
        f'<h1>{page_text(view.name)} <span class="state {page_text(view.state)}">{page_text(view.state)}</span></h1>'
        f"{reason}{fact_list(facts)}{_virtual_note(view, stats, pool)}"
    )


def summary_tiles(view: JobView, stats: JobStatistics) -> str:
    """Return the summary tiles: loss, steps, throughput, step time, traffic."""
    losses = stats.series("loss")
    shown: list[tuple[str, str, str]] = []
    if losses:
        last = f"{losses[-1][1]:.3f}"
        shown.append(("training loss", last, f"from {losses[0][1]:.3f} at step {losses[0][0]}"))
    held_out = stats.latest("validation_loss")
    if held_out is not None:
        value = perplexity(held_out)
        note = "held-out text" + (f", perplexity {value:,.2f}" if value is not None else "")
        shown.append(("validation loss", f"{held_out:.3f}", note))
    if stats.steps:
        restarts = restarts_text(view) or "no restarts"
        total = view.job.training.steps
        shown.append(("steps done", f"{stats.num_steps_done(total):,}", f"of {total:,}, {restarts}"))
    rate, step_s = stats.tokens_per_s(), stats.iteration_s()
    if rate is not None:
        shown.append(("tokens per second", f"{rate:,.0f}", "median over steps"))
    if step_s is not None:
        shown.append(("step time", format_seconds(step_s), "median"))
    sent = sum(value for _, value in stats.series("wan_bytes", combine=sum))
    if sent:
        shown.append(("sent between clusters", format_bytes(sent), "all steps reported"))
    return "".join(
        f'<div class="tile"><div class="what">{page_text(what)}</div><div class="value">{page_text(value)}</div>'
        f'<div class="note">{page_text(note)}</div></div>'
        for what, value, note in shown
    )


def history_section(view: JobView, history: Sequence[HistoryEvent]) -> str:
    """Return the table of events, oldest first, and what to do next."""
    if not history:
        return html_elements.empty_section("Not recorded.")
    rows = [(html_elements.utc_text(one.time_s), event_text(one)) for one in history]
    items = (f"<li><code>{page_text(command)}</code> {page_text(what)}</li>" for command, what in next_steps(view))
    return html_table(("time", "event"), rows) + f"<h3>What to do next</h3><ul>{''.join(items)}</ul>"


def stages_section(view: JobView, stats: JobStatistics, pool: PoolView | None) -> str:
    """Return the table of stages: placement, layers, predicted memory and step-time breakdown."""
    if view.plan is None:
        return html_elements.empty_section("No plan has been chosen.")
    groups = _groups(pool)
    rows = []
    for rank, index in enumerate(one.stage for one in view.plan.ranks):
        stage = view.plan.stages[index]
        share = stats.step_breakdown(rank)
        cells = ["–", "–", "–", ""]
        if share is not None:
            parts = (share.compute_s, share.exposed_communication_s, share.idle_s)
            cells = [*map(format_seconds, parts), html_elements.share_bar(parts)]
        group = groups.get((stage.cluster, stage.node_group))
        chip = group.chip + (" (virtual)" if group.virtual else "") if group else stage.node_group
        memory = view.plan.predicted.peak_memory_bytes if view.plan.predicted else ()
        predicted = format_bytes(memory[index]) if index < len(memory) else "–"
        layers = f"{stage.layers[0]}–{stage.layers[1] - 1}"
        rows.append([str(rank), stage.cluster, chip, layers, *cells[:3], predicted, cells[3]])
    columns = (
        "rank",
        "cluster",
        "chip",
        "layers",
        "compute",
        "exposed communication",
        "idle",
        "predicted memory",
    )
    return html_table((*columns, "share of step"), rows, numbers=(0, 3, 4, 5, 6, 7), raw=(8,))


def samples_section(view: JobView, stats: JobStatistics) -> str:
    """Return the section on the samples of a job with task rl and on the ranks that decode; "" for other jobs."""
    if view.job.rl is None:
        return ""
    last = measures_text(stats)
    rows = []
    for key, (name, write) in MEASURES.items():
        values = [value for _, value in stats.series(key)]
        if values:
            rows.append([name, write(values[0]), last[name]])
    pieces = [html_table(("of the samples of a step", "first", "last"), rows, numbers=(1, 2))]
    sites = rollout_sites(view.plan, stats, len(stats.steps))
    if sites:
        columns = ("rank", "cluster", "tokens per second", "decodes", "no samples", "no weights", "no link")
        cells = [
            [str(one.rank), one.cluster, f"{one.tokens_per_s:,.0f}"]
            + [f"{part / one.total_s:.0%}" if one.total_s else "–" for part in (one.decode_s, *one.waits_s)]
            for one in sites
        ]
        pieces.append("<h3>Decoding by site</h3>" + html_table(columns, cells, numbers=(0, 2, 3, 4, 5, 6)))
    return f"<section>\n<h2>Samples</h2>\n{''.join(pieces)}\n</section>"


def links_section(view: JobView, stats: JobStatistics, pool: PoolView | None) -> str:
    """Return the table of links: measured and predicted traffic, capacity, delay, loss."""
    traffic = stats.link_traffic_mbps(view.plan) if view.plan else {}
    if not traffic:
        return html_elements.empty_section("The job uses no wide-area links.")
    known = {(link.source, link.target): link for link in (pool.known_links if pool else ())}
    predicted = _predicted_mbps(view.plan) if view.plan else {}
    rows = []
    for (source, target), rate in traffic.items():
        link = known.get((source, target))
        capacity = link.bandwidth_gbps * 1e3 if link else None
        rows.append(
            [
                f"{source}\u00a0→\u00a0{target}",
                f"{rate:.1f}",
                f"{predicted[source, target]:.1f}" if (source, target) in predicted else "–",
                f"{capacity:g}" if capacity else "–",
                f"{rate / capacity:.0%}" if capacity else "–",
                f"{link.delay_ms:g} ms" if link else "–",
                f"{link.jitter_ms:g} ms" if link else "–",
                f"{link.loss:.2%}" if link else "–",
            ]
        )
    columns = (
        "link",
        "Mbit/s, mean",
        "predicted demand",
        "capacity",
        "used",
        "delay, one way",
        "jitter",
        "loss",
    )
    return html_table(columns, rows, numbers=range(1, 8))


def plan_section(view: JobView, stats: JobStatistics, extra: Mapping[str, Any]) -> str:
    """Return the plan summary, predicted and measured performance, and the assumptions."""
    pieces = []
    if view.plan is not None:
        chosen = view.plan
        pieces.append(
            f"<p>Plan <b>{page_text(chosen.id)}</b>: {_layout_text(chosen)} micro-batches of "
            f"{_batch_sizes_text(chosen)} × {chosen.sequence_length} tokens, schedule "
            f"{page_text(chosen.schedule)}." + (f" {page_text(chosen.why)}" if chosen.why else "") + "</p>"
        )
        pieces.append(_prediction_table(chosen, stats))
    if extra:
        lines = [[str(label), html_elements.setting_text(value)] for label, value in extra.items()]
        pieces.append("<h3>Also measured</h3>" + html_table(("item", "value"), lines, numbers=(1,)))
    if view.plan is not None and view.plan.predicted and view.plan.predicted.assumptions:
        items = "".join(f"<li>{page_text(one)}</li>" for one in view.plan.predicted.assumptions)
        pieces.append(f"<h3>The prediction assumes</h3><ul>{items}</ul>")
    return "".join(pieces) or html_elements.empty_section("No plan has been chosen.")


def _layout_text(chosen: Plan) -> str:
    """Describe the numbers of stages, replicas and micro-batches; distinct values if replicas differ."""
    firsts = [replicas[0] for replicas in chosen.replica_kinds]
    stages = " or ".join(dict.fromkeys(str(len(chosen.pipeline(one))) for one in firsts))
    counts = " or ".join(dict.fromkeys(str(chosen.micro_batches_of(one)) for one in firsts))
    replicas = f", {chosen.dp} replicas" if chosen.dp > 1 else ""
    return f"{stages} stages{replicas}, {counts}"


def _batch_sizes_text(chosen: Plan) -> str:
    """Return the distinct micro-batch sizes of the replicas."""
    return " or ".join(str(n) for n in sorted({chosen.micro_batch_size_of(r) for r in range(chosen.dp)}))


def not_chosen_section(view: JobView) -> str:
    """Return the other candidate plans and the rejected combinations, with reasons."""
    if view.plans is None:
        return html_elements.empty_section("Not recorded.")
    pieces = []
    others = [one for one in view.plans.plans if view.plan is None or one.id != view.plan.id]
    if others:
        rows = [
            [
                one.id,
                " + ".join(one.clusters),
                html_elements.duration_text(one.predicted.iteration_s if one.predicted else None),
                one.why,
            ]
            for one in others
        ]
        pieces.append(
            "<h3>Other candidates</h3>" + html_table(("plan", "clusters", "predicted step", "why"), rows, (2,))
        )
    if view.plans.refused:
        rows = [[" + ".join(one.clusters), one.reason] for one in view.plans.refused]
        pieces.append("<h3>Rejected</h3>" + html_table(("clusters", "reason"), rows))
    return "".join(pieces) or html_elements.empty_section("There were no other candidates and no rejections.")


def settings_section(view: JobView) -> str:
    """Return the training settings of the job."""
    settings_by_name = view.job.training.model_dump(mode="json")
    rows = [[key.replace("_", " "), html_elements.setting_text(value)] for key, value in settings_by_name.items()]
    return html_table(("training", "value"), rows, numbers=(1,))


def _prediction_table(chosen: Plan, stats: JobStatistics) -> str:
    predicted_s = chosen.predicted.iteration_s if chosen.predicted else None
    predicted_rate = predicted_tokens_per_s(chosen)
    step_s, rate = stats.iteration_s(), stats.tokens_per_s()
    rows = [
        [
            "step time",
            html_elements.duration_text(predicted_s),
            html_elements.duration_text(step_s),
            html_elements.ratio_text(step_s, predicted_s),
        ],
        [
            "tokens per second",
            html_elements.number_text(predicted_rate),
            html_elements.number_text(rate),
            html_elements.ratio_text(rate, predicted_rate),
        ],
    ]
    return html_table(("", "predicted", "measured", "measured / predicted"), rows, numbers=(1, 2, 3))


def _predicted_mbps(plan_: Plan) -> dict[tuple[str, str], float]:
    """Return the predicted demand of each link in 1e6 bit/s; a hop's rate applies to both directions."""
    if plan_.predicted is None:
        return {}
    found: dict[tuple[str, str], float] = {}
    for (source, target), gbps in zip(plan_.all_hops(), plan_.predicted.wan_gbps, strict=False):
        for ends in ((source, target), (target, source)):
            found[ends] = found.get(ends, 0.0) + gbps * 1e3
    for name, gbps in plan_.predicted.gradient_gbps.items():
        source, _, target = name.partition(">")
        found[source, target] = found.get((source, target), 0.0) + gbps * 1e3
    return found


def _owners(view: JobView, pool: PoolView | None) -> dict[str, str]:
    listed = {one.cluster.name: one.cluster.owner for one in (pool.clusters if pool else ())}
    return listed | {part.cluster: part.owner for part in view.parts}


def _groups(pool: PoolView | None) -> dict[tuple[str, str], NodeGroup]:
    clusters = [one.cluster for one in pool.clusters] if pool else []
    return {(one.name, group.name): group for one in clusters for group in one.node_groups}


def _virtual_note(view: JobView, stats: JobStatistics, pool: PoolView | None) -> str:
    if view.job.compute == "virtual":
        return (
            '<p class="virtual"><b>Virtual computation:</b> each stage waited for the predicted time '
            "instead of computing; all messages between stages were sent. The model was not trained.</p>"
        )
    chosen, groups = view.plan, _groups(pool)
    used = dict.fromkeys((stage.cluster, stage.node_group) for stage in chosen.stages) if chosen else {}
    virtual = [f"{groups[key].chip} at {key[0]}" for key in used if key in groups and groups[key].virtual]
    if not virtual:
        return ""
    overrun = _overrun_note(stats)
    return (
        '<p class="virtual"><b>Virtual chips:</b> '
        f"{page_text(', '.join(virtual))}. Each stage computed for real, then waited until its virtual chip's "
        f"time had passed; all messages between stages were sent.{overrun}</p>"
    )


def _overrun_note(stats: JobStatistics) -> str:
    """Return by how much real computation overran the virtual chips' time, or ""."""
    mean_s = stats.mean_overrun_s()
    if mean_s is None:
        return ""
    return f" Real computation overran that time by {format_seconds(mean_s)} per step (slowest stage, mean)."


def _model_name(path: str) -> str:
    """Return the name of the model folder, also for a path to its `config.json`."""
    pure = PurePath(path)
    return pure.parent.name if pure.name == "config.json" and pure.parent.name else pure.name
