"""Terminal pages of the plan search: the plans that it found with the reasons, and one plan stage by stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.terminal.plan_columns import (
    SETTING_COLUMNS,
    cost_note,
    cost_text,
    memory_text,
    mfu_text,
    setting_cells,
)
from isthmus.cli.terminal.tables import table
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.text.printable import printable
from isthmus.core.units import format_bytes, format_seconds
from isthmus.plan import PlanForecast, SearchResult, StageGroupLoad, StrategyChoice
from isthmus.sim.synchronisation import SyncTime


def search_page(
    answer: SearchResult,
    pool: Pool,
    hints: Sequence[tuple[str, float]],
    runnable: Collection[str],
    seconds: float,
    notes: Sequence[str],
) -> RenderableType:
    """Return the plans of a search on `pool`, or the changes with which there would be one, and the reasons.

    `hints` are changes with their step time in s, `runnable` the ids of plans that the Isthmus runtime executes;
    `notes` say what was chosen for the job where its file says nothing.
    """
    figures = ("step", "tokens/card s", "MFU", "memory/chip", "cost/step")
    head = ("plan", *figures, *SETTING_COLUMNS, "replicas x stages", "schedule", "runnable", "clusters")
    rows = [_search_row(one, pool, one.id in runnable) for one in answer.plans]
    parts: list[RenderableType] = [table("Plans", head, rows, "|".join(figures))] if rows else [Text("no plan found")]
    note = cost_note(answer.plans)
    parts += [Text(note, style="dim")] if note else []
    parts += [Text(f"{one.id}: {printable(one.why)}") for one in answer.plans[:1]]
    parts += [Text(f"rejected {', '.join(one.clusters)}: {printable(one.reason)}") for one in answer.refused]
    parts += hints_lines(hints, "With one of these changes a plan fits (planned and simulated):")
    coverage = "complete search" if answer.optimal else "large dimensions were sampled"
    parts.append(
        Text(
            f"{format_seconds(seconds)}: {answer.evaluated} pipelines evaluated, {answer.pruned} pruned; "
            f"{coverage}; lower bound on the step time {format_seconds(answer.bound_s)}"
        )
    )
    return Group(*parts, *map(Text, notes))


def hints_lines(hints: Sequence[tuple[str, float]], title: str) -> list[RenderableType]:
    """Return a line per change with its step time, below `title`; nothing without changes."""
    lines = [Text(f"  {text}   (a step takes {format_seconds(step_s)})") for text, step_s in hints]
    return [Text(title), *lines] if lines else []


def _search_row(one: Plan, pool: Pool, runnable: bool) -> tuple[str, ...]:
    predicted = one.predicted
    figures = ("-",) * 5
    if predicted is not None:
        figures = (
            format_seconds(predicted.iteration_s),
            f"{predicted.tgs_tokens_per_card_s:,.0f}",
            mfu_text(predicted.mfu_fraction),
            memory_text(one, pool),
            cost_text(predicted.cost_per_iteration, predicted.currency),
        )
    return (
        one.id,
        *figures,
        *setting_cells(one),
        " + ".join(f"{len(some)} x {len(one.pipeline(some[0]))}" for some in one.replica_kinds),
        one.schedule + (f", {one.local_steps} local steps" if one.local_steps > 1 else ""),
        "yes" if runnable else "no",
        " > ".join(one.clusters),
    )


def explain_page(
    plan: Plan,
    pool: Pool,
    forecast: PlanForecast,
    loads: Sequence[StageGroupLoad],
    sentences: Sequence[str],
    hints: Sequence[tuple[str, float]],
) -> RenderableType:
    """Return a plan's figures, a row per stage and per node group, sentences, and what would make it fit."""
    cost = cost_text(forecast.cost, pool.currency)
    figures = (
        f"step {format_seconds(forecast.iteration_s)}, {forecast.tgs_tokens_per_card_s:,.0f} tokens per card and s, "
        f"MFU {mfu_text(forecast.mfu_fraction)}, "
        + ("no prices in the pool" if cost == "-" else f"cost {cost} per step")
        + ("" if pool.currency or cost == "-" else " (unit of price_per_chip_hour)")
        + f", ZeRO {plan.zero}, {setting_cells(plan)[-1]} micro-batches (count x size), optimizer on the "
        + ("host" if plan.optimizer_on_host else "chip")
    )
    columns = ("stage", "cluster", "chips", "layers", "tp", "ep", "recompute", "memory/chip", "busy")
    rows = [_stage_row(plan, pool, forecast, index) for index in range(len(plan.pipeline(0)))]
    stages = table("Stages of replica 0", columns, rows, "memory/chip|busy")
    changes = hints_lines(hints, "The plan does not fit; it does with one of these changes (simulated):")
    heads = ("cluster", "node group", "chips", "layers x samples", "load ratio", "memory/chip", "busy")
    right = "layers x samples|load ratio|memory/chip|busy"
    each = table("Load of the node groups", heads, map(_load_row, loads), right)
    return Group(Text(figures), Text(""), stages, Text(""), each, Text(""), *map(Text, sentences), *changes)


def _load_row(load: StageGroupLoad) -> tuple[str, ...]:
    return (
        load.cluster,
        load.node_group,
        f"{load.num_chips} {load.chip}",
        f"{load.num_layer_samples:g}",
        "-" if load.load_ratio is None else f"{load.load_ratio:.2f}",
        f"{format_bytes(load.peak_memory_bytes)} of {format_bytes(load.memory_bytes)}",
        f"{load.busy_share:.0%}",
    )


def _stage_row(plan: Plan, pool: Pool, forecast: PlanForecast, index: int) -> tuple[str, ...]:
    stage, run = plan.pipeline(0)[index], forecast.result.stages[index]
    chip = pool.chip(pool.node_group(stage.cluster, stage.node_group))
    some = "" if stage.recompute_layers is None else f" {stage.recompute_layers} layers"
    return (
        str(index),
        stage.cluster,
        f"{stage.num_chips} {chip.name}",
        f"{stage.layers[0]}-{stage.layers[1] - 1}",
        str(stage.tp),
        str(stage.ep),
        stage.recompute + some,
        f"{format_bytes(run.peak_memory_bytes)} of {format_bytes(chip.memory_bytes)}",
        f"{run.busy_s / forecast.iteration_s:.0%}",
    )


def synchronisation_table(choices: Sequence[StrategyChoice], forced: str | None) -> list[RenderableType]:
    """Return a row per group that sums gradients: the strategy that is simulated, its time, and the fastest.

    `forced` is the strategy that the user chose; None means the runtime's default.
    """

    def timed(time: SyncTime) -> str:
        return f"{time.strategy}: {format_seconds(time.total_s)} (bound: {time.bound})"

    rows = []
    for choice in choices:
        one = choice.prices
        used = [timed(time) for time in one.times if time.strategy == forced]
        rows.append(
            (
                f"{one.layers[0]}-{one.layers[1] - 1}",
                f"{one.num_replicas} on {', '.join(one.clusters)}",
                format_bytes(one.num_bytes),
                *(used or [f"default: {format_seconds(one.default_s)}"]),
                timed(choice.fastest),
            )
        )
    columns = ("layers", "replicas", "gradients", "simulated", "fastest strategy")
    if rows:
        return [Text(""), table("Sums of gradients", columns, rows, "gradients")]
    return [Text(""), Text("No replicas sum gradients: --sync changes nothing.")] if forced else []
