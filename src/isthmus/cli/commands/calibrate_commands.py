"""`isthmus calibrate`: fit time-model parameters to measured runs or to micro-benchmarks of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.command import command
from isthmus.cli.commands.fit_runs import fit_runs, read_runs, render_fit
from isthmus.cli.commands.measure_links import Routes, measure_links, measure_messages
from isthmus.cli.commands.plan_commands import PANEL, CalibrationOption, read_calibration
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.tables import table
from isthmus.core.bounded_file import read_within
from isthmus.core.chip import chip_catalogue
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.files.user_files import load_pool
from isthmus.core.files.validation_errors import chip_hint
from isthmus.core.model import load_model
from isthmus.core.pool import Pool
from isthmus.plan import (
    TIME_MODEL_PARAMETERS,
    Calibration,
    Measurement,
    calibrate_chip,
    calibrate_links,
    calibrate_shapes,
    profile_model,
    save_calibration,
)

commands = typer.Typer()


class PartsBenchmark(NamedTuple):
    """The model whose parts are benchmarked, with `micro_batch` samples of `sequence` tokens."""

    model: Path
    micro_batch: int
    sequence: int

    def process_options(self) -> list[str]:
        """Return the command-line options for the benchmark process."""
        size = ["--micro-batch", str(self.micro_batch), "--sequence", str(self.sequence)]
        return ["--model", str(self.model), *size]


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus calibrate --from train.log --plan plan.yaml --pool pool.yaml --output ours.yaml",
        "isthmus calibrate runs.yaml --output ours.yaml",
        "isthmus calibrate runs.yaml --fit 'H20/matmul_share,a<>b/wan_share,shape_time' --json",
        "isthmus calibrate --measure --chip CPU-core --output here.yaml",
        "isthmus calibrate --measure --pool pool.yaml --output here.yaml",
        "isthmus calibrate --measure --model config.json --micro-batch 1 --sequence 256 --copies 2",
    ],
)
def calibrate(
    env: CliEnvironment,
    runs: Annotated[
        Path | None, typer.Argument(metavar="[RUNS]", help="A table of measured iterations (YAML).")
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="LOG", help="Log of a run of --plan: Megatron-LM, torchtitan, NeMo, Isthmus."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="With --from: the plan that was run, with its model.")
    ] = None,
    warm_up: Annotated[int, typer.Option(metavar="N", min=0, help="With --from: first iterations to skip.")] = 5,
    fit: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Parameters to fit, comma-separated (default: all that the runs use)."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run micro-benchmarks on this machine's chip instead.")
    ] = False,
    chip: Annotated[str, typer.Option(metavar="CHIP", help="Name of this machine's chip.")] = "CPU-core",
    pool: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --from: the plan's pool. With --measure: also measure its links."),
    ] = None,
    routes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The routes.json of a running emulator of that pool.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="With --measure: also time the parts of this model, in fp32."),
    ] = None,
    micro_batch: Annotated[int, typer.Option(metavar="N", min=1, help="Samples per micro-batch of that model.")] = 1,
    sequence: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens per sample of that model.")] = 128,
    copies: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Benchmark N cores at once, as a training run uses them."),
    ] = 1,
    base: CalibrationOption = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the calibration.")] = "measured",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Calibration file to write (default: print)."),
    ] = None,
) -> None:
    """Fit the time model to measured runs, and say what they taught; or measure this machine's chip.

    Every run narrows what it informs; other parameters keep their priors (`--base`, or data sheets). Shapes of
    layers and memory are fitted as well. The file lists the runs it was fitted on, which are excluded from comparisons
    with its predictions. The answer names what was learned, what was not, and the runs that would teach most.
    """
    if measure == (runs is not None or bool(logs)):
        raise InputError("give a table of runs, --from or --measure", hint="--measure excludes the other two")
    start = read_calibration(base)
    if not measure:
        made, report = fit_runs(read_runs(runs, logs or [], plan, pool, warm_up), start, fit, name)
        if output:
            save_calibration(made, output)
        answer = made.model_dump(mode="json") | {"report": report.as_dict()}
        env.answer(answer, lambda: render_fit(made, report, output))
        return
    links = None if pool is None else (load_pool(pool), _read_routes(routes))
    made = _measure_chip(chip, name, start, copies, PartsBenchmark(model, micro_batch, sequence) if model else None)
    if links is not None:
        made = _add_links(made, *links, model, micro_batch * sequence)
    if output:
        save_calibration(made, output)
    env.answer(made, lambda: _render_calibration(made, output))


def _read_routes(file: Path | None) -> Routes | None:
    if file is None:
        return None
    try:
        read: Routes = json.loads(read_within(file).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"cannot read routes from {file}: {error}", hint="give the routes.json of the emulator"
        ) from error
    return read


def _add_links(made: Calibration, pool: Pool, routes: Routes | None, model: Path | None, tokens: int) -> Calibration:
    """Return `made` with link measurements of `pool`; with `routes` also message times."""
    shares = measure_links(pool, routes)
    messages = {}
    if routes is not None:
        size = {} if model is None else {"num_bytes": 4 * tokens * load_model(model).hidden_size}
        messages = measure_messages(pool, routes, **size)
    return calibrate_links(
        made,
        {f"{a}>{b}": found for (a, b), found in shares.items()},
        {f"{a}>{b}": found for (a, b), found in messages.items()},
    )


def _measure_chip(chip: str, name: str, start: Calibration, copies: int, parts: PartsBenchmark | None) -> Calibration:
    """Return `start` with chip parameters measured by `copies` concurrent processes on this machine."""
    known = chip_catalogue()
    if chip not in known:
        raise InputError(f"unknown chip '{chip}'", hint=chip_hint(chip, known))
    found = _run_benchmarks(copies, parts.process_options() if parts else ())
    made = calibrate_chip(known[chip], found[0], name=name)
    made = made.model_copy(update={"parameters": {**start.parameters, **made.parameters}})
    if parts is None:
        return made
    shapes = [one.shape for one in found if one.shape is not None]
    profile = profile_model(load_model(parts.model))
    return calibrate_shapes(made, known[chip], profile, found[0].precision, shapes)


BENCHMARK_LIMIT_S = 3600.0
"""Longest run of the micro-benchmarks of one chip."""


def _run_benchmarks(copies: int, options: Sequence[str]) -> list[Measurement]:
    """Run `copies` benchmark processes concurrently; several are pinned to one core each."""
    argv = [sys.executable, "-m", "isthmus.train.measure.measure_chip", *options]
    core_options = [["--core", str(core)] if copies > 1 else [] for core in range(copies)]
    processes = [
        subprocess.Popen([*argv, *core], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603 - this Python with a module of this package
        for core in core_options
    ]
    deadline_s = time.monotonic() + BENCHMARK_LIMIT_S
    try:
        printed = [process.communicate(timeout=max(0.0, deadline_s - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"the micro-benchmarks have not finished within {BENCHMARK_LIMIT_S:g} s", hint="see that the chip is idle"
        ) from error
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, printed, strict=True):
        if process.returncode:
            last = (errors.strip().splitlines() or ["no error output"])[-1]
            raise UnavailableError(f"the micro-benchmarks failed: {last}", hint="install isthmus[train]")
    return [Measurement.model_validate_json(out) for out, _ in printed]


def _render_calibration(made: Calibration, output: Path | None) -> RenderableType:
    rows = [
        (key, f"{one.value:.4g}", f"± {one.relative:.0%}", TIME_MODEL_PARAMETERS[key.rpartition("/")[2]].description)
        for key, one in made.parameters.items()
    ]
    where = f"written to {output}" if output else "not written; use --output FILE"
    fitted = f"{made.name}: {len(made.fitted_on)} micro-benchmarks; {where}"
    return Group(table("", ("parameter", "value", "uncertainty", "meaning"), rows, "value"), Text(""), Text(fitted))
