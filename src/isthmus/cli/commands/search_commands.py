"""Commands that search for plans and explain them: plan, explain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.plan_commands import StackOption, model_path
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.environment.interrupt import interruptible
from isthmus.cli.terminal.plan_pages import explain_page, search_page
from isthmus.client.read_job import read_job
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_plan, load_pool, read_stack_choice
from isthmus.core.model import load_model
from isthmus.core.plan import Plan, Stage
from isthmus.core.units import format_bytes, format_seconds
from isthmus.plan import (
    Objective,
    ObjectiveWeights,
    PlanForecast,
    PlanLayout,
    SearchLimits,
    SearchRequest,
    SearchStats,
    calibration_for,
    choose_strategies,
    draw_plan,
    fitting_changes,
    framework_request,
    overfull_stages,
    plan_energy_j,
    plan_page,
    plan_rollouts,
    predict,
    profile_model,
    runtime_incompatibility,
    search_plans,
    stage_group_loads,
    suggest_changes,
    with_searched_schedule,
)
from isthmus.schedule import SEARCHED, check_schedule, make_schedule

commands = typer.Typer()
PANEL = "Know before you run"
Framework = Literal["megatron", "torchtitan"]
PROGRESS_INTERVAL_S = 1.0
"""Interval of progress messages, in seconds."""
HINTS_TIMEOUT_S = 30.0
"""Longest search for changes that make a plan fit, in seconds."""
MAX_SHOWN_ORDER = 60
"""Characters of a searched order that `explain` shows."""


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus plan job.yaml --pool pool.yaml",
        "isthmus plan job.yaml --pool pool.yaml --objective cost --deadline 86400",
        "isthmus plan job.yaml --pool pool.yaml --weights time=2,energy=1",
        "isthmus plan job.yaml --pool pool.yaml --tp 4 --top 1 --json",
        "isthmus plan job.yaml --pool pool.yaml --save plans   (one file per plan, for `explain`)",
        "isthmus plan job.yaml --pool pool.yaml --for megatron --save plans   (plans that `export` takes)",
    ],
)
def plan(
    env: CliEnvironment,
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job: see `isthmus schema job`.")],
    pool: Annotated[Path, typer.Option(metavar="FILE", help="The pool to plan on.")],
    objective: Annotated[
        Objective, typer.Option(metavar="|".join(get_args(Objective)), help="What to optimise.")
    ] = "time",
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHTS",
            help="Instead of --objective: weights such as time=2,cost=1,energy=1, relative to the fastest plan's.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Plans to return.")] = 5,
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Maximum time of the whole job.")
    ] = None,
    budget: Annotated[float | None, typer.Option(metavar="X", min=0, help="Maximum price of the whole job.")] = None,
    tp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Fix the tensor-parallel degree.")] = None,
    pp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Fix the number of stages.")] = None,
    dp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Fix the replicas of a pipeline.")] = None,
    micro_batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Fix the micro-batch size.")] = None,
    schedule: Annotated[
        Literal["1f1b", "gpipe", "overlapped", "searched", "zero_bubble"] | None,
        typer.Option(
            metavar="NAME",
            help="Fix the schedule: 1f1b, gpipe, overlapped, zero_bubble, or searched, which makes one for each plan.",
        ),
    ] = None,
    runnable: Annotated[
        bool, typer.Option("--runnable", help="Only plans that the Isthmus runtime can execute.")
    ] = False,
    framework: Annotated[
        Framework | None,
        typer.Option("--for", metavar="|".join(get_args(Framework)), help="Only plans that export to this framework."),
    ] = None,
    stack: StackOption = None,
    save: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write each plan to its own file.")] = None,
) -> None:
    """Search for the best plans for a job; explain each choice and each rejection.

    If none fits, changes of the job and the pool are planned, and those with which a plan fits are listed: optimizer
    on the host, the other precision, lifted limits, more nodes. Ctrl-C stops the search and returns the best plans
    found so far.
    """
    given = read_job(job)
    if framework and runnable:
        raise InputError("--for excludes --runnable, which means the Isthmus runtime", hint="remove one of them")
    if weights is not None and objective != "time":
        raise InputError(f"both --weights and --objective {objective}", hint="give one of them")
    wanted = given.job
    if stack is not None:
        wanted = wanted.model_copy(update={"stack": read_stack_choice(stack, Path())})
    limits = SearchLimits(executable=runnable, tp=tp, pp=pp, dp=dp, micro_batch_size=micro_batch, schedule=schedule)
    on = load_pool(pool)
    with interruptible() as interrupted:
        started_s = time.monotonic()
        request = SearchRequest(
            job=wanted,
            model=given.model,
            pool=on,
            objective=objective,
            weights=None if weights is None else ObjectiveWeights.parse(weights),
            deadline_s=deadline,
            budget=budget,
            limits=limits,
            num_plans=top,
            should_continue=_SearchProgress(env, started_s, interrupted),
        )
        request = framework_request(request, framework) if framework else request
        answer = search_plans(request) if wanted.rl is None else plan_rollouts(request)
        seconds = time.monotonic() - started_s
        hints = [] if answer.plans or interrupted else _fitting_hints(env, request, interrupted)
    if save:
        _save_plans(save, answer.plans)
    record = answer.as_dict(seconds)
    runnable_ids = [one.id for one in answer.plans if runtime_incompatibility(one) is None]
    record["search"]["runnable"] = runnable_ids
    record["hints"] = [{"change": text, "iteration_s": step_s} for text, step_s in hints]
    record["notes"] = list(given.notes)
    profile = profile_model(given.model)
    choices = {one.id: choose_strategies(one, on, profile, calibration_for(on)) for one in answer.plans}
    record["synchronisation"] = {name: [choice.as_dict() for choice in found] for name, found in choices.items()}
    first = [f"{one.id}: {choice.why}" for one in answer.plans[:1] for choice in choices[one.id]]
    env.answer(record, lambda: search_page(answer, on, hints, runnable_ids, seconds, [*first, *given.notes]))


def _fitting_hints(env: CliEnvironment, request: SearchRequest, interrupted: list[int]) -> list[tuple[str, float]]:
    """Return what gives a request without a plan one: changes that the planner has tried, with their step time."""
    env.print_note("no plan fits; trying what would make one fit (Ctrl-C ends this)")
    end_s = time.monotonic() + HINTS_TIMEOUT_S
    found = suggest_changes(request, search_plans, lambda: not interrupted and time.monotonic() < end_s)
    return [(one.text, one.iteration_s) for one in found]


class _SearchProgress:
    """Callback of the search: reports progress once a second and stops it after Ctrl-C."""

    def __init__(self, env: CliEnvironment, started_s: float, interrupted: list[int]) -> None:
        self._env, self._due_s, self._interrupted = env, started_s + PROGRESS_INTERVAL_S, interrupted

    def __call__(self, tally: SearchStats, best: PlanLayout | None) -> bool:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + PROGRESS_INTERVAL_S
            found = f"best so far {format_seconds(best.estimate_s)} per step" if best else "no plan yet"
            self._env.print_note(f"{tally.evaluated} pipelines evaluated, {tally.pruned} pruned, {found}")
        return not self._interrupted


def _save_plans(folder: Path, plans: tuple[Plan, ...]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in plans:
            (folder / f"{one.id}.json").write_text(one.model_dump_json(indent=1), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error}", hint="choose another folder") from error


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus explain plan.json --pool pool.yaml",
        "isthmus explain plan.json --pool pool.yaml --picture plan.html",
    ],
)
def explain(
    env: CliEnvironment,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, hand-written or from `isthmus plan`.")],
    pool: Annotated[Path, typer.Option(metavar="FILE", help="The pool with the plan's clusters.")],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A folder or config.json (default: the plan's).")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a drawing: SVG, or a page with tables for FILE.html.")
    ] = None,
) -> None:
    """Explain a plan stage by stage: degrees, memory, bottleneck, idle time, what would make it faster or fit.

    A row per node group has its load ratio: the compute of its chips per layer and sample over that of the other
    groups. At 1 the load is even; above, the group waits for the others.
    """
    given = load_plan(plan)
    on, profile = load_pool(pool), profile_model(load_model(model_path(given, model)))
    if given.schedule == SEARCHED and not given.orders:
        given = with_searched_schedule(given, on, profile)
    forecast = predict(given, on, profile)
    sentences = plan_sentences(given, forecast)
    choices = choose_strategies(given, on, profile)
    sentences += [choice.why for choice in choices]
    loads = stage_group_loads(given, on, forecast)
    overfull = overfull_stages(given, on, forecast)
    hints = fitting_changes(given, on, profile) if overfull else ()
    sentences += [
        f"Stage {one.stage} on {given.stages[one.stage].cluster} needs {format_bytes(one.peak_bytes)} per chip, "
        f"more than the {format_bytes(one.limit_bytes)} usable of its {format_bytes(one.chip_bytes)}."
        for one in overfull
    ]
    if picture:
        is_page = picture.suffix in (".html", ".htm")
        drawn = plan_page(given, on, forecast, sentences) if is_page else draw_plan(given, on, forecast)
        try:
            picture.write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {picture}: {error}", hint="choose another file") from error
    answer = {
        "plan": given.id,
        "iteration_s": forecast.iteration_s,
        "mfu_fraction": forecast.mfu_fraction,
        "cost": forecast.cost,
        "currency": on.currency,
        "energy_j": plan_energy_j(given, on, forecast.result),
        "groups": [one.as_dict() for one in loads],
        "synchronisation": [choice.as_dict() for choice in choices],
        "sentences": sentences,
        "hints": [{"change": text, "iteration_s": step_s} for text, step_s in hints],
    }
    env.answer(answer, lambda: explain_page(given, on, forecast, loads, sentences, hints))


def plan_sentences(plan: Plan, forecast: PlanForecast) -> list[str]:
    """Return sentences that describe a plan and its bottlenecks."""
    step_s = forecast.iteration_s
    stages = " or ".join(dict.fromkeys(str(len(plan.pipeline(some[0]))) for some in plan.replica_kinds))
    head = f"{plan.id}: {plan.dp} replica{'s' if plan.dp > 1 else ''} of {stages} stages on "
    head += f"{', '.join(plan.clusters)}; {plan.num_samples} samples per step in {format_seconds(step_s)}."
    sentences = [
        head,
        *_stage_sentences(plan, forecast),
        *_replica_sentences(plan),
        *_schedule_sentences(plan),
        *_bottleneck_sentences(forecast),
    ]
    reason = runtime_incompatibility(plan)
    sentences.append(
        f"The Isthmus runtime cannot execute it: {reason}." if reason else "The Isthmus runtime can execute it."
    )
    return sentences


def _stage_sentences(plan: Plan, forecast: PlanForecast) -> Iterator[str]:
    for stage, cost in zip(plan.pipeline(0), forecast.stages, strict=True):
        recomputed = 0 if stage.recompute == "none" else stage.recompute_layers or stage.num_layers
        chip, pass_s = cost.chip_model.chip, cost.load.forward_s + cost.load.backward_s
        text = f"Layers {stage.layers[0]} to {stage.layers[1] - 1} on {stage.num_chips} {chip.name} of "
        text += f"{stage.cluster}: {format_seconds(pass_s)} per micro-batch"
        if recomputed:
            text += f", {recomputed} layers recomputed to fit {format_bytes(chip.memory_bytes)}"
        yield text + "."
    splits: dict[str, list[int]] = {}
    for replica in range(plan.dp):
        splits.setdefault("; ".join(map(_stage_placement, plan.pipeline(replica))), []).append(replica)
    for split, others in list(splits.items())[1:]:
        subject = f"Replica {others[0]} has" if len(others) == 1 else f"Replicas {', '.join(map(str, others))} have"
        yield f"{subject} {split}."


def _stage_placement(stage: Stage) -> str:
    last = stage.layers[1] - 1
    return f"layers {stage.layers[0]} to {last} on {stage.num_chips} {stage.node_group} of {stage.cluster}"


def _schedule_sentences(plan: Plan) -> Iterator[str]:
    """Yield what the stages of a searched schedule hold at most, by replica where orders differ."""
    for one in plan.orders:
        replica = one.replicas[0] if one.replicas else 0
        chunks = plan.num_chunks or 1
        schedule = make_schedule(
            plan.schedule, len(one.stages), plan.micro_batches_of(replica), num_chunks=chunks, orders=one.stages
        )
        peaks = ", ".join(f"{peak / chunks:g}" for peak in check_schedule(schedule))
        which = f"Replica {replica}'s" if one.replicas else "The"
        yield (
            f"{which} schedule was searched for its stages and links: they hold at most {peaks} micro-batches, "
            f"and the first one computes {one.stages[0][:MAX_SHOWN_ORDER]}"
            f"{' ...' if len(one.stages[0]) > MAX_SHOWN_ORDER else ''}."
        )


def _replica_sentences(plan: Plan) -> Iterator[str]:
    """Yield the batches of replicas where they differ, and the interval of local SGD."""
    kinds: dict[tuple[int, int], list[str]] = {}
    for replica in range(plan.dp):
        taken = plan.micro_batches_of(replica), plan.micro_batch_size_of(replica)
        kinds.setdefault(taken, []).append(str(replica))
    if len(kinds) > 1:
        for (count, size), replicas in kinds.items():
            subject = (
                f"Replica {replicas[0]} processes" if len(replicas) == 1 else f"Replicas {', '.join(replicas)} process"
            )
            yield f"{subject} {count} micro-batches of {size}."
    if plan.local_steps > 1:
        yield (
            f"{max(plan.replica_groups) + 1} replica groups without a common cluster each take "
            f"{plan.local_steps} local steps, then average their parameters (local SGD, which changes the "
            "training result)."
        )


def _bottleneck_sentences(forecast: PlanForecast) -> Iterator[str]:
    run, step_s = forecast.result, forecast.iteration_s
    slowest = max(run.stages, key=lambda one: one.busy_s)
    yield (
        f"Stage {slowest.stage} of replica {slowest.replica} on {slowest.cluster} is the bottleneck: busy "
        f"{slowest.busy_s / step_s:.0%} of the step."
    )
    waits = max(run.stages, key=lambda one: one.exposed_communication_s)
    if waits.exposed_communication_s > 0.01 * step_s:
        waited = format_seconds(waits.exposed_communication_s)
        yield (
            f"Stage {waits.stage} on {waits.cluster} waits {waited} for messages or gradients: a faster or "
            "shorter link would save up to that time."
        )
    idle = max(run.stages, key=lambda one: one.bubble_s)
    if idle.bubble_s > 0.01 * step_s:
        share = idle.bubble_s / step_s
        yield (
            f"Stage {idle.stage} on {idle.cluster} is idle for {share:.0%} of the step: more micro-batches "
            "or a more even split would reduce that."
        )
    for link in run.links:
        if link.num_bytes:
            yield f"{link.source} to {link.target} is {link.utilisation:.0%} utilised."
