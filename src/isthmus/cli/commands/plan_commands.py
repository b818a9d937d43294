"""Commands that predict a run: simulate, compare, profile, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.plan_pages import synchronisation_table
from isthmus.cli.terminal.rollouts_table import rollouts_table
from isthmus.cli.terminal.tables import table
from isthmus.client.read_job import read_job
from isthmus.core.chip import Chip, chip_catalogue
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_model_file, load_plan, load_pool, read_stack_choice
from isthmus.core.files.validation_errors import chip_hint
from isthmus.core.model import Model, load_model
from isthmus.core.plan import Plan, Prediction
from isthmus.core.pool import Pool
from isthmus.core.runs.cross_traffic import CrossTraffic
from isthmus.core.stack import find_stack, stack_names
from isthmus.core.units import format_bytes, format_seconds
from isthmus.plan import (
    DATA_SHEET,
    DEFAULT_STACK,
    Calibration,
    MeshDegrees,
    PlanForecast,
    RolloutRequest,
    TrainingMemory,
    choose_strategies,
    communication_matrix,
    forecast_rollouts,
    is_run_table,
    layer_matrix,
    load_calibration,
    load_runs,
    memory_table,
    parse_lengths,
    pipeline_bounds,
    predict,
    profile_model,
    render_communication,
    render_layer_matrix,
    serving_limits,
    stage_table,
    with_searched_schedule,
)
from isthmus.schedule import SEARCHED
from isthmus.sim import Interference, chrome_trace, timeline_page
from isthmus.strategies import find_strategy

commands = typer.Typer()
PANEL = "Know before you run"

PoolOption = Annotated[Path, typer.Option(metavar="FILE", help="The pool with the plan's clusters.")]
ModelOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="A folder or config.json (default: the plan's).")
]
CalibrationOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A calibration file (default: data sheets).")
]
StackOption = Annotated[
    str | None,
    typer.Option("--stack", metavar="NAME|FILE", help=f"The framework: {', '.join(stack_names())}, or a file."),
]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or config.json.")]


def read_calibration(path: Path | None) -> Calibration:
    """Return the calibration from a file, or the data-sheet calibration."""
    return load_calibration(path) if path else DATA_SHEET


def find_chips(names: list[str] | None, pool: Path | None) -> list[Chip]:
    """Return the named chips, or all, of the catalogue and the pool file; raise `InputError` for an unknown name."""
    known = {**chip_catalogue(), **({chip.name: chip for chip in load_pool(pool).chips} if pool else {})}
    for name in names or ():
        if name not in known:
            raise InputError(f"unknown chip '{name}'", hint=chip_hint(name, known))
    return [known[name] for name in dict.fromkeys(names or known)]


def model_path(plan: Plan, given: str | None) -> str:
    """Return the model path, `given` or the plan's; raise `InputError` if both are missing."""
    path = given or plan.model
    if path is None:
        raise InputError(f"plan '{plan.id}' has no model", hint="set `model` in the plan, or use --model")
    return path


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus simulate plan.yaml --pool pool.yaml",
        "isthmus simulate plan.yaml --pool pool.yaml --calibration a100.yaml --json",
        "isthmus simulate plan.yaml --pool pool.yaml --interfering traffic.yaml",
        "isthmus simulate plan.yaml --pool pool.yaml --trace trace.json --page timeline.html",
        "isthmus simulate plan.yaml --pool pool.yaml --stack megatron",
        "isthmus simulate plan.yaml --pool pool.yaml --sync passing",
        "isthmus simulate plan.yaml --pool pool.yaml --schedule searched --save searched.json",
        "isthmus simulate plan.json --pool pool.yaml --job sums.yaml   (rollouts of a job with task rl, too)",
    ],
)
def simulate(
    env: CliEnvironment,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, hand-written or from `isthmus plans`.")],
    pool: PoolOption,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
    stack: StackOption = None,
    job: Annotated[
        Path | None,
        typer.Option(metavar="JOB", help="The plan's job, of task rl: simulate rollouts beside training."),
    ] = None,
    interfering: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Traffic of others on the links: docs/guide/simulate.md.")
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Sum gradients by this strategy, such as psring: docs/guide/strategies.md."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Use this schedule instead of the plan's; searched makes one for the plan."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan with that schedule, without a prediction.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the links' jitter.")] = 0,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto.")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page with the timeline.")] = None,
) -> None:
    """Simulate one iteration of a plan: time, throughput, bubbles, communication, memory, links."""
    if sync is not None:
        find_strategy(sync)
    given = load_plan(plan)
    if stack is not None:
        given = given.model_copy(update={"stack": read_stack_choice(stack, Path())})
    if save and schedule is None:
        raise InputError("--save without --schedule", hint="name the schedule: the saved plan differs by it alone")
    if schedule is not None:
        given = given.model_copy(update={"schedule": schedule, "warm_up": (), "orders": ()})
    inputs = given, load_pool(pool), load_model(model_path(given, model)), read_calibration(calibration)
    if given.schedule == SEARCHED and not given.orders:
        given = with_searched_schedule(*inputs)
        inputs = given, *inputs[1:]
    others = _read_traffic(interfering, inputs[1]) if interfering else {}
    forecast = predict(*inputs, seed=seed, interference=others, details=bool(trace or page), synchronisation=sync)
    choices = choose_strategies(*inputs)
    bounds = pipeline_bounds(*inputs)
    step = _whole_step(job, given, inputs[1], inputs[2], forecast) if job else None
    if save:
        saved = given.model_copy(update={"predicted": None, "why": ""})
        _write_text(save, json.dumps(saved.as_document(), indent=1))
    if trace:
        _write_text(trace, json.dumps(chrome_trace(forecast.result)))
    if page:
        _write_text(page, timeline_page(forecast.result, f"{given.id}: one iteration"))
    path = (
        f"The critical path of a pipeline takes {format_seconds(bounds.critical_path_s)} "
        f"({bounds.critical_path_s / forecast.iteration_s:.0%} of the iteration); its operations and messages "
        f"one after another take {format_seconds(bounds.serial_s)}."
    )
    env.answer(
        {
            **forecast.as_dict(),
            "bounds": bounds._asdict(),
            "synchronisation": {"strategy": sync, "groups": [choice.as_dict() for choice in choices]},
            **({"rollouts": step.model_dump(mode="json")} if step else {}),
        },
        lambda: Group(
            render_forecast(forecast),
            *synchronisation_table(choices, sync),
            Text(""),
            Text(path),
            *((rollouts_table(step),) if step else ()),
        ),
    )


def _whole_step(job: Path, plan: Plan, pool: Pool, model: Model, forecast: PlanForecast) -> Prediction | None:
    """Return the prediction of a step of a job with task rl; raise `InputError` for another job."""
    wanted = read_job(job).job
    if wanted.rl is None:
        raise InputError(f"{job} has task {wanted.task}", hint="leave --job out: only rl has rollouts to simulate")
    request = RolloutRequest(job=wanted, pool=pool, profile=profile_model(model))
    return forecast_rollouts(request, plan, forecast).predicted


def _read_traffic(file: Path, pool: Pool) -> dict[tuple[str, str], Interference]:
    """Return the traffic of others by direction; raise `InputError` for one that the pool has no link for."""
    found = {}
    for flow in load_model_file(file, CrossTraffic).traffic:
        if pool.link(flow.source, flow.target) is None:
            known = ", ".join(f"{link.source} to {link.target}" for link in pool.links) or "none"
            raise InputError(f"{file}: no link from {flow.source} to {flow.target}", hint=f"links of the pool: {known}")
        rate = flow.gbps * 1e9 / 8
        found[flow.source, flow.target] = Interference(
            bytes_per_s=rate, start_s=flow.start_s, on_s=flow.on_s, off_s=flow.off_s
        )
    return found


def _write_text(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error}", hint="choose a file in an existing folder") from error


def _memory_text(forecast: PlanForecast) -> str:
    """Return what the fullest chip of the first replica allocates, with its band."""
    peaks = [memory.allocated_bytes for memory in forecast.memory]
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    low, high = (format_bytes(round(end)) for end in forecast.memory_bands[fullest])
    return f"Its fullest chip allocates {format_bytes(round(peaks[fullest]))} (90 % interval {low} to {high})."


def render_forecast(forecast: PlanForecast) -> RenderableType:
    """Render a forecast: a summary, the stages, the links and the assumptions."""
    head = (
        f"An iteration takes {format_seconds(forecast.iteration_s)} "
        f"(90 % interval {format_seconds(forecast.low_s)} to {format_seconds(forecast.high_s)}): "
        f"{forecast.tgs_tokens_per_card_s:,.0f} tokens per card and second, "
        f"{forecast.samples_per_s:.4g} samples/s. "
        f"{_memory_text(forecast)}"
    )
    total_s = forecast.iteration_s
    rows = [
        (
            f"{run.replica}/{run.stage}",
            run.cluster,
            *(f"{format_seconds(x)} ({x / total_s:.0%})" for x in (run.busy_s, run.bubble_s)),
            f"{format_seconds(run.exposed_communication_s)} ({run.exposed_communication_s / total_s:.0%})",
            format_bytes(run.peak_memory_bytes),
        )
        for run in forecast.result.stages
    ]
    columns = ("replica/stage", "cluster", "busy", "bubble", "exposed communication", "peak memory")
    shown: list[RenderableType] = [
        Text(head),
        Text(""),
        table("Stages", columns, rows, "|".join(columns[2:])),
    ]
    links = [
        (f"{link.source} > {link.target}", format_bytes(link.num_bytes), f"{link.utilisation:.1%}")
        for link in forecast.result.links
        if link.num_bytes
    ]
    if links:
        shown += [Text(""), table("Links", ("link", "per iteration", "utilisation"), links)]
    return Group(*shown, Text(""), *(Text(f"- {note}", style="dim") for note in forecast.assumptions))


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus compare near.yaml far.yaml --pool pool.yaml",
        "isthmus compare plan.yaml runs.yaml --pool pool.yaml   (a prediction and measured runs)",
    ],
)
def compare(
    env: CliEnvironment,
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another plan, or a table of measured runs of A.")],
    pool: PoolOption,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
) -> None:
    """Compare two plans, or a prediction with measured runs that its calibration was not fitted on."""
    chosen, read = read_calibration(calibration), load_pool(pool)

    def forecast(file: Path) -> PlanForecast:
        plan = load_plan(file)
        return predict(plan, read, load_model(model_path(plan, model)), chosen)

    first = forecast(a)
    if is_run_table(b):
        measured = [run for run in load_runs(b).runs if Path(run.plan).resolve() == a.resolve()]
        if not measured:
            raise InputError(f"{b} has no run of {a}", hint="give a table with runs of this plan")
        for run in measured:
            chosen.require_unseen(run.name)
        rows = [(run.name, run.iteration_s) for run in measured]
    else:
        rows = [(b.stem, forecast(b).iteration_s)]
    answer = {
        "calibration": chosen.name,
        "a": {"name": a.stem, "iteration_s": first.iteration_s},
        "b": [
            {"name": name, "iteration_s": seconds, "a_over_b": first.iteration_s / seconds} for name, seconds in rows
        ],
    }
    lines = [(a.stem, format_seconds(first.iteration_s), "1.000")]
    lines += [(name, format_seconds(s), f"{s / first.iteration_s:.3f}") for name, s in rows]
    env.answer(answer, lambda: table("", ("plan or run", "iteration", "relative to first"), lines))


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus profile config.json",
        "isthmus profile models/llama --sequence 8192 --json",
        "isthmus profile config.json --communication --json | jq '.communication_bytes[0][1]'",
    ],
)
def profile(
    env: CliEnvironment,
    model: ModelArgument,
    sequence: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Sequence length.")] = 4096,
    micro_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences per micro-batch.")] = 1,
    communication: Annotated[
        bool, typer.Option("--communication", help="Add the bytes that each layer sends to each other layer.")
    ] = False,
) -> None:
    """Print a model's parameter count and the compute, memory and communication of every part."""
    made = profile_model(load_model(model))
    tokens = micro_batch * sequence
    rows = layer_matrix(made, sequence_length=sequence, num_tokens=tokens)
    forward, backward = made.forward_flops(sequence, tokens), made.backward_flops(sequence, tokens)
    answer: dict[str, Any] = {
        "architecture": made.architecture,
        "layers": made.num_layers,
        "parameters": made.num_parameters,
        "active_parameters": made.active_parameters,
        "forward_flops": forward,
        "backward_flops": backward,
        "boundary_bytes": made.boundary_bytes(tokens, 2),
        "kv_cache_bytes_per_token": made.kv_cache_bytes_per_token(2),
        "parts": [{**vars(row), "intensity": row.intensity} for row in rows],
    }
    head = (
        f"{made.architecture}: {made.num_parameters:,} parameters ({made.active_parameters:,} per token), "
        f"{made.num_layers} layers; a micro-batch of {tokens:,} tokens takes {forward / 1e12:.4g} + "
        f"{backward / 1e12:.4g} TFLOP\n\n"
    )
    text = head + render_layer_matrix(rows)
    if communication:
        matrix = communication_matrix(made, tokens)
        answer["communication_bytes"] = matrix
        text += "\n\n" + render_communication(matrix)
    env.answer(answer, lambda: text)


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus memory config.json --parallel tp=4,pp=4,cp=4,ep=32 --sequence 32768",
        "isthmus memory config.json --parallel tp=8 --sequence 8192 --inference --json",
        "isthmus memory config.json --parallel tp=8 --inference --chip H20 --lengths 1024,2048,32768",
        "isthmus memory config.json --parallel tp=4,pp=4 --sequence 32768 --accounting report",
        "isthmus memory config.json --parallel dp=8 --sequence 8192 --stack torchtitan --zero 3 --chip H100",
    ],
)
def memory(
    env: CliEnvironment,
    model: ModelArgument,
    parallel: Annotated[str, typer.Option(metavar="DEGREES", help="Such as tp=4,pp=4,cp=4,ep=32.")] = "tp=1",
    sequence: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Sequence length.")] = 4096,
    inference: Annotated[bool, typer.Option("--inference", help="Weights only, no training state.")] = False,
    accounting: Annotated[
        Literal["default", "report"], typer.Option(metavar="default|report", help="Accounting rules.")
    ] = "default",
    stack: StackOption = None,
    zero: Annotated[int, typer.Option(min=0, max=3, metavar="N", help="ZeRO stage over dp and cp.")] = 0,
    micro_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences per micro-batch.")] = 1,
    precision: Annotated[
        Literal["bf16", "fp32", "fp8", "mxfp8", "nvfp4"],
        typer.Option(metavar="bf16|fp32|fp8|mxfp8|nvfp4", help="Precision of products."),
    ] = "bf16",
    recompute: Annotated[
        Literal["none", "selective", "full"],
        typer.Option(metavar="none|selective|full", help="Activations that the backward pass recomputes."),
    ] = "none",
    chip: Annotated[
        str | None,
        typer.Option(metavar="CHIP", help="Whether training fits on it; with --inference, the sequences that fit."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="TOKENS,...", help="Measured lengths, with --chip (default: --sequence).")
    ] = None,
) -> None:
    """Print memory per chip: by stage as the stack keeps it, weights by group, activations of a layer, KV cache."""
    if lengths is not None and (chip is None or not inference):
        raise InputError("--lengths without --chip and --inference", hint="they count sequences that a chip serves")
    degrees = MeshDegrees.parse(parallel)
    read, on = load_model(model), find_chips([chip], None)[0] if chip is not None else None
    answer = memory_table(read, degrees, sequence_length=sequence, inference=inference, accounting=accounting)
    if not inference and accounting == "default":
        training = TrainingMemory(
            sequence_length=sequence, stack=find_stack(read_stack_choice(stack or DEFAULT_STACK, Path())),
            micro_batch_size=micro_batch, precision=precision, zero=cast("Literal[0, 1, 2, 3]", zero),
            recompute=recompute,
        )  # fmt: skip
        answer["stages"] = stage_table(read, degrees, training, on)
        if zero or training.stack.name != DEFAULT_STACK:
            answer["per_chip"] |= _largest_stage(answer["stages"])
    elif stack is not None or zero:
        raise InputError("--stack and --zero are of training", hint="leave out --inference and --accounting report")
    if on is not None and inference:
        sample = parse_lengths(lengths) if lengths is not None else (sequence,)
        answer["concurrent_sequences"] = serving_limits(answer, on.memory_bytes, sample)
    env.answer(answer, lambda: table("", ("item", "bytes", ""), _flatten(answer), "bytes"))


def _largest_stage(stages: list[dict[str, float]]) -> dict[str, float]:
    """Return gradients, optimizer and static bytes of the stage with the largest state."""
    names = ("weights", "gradients", "optimizer")
    largest = max(stages, key=lambda stage: sum(stage[name] for name in names))
    return {
        "gradients": largest["gradients"],
        "optimizer": largest["optimizer"],
        "static": sum(largest[name] for name in names),
    }


_COUNTS = frozenset(
    {"in_flight", "fits", "layers_per_chip", "by_maximum", "by_mean", "by_distribution", "tightest_length"}
)
"""Entries of the table that are no bytes."""


def _flatten(value: dict[str, Any], path: str = "") -> list[tuple[str, str, str]]:
    """Flatten a nested table into rows; byte values also get binary units."""
    rows = []
    for key, one in value.items():
        name = f"{path}{key}"
        if isinstance(one, dict):
            rows += _flatten(one, f"{name}.")
        elif isinstance(one, list):
            for index, each in enumerate(one):
                rows += _flatten(each, f"{name}.{index}.")
        elif isinstance(one, str) or key in _COUNTS:
            rows.append((name, one if isinstance(one, str) else f"{one:g}", ""))
        else:
            rows.append((name, f"{one:,.0f}", format_bytes(one)))
    return rows
