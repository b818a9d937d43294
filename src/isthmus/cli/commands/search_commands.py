"""Commands that look for plans and say why they are as they are: plan, explain."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.command import verb
from isthmus.cli.commands.plan_commands import model_path
from isthmus.cli.shell.interrupt import interruptible
from isthmus.cli.shell.shell import Shell
from isthmus.cli.terminal.tables import table
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_job, load_plan, load_pool
from isthmus.core.model import load_model
from isthmus.core.plan import Plan, Stage
from isthmus.core.units import format_bytes, format_seconds
from isthmus.plan.search.compose.layout import Layout
from isthmus.plan.search.costs.limits import Limits
from isthmus.plan.search.explore.branch_and_bound import Tally
from isthmus.plan.search.finish.choose import Objective
from isthmus.plan.search.finish.picture import plan_picture
from isthmus.plan.search.finish.runnable import why_not_runnable
from isthmus.plan.search.plans import Answer, Question, search_plans
from isthmus.plan.time.predict import Forecast, predict

commands = typer.Typer()
PANEL = "Know before you run"
QUIET_S = 1.0
"""Searches shorter than this say nothing before their answer."""


@verb(
    commands,
    panel=PANEL,
    examples=[
        "isthmus plan job.yaml --pool pool.yaml",
        "isthmus plan job.yaml --pool pool.yaml --objective cost --deadline 86400",
        "isthmus plan job.yaml --pool pool.yaml --tp 4 --top 1 --json",
        "isthmus plan job.yaml --pool pool.yaml --save plans   (a file for `explain` and `simulate` each)",
    ],
)
def plan(
    shell: Shell,
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job: see `isthmus schema job`.")],
    pool: Annotated[Path, typer.Option(metavar="FILE", help="The pool to plan on.")],
    objective: Annotated[
        Objective, typer.Option(metavar="|".join(get_args(Objective)), help="What is best.")
    ] = "time",
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Plans to return.")] = 5,
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Time the whole job may take.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Price the whole job may have.")
    ] = None,
    tp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Fix tensor parallelism.")] = None,
    pp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Fix the number of stages.")] = None,
    dp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Fix the replicas of a chain.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Fix the micro-batch size.")
    ] = None,
    schedule: Annotated[
        Literal["1f1b", "gpipe", "overlapped", "zero_bubble"] | None,
        typer.Option(metavar="NAME", help="Fix the schedule: 1f1b, gpipe, overlapped or zero_bubble."),
    ] = None,
    runnable: Annotated[
        bool, typer.Option("--runnable", help="Only plans that our own runtime executes.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each plan to a file of its own.")
    ] = None,
) -> None:
    """Search the best plans for a job on a pool, and say why they are and what was refused.

    Ctrl-C ends the search with the best found so far.
    """
    given = load_job(job)
    limits = Limits(executable=runnable, tp=tp, pp=pp, dp=dp, micro_batch_size=micro_batch, schedule=schedule)
    with interruptible() as interrupted:
        started_s = time.monotonic()
        answer = search_plans(
            Question(
                job=given,
                model=load_model(given.model),
                pool=load_pool(pool),
                objective=objective,
                deadline_s=deadline,
                budget=budget,
                limits=limits,
                keep=top,
                go_on=_Watch(shell, started_s, interrupted),
            )
        )
        seconds = time.monotonic() - started_s
    if save:
        _save(save, answer.plans)
    told = answer.as_dict(seconds)
    told["search"]["runnable"] = [one.id for one in answer.plans if why_not_runnable(one) is None]
    shell.answer(told, lambda: _shown(answer, seconds))


class _Watch:
    """Tells once a second what was found so far; asks for the end after Ctrl-C."""

    def __init__(self, shell: Shell, started_s: float, interrupted: list[int]) -> None:
        self._shell, self._due_s, self._interrupted = shell, started_s + QUIET_S, interrupted

    def __call__(self, tally: Tally, best: Layout | None) -> bool:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + QUIET_S
            found = f"best so far {format_seconds(best.estimate_s)} a step" if best else "nothing yet"
            self._shell.note(f"{tally.evaluated} chains cut, {tally.pruned} pruned, {found}")
        return not self._interrupted


def _save(folder: Path, plans: tuple[Plan, ...]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in plans:
            (folder / f"{one.id}.json").write_text(one.model_dump_json(indent=1), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}", hint="name another folder") from error


def _shown(answer: Answer, seconds: float) -> RenderableType:
    rows = []
    for one in answer.plans:
        seen = one.predicted
        if seen is None:
            continue
        rows.append(
            (
                one.id,
                format_seconds(seen.iteration_s),
                f"{seen.tgs_tokens_per_card_s:,.0f}",
                f"{seen.cost_per_iteration:.4g}",
                " > ".join(one.clusters),
                " + ".join(f"{len(some)} x {len(one.pipeline(some[0]))}" for some in one.kinds),
                one.schedule + (f", {one.local_steps} local steps" if one.local_steps > 1 else ""),
                "yes" if why_not_runnable(one) is None else "",
            )
        )
    head = ("plan", "step", "tokens/card s", "cost", "clusters", "replicas x stages", "schedule", "runs here")
    parts: list[RenderableType] = [table("Plans", head, rows)] if rows else [Text("no plan")]
    parts += [Text(f"{one.id}: {one.why}") for one in answer.plans[:1]]
    parts += [Text(f"refused {', '.join(one.clusters)}: {one.reason}") for one in answer.refused]
    proof = "nothing of the space was left out" if answer.optimal else "large dimensions were thinned"
    parts.append(
        Text(
            f"{format_seconds(seconds)}: {answer.evaluated} chains cut, {answer.pruned} pruned; {proof}; "
            f"no plan can take less than {format_seconds(answer.bound_s)}"
        )
    )
    return Group(*parts)


@verb(
    commands,
    panel=PANEL,
    examples=[
        "isthmus explain plan.json --pool pool.yaml",
        "isthmus explain plan.json --pool pool.yaml --picture plan.svg",
    ],
)
def explain(
    shell: Shell,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan: by hand, or of `isthmus plan`.")],
    pool: Annotated[Path, typer.Option(metavar="FILE", help="The pool that its clusters are in.")],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A folder or config.json; the plan's own without it.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it (SVG).")] = None,
) -> None:
    """Say what a plan does where, what bounds it, and what a faster one would need."""
    given = load_plan(plan)
    forecast = predict(given, load_pool(pool), load_model(model_path(given, model)))
    sentences = explained(given, forecast)
    if picture:
        try:
            picture.write_text(plan_picture(given), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{picture} cannot be written: {error}", hint="name another file") from error
    answer = {"plan": given.id, "iteration_s": forecast.iteration_s, "sentences": sentences}
    shell.answer(json.loads(json.dumps(answer)), lambda: Text("\n".join(sentences)))


def explained(plan: Plan, forecast: Forecast) -> list[str]:
    """Return what a plan does and what bounds it, a sentence each."""
    whole_s = forecast.iteration_s
    stages = " or ".join(dict.fromkeys(str(len(plan.pipeline(some[0]))) for some in plan.kinds))
    head = f"{plan.id}: {plan.dp} replica{'s' if plan.dp > 1 else ''} of {stages} stages on "
    head += f"{', '.join(plan.clusters)}; {plan.samples} samples a step in {format_seconds(whole_s)}."
    told = [head, *_what_each_does(plan, forecast), *_what_replicas_do(plan), *_what_bounds(forecast)]
    lacking = why_not_runnable(plan)
    told.append(f"Our runtime does not execute it: {lacking}." if lacking else "Our runtime executes it.")
    return told


def _what_each_does(plan: Plan, forecast: Forecast) -> Iterator[str]:
    for stage, cost in zip(plan.pipeline(0), forecast.stages, strict=True):
        again = 0 if stage.recompute == "none" else stage.recompute_layers or stage.num_layers
        chip, pass_s = cost.host.chip, cost.load.forward_s + cost.load.backward_s
        text = f"Layers {stage.layers[0]} to {stage.layers[1] - 1} on {stage.num_chips} {chip.name} of "
        text += f"{stage.cluster}: {format_seconds(pass_s)} a micro-batch"
        if again:
            text += f", {again} of them recomputed to fit {format_bytes(chip.memory_bytes)}"
        yield text + "."
    cuts: dict[str, list[int]] = {}
    for replica in range(plan.dp):
        cuts.setdefault("; ".join(map(_place_of, plan.pipeline(replica))), []).append(replica)
    for cut, others in list(cuts.items())[1:]:
        who = (
            f"Replica {others[0]} has" if len(others) == 1 else f"Replicas {', '.join(map(str, others))} have"
        )
        yield f"{who} {cut}."


def _place_of(stage: Stage) -> str:
    last = stage.layers[1] - 1
    return f"layers {stage.layers[0]} to {last} on {stage.num_chips} {stage.node_group} of {stage.cluster}"


def _what_replicas_do(plan: Plan) -> Iterator[str]:
    """Yield what replicas take where it differs, and how often they average."""
    kinds: dict[tuple[int, int], list[str]] = {}
    for replica in range(plan.dp):
        taken = plan.micro_batches_of(replica), plan.micro_batch_size_of(replica)
        kinds.setdefault(taken, []).append(str(replica))
    if len(kinds) > 1:
        for (count, size), replicas in kinds.items():
            who = (
                f"Replica {replicas[0]} takes"
                if len(replicas) == 1
                else f"Replicas {', '.join(replicas)} take"
            )
            yield f"{who} {count} micro-batches of {size}."
    if plan.local_steps > 1:
        yield (
            f"{max(plan.replica_groups) + 1} groups of replicas that share no cluster take "
            f"{plan.local_steps} steps each on its own, then average their parameters: that changes what is "
            "learned."
        )


def _what_bounds(forecast: Forecast) -> Iterator[str]:
    run, whole_s = forecast.run, forecast.iteration_s
    slowest = max(run.stages, key=lambda one: one.busy_s)
    yield (
        f"Stage {slowest.stage} of replica {slowest.replica} on {slowest.cluster} sets the pace: busy "
        f"{slowest.busy_s / whole_s:.0%} of the step."
    )
    waits = max(run.stages, key=lambda one: one.exposed_communication_s)
    if waits.exposed_communication_s > 0.01 * whole_s:
        waited = format_seconds(waits.exposed_communication_s)
        yield (
            f"Stage {waits.stage} on {waits.cluster} waits {waited} for messages or gradients: a faster or "
            "nearer link would save up to that."
        )
    idle = max(run.stages, key=lambda one: one.bubble_s)
    if idle.bubble_s > 0.01 * whole_s:
        share = idle.bubble_s / whole_s
        yield (
            f"Stage {idle.stage} on {idle.cluster} is idle for {share:.0%} of the step: more micro-batches "
            "or an evener split would use it."
        )
    for link in run.links:
        if link.num_bytes:
            yield f"{link.source} to {link.target} is {link.utilisation:.0%} full."
