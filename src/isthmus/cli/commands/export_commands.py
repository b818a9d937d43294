"""Commands for other training frameworks: export a plan, compare it with a run's log (`measured`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.command import command
from isthmus.cli.commands.plan_commands import (
    PANEL,
    CalibrationOption,
    ModelOption,
    PoolOption,
    model_path,
    read_calibration,
)
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.tables import table
from isthmus.client.read_job import pin_model
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_job, load_plan, load_pool
from isthmus.core.model import load_model
from isthmus.core.units import format_bytes, format_seconds
from isthmus.plan import (
    LogFormat,
    PlanExport,
    add_measured_run,
    command_job_text,
    compare_with_forecast,
    export_plan,
    measured_run,
    predict,
    read_training_log,
    summarise_log,
)

commands = typer.Typer()
Framework = Literal["megatron", "torchtitan", "isthmus"]


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus export plan.yaml --to megatron --pool pool.yaml --output run.sh",
        "isthmus export plan.yaml --to torchtitan --pool pool.yaml --job job.yaml --output plan_config.py",
        "isthmus export plan.yaml --to megatron --pool pool.yaml --json   (with the map of ranks)",
        "isthmus export plan.yaml --to megatron --pool pool.yaml -o run.sh --command-job job.yaml",
    ],
)
def export(
    env: CliEnvironment,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, hand-written or from `isthmus plan`.")],
    to: Annotated[Framework, typer.Option(metavar="|".join(get_args(Framework)), help="Target framework.")],
    job: Annotated[
        Path | None,
        typer.Option(metavar="JOB", help="Hyper-parameters (default: 50 iterations for measurement)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A folder or config.json (default: the job's or plan's)."),
    ] = None,
    pool: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The plan's pool, for the nodes of the launch command."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="Data in the framework's format (default: mock or test data)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write (default: print)."),
    ] = None,
    command_job: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a job that runs the file of --output in the pool."),
    ] = None,
) -> None:
    """Export a plan to Megatron-LM, torchtitan or the Isthmus runtime.

    If the framework cannot express the plan, explain why.
    """
    given = load_plan(plan)
    requested = pin_model(load_job(job), job.resolve().parent)[0] if job else None
    read = load_model(Path(model or (requested.model if requested else model_path(given, None))).resolve())
    if to != "isthmus" and pool is None:
        raise InputError(f"{to} needs a launch command per node", hint="give the pool with --pool")
    if command_job and output is None:
        raise InputError("--command-job needs the file that the job runs", hint="name it with --output")
    made = export_plan(to, given, read, load_pool(pool) if pool else None, job=requested, data=data)
    job_text = command_job_text(made, output) if command_job and output else None
    if output:
        _write_export(output, made)
    if command_job and job_text:
        _write_text(command_job, job_text)
    if env.as_json:
        env.print_json(made.as_dict())
        return
    for note in made.notes:
        env.print_note(f"note: {note}")
    if output:
        env.print(f"written to {output}" + (f" and {command_job}" if command_job else ""))
    else:
        env.write_text(made.text)


def _write_export(file: Path, made: PlanExport) -> None:
    if made.framework == "torchtitan" and not (file.suffix == ".py" and file.stem.isidentifier()):
        raise InputError(f"{file} is not a Python module name", hint="use a name such as plan_config.py")
    _write_text(file, made.text)


def _write_text(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error}", hint="choose a file in an existing folder") from error


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus measured plan.yaml --log train.log --pool pool.yaml",
        "isthmus measured plan.yaml --log train.log --pool pool.yaml --warm-up 20 --json",
        "isthmus measured plan.yaml --log train.log --pool pool.yaml --add runs.yaml   (for calibrate)",
    ],
)
def measured(
    env: CliEnvironment,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan that was run.")],
    log: Annotated[list[Path], typer.Option(metavar="FILE", help="Log of the run; several files are concatenated.")],
    pool: PoolOption,
    format: Annotated[  # noqa: A002
        LogFormat | None,
        typer.Option(metavar="|".join(get_args(LogFormat)), help="Format of the log (default: detected)."),
    ] = None,
    warm_up: Annotated[int, typer.Option(metavar="N", min=0, help="First iterations to skip.")] = 5,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
    add: Annotated[
        Path | None, typer.Option(metavar="RUNS", help="Add the run to this table, for `calibrate`.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run (default: the log's name).")] = None,
) -> None:
    """Compare a prediction with the log of a run by Megatron-LM, torchtitan, NeMo or the Isthmus runtime.

    The first iterations are skipped, and with them the logging intervals that contain them.
    """
    given, chosen, run = load_plan(plan), read_calibration(calibration), name or log[0].stem
    chosen.require_unseen(run)
    found = summarise_log(read_training_log(log_lines(log), given, format), warm_up)
    forecast = predict(given, load_pool(pool), load_model(model_path(given, model)), chosen)
    if add:
        if given.model is None:
            raise InputError(f"plan '{given.id}' has no model", hint="--add needs it; set `model` in the plan")
        add_measured_run(add, measured_run(found, name=run, plan=plan, pool=pool))
    answer = {"run": run, **compare_with_forecast(found, forecast)}
    env.answer(answer, lambda: _render_comparison(answer))


def log_lines(files: list[Path]) -> Iterator[str]:
    """Yield the lines of log files, one file after the other; raise `InputError` for one that cannot be read."""
    for file in files:
        try:
            with file.open(encoding="utf-8", errors="replace") as opened:
                yield from opened
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}", hint="check the path") from error


def _render_comparison(answer: dict[str, Any]) -> RenderableType:
    done, said = answer["measured"], answer["predicted"]
    band = f"{format_seconds(said['iteration_low_s'])} to {format_seconds(said['iteration_high_s'])}"
    spread = f"{format_seconds(done['min_s'])} to {format_seconds(done['max_s'])}"
    rows = [
        ("iteration", format_seconds(said["iteration_s"]), format_seconds(done["iteration_s"])),
        ("between", band, spread),
        ("standard deviation", "", format_seconds(done["stdev_s"])),
        ("tokens per card and second", *(f"{x['tgs_tokens_per_card_s']:,.0f}" for x in (said, done))),
        ("samples per second", *(f"{x['samples_per_s']:.4g}" for x in (said, done))),
        ("memory of the fullest chip", *(_bytes_text(x["peak_memory_bytes"]) for x in (said, done))),
        ("loss, first and last", "", _losses_text(done["first_loss"], done["last_loss"])),
    ]
    where = "within" if answer["within_band"] else "outside"
    foot = (
        f"{answer['run']}: predicted is {answer['predicted_over_measured']:.3f} of measured, "
        f"which is {where} the band; "
        f"{done['iterations']} iterations of {done['format']}, the first {done['skipped']} skipped"
    )
    return Group(table("", ("", "predicted", "measured"), rows, "predicted|measured"), Text(""), Text(foot))


def _bytes_text(num_bytes: float | None) -> str:
    return "not logged" if num_bytes is None else format_bytes(num_bytes)


def _losses_text(first_loss: float | None, last_loss: float | None) -> str:
    return "not logged" if first_loss is None or last_loss is None else f"{first_loss:.4g} > {last_loss:.4g}"
