"""`isthmus calibrate`: fit the parameters of the time model to runs, or to micro-benchmarks made here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.command import verb
from isthmus.cli.commands.measure_links import Routes, measure_links, measure_messages
from isthmus.cli.commands.plan_commands import PANEL, CalibrationOption, read_calibration
from isthmus.cli.shell.shell import Shell
from isthmus.cli.terminal.tables import table
from isthmus.core.chip import catalogue
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.files.user_files import load_pool
from isthmus.core.model import load_model
from isthmus.core.pool import Pool
from isthmus.plan import Calibration, fit_calibration, profile_model, save_calibration
from isthmus.plan.time.measured_runs import RunTable, load_runs, observations
from isthmus.plan.time.measured_shapes import with_shapes
from isthmus.plan.time.micro_benchmarks import Measurement, calibrate_chip, with_links
from isthmus.plan.time.parameters import PARAMETERS

commands = typer.Typer()
FITTED = "matmul_share,wan_share"


class Parts(NamedTuple):
    """Whose parts are timed too, and in what size: `micro_batch` samples of `sequence` tokens."""

    model: Path
    micro_batch: int
    sequence: int

    def options(self) -> list[str]:
        """Return them as the micro-benchmarks' process takes them."""
        size = ["--micro-batch", str(self.micro_batch), "--sequence", str(self.sequence)]
        return ["--model", str(self.model), *size]


@verb(
    commands,
    panel=PANEL,
    examples=[
        "isthmus calibrate runs.yaml --fit H20/matmul_share,wan_share --output ours.yaml",
        "isthmus calibrate --measure --chip CPU-core --output here.yaml",
        "isthmus calibrate --measure --pool pool.yaml --output here.yaml",
        "isthmus calibrate --measure --model config.json --micro-batch 1 --sequence 256 --copies 2",
    ],
)
def calibrate(
    shell: Shell,
    runs: Annotated[
        Path | None, typer.Argument(metavar="[RUNS]", help="A table of measured iterations (YAML).")
    ] = None,
    fit: Annotated[str, typer.Option(metavar="NAMES", help="Parameters to fit, by comma.")] = FITTED,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run micro-benchmarks of this machine's chip instead.")
    ] = False,
    chip: Annotated[
        str, typer.Option(metavar="CHIP", help="What this machine's chip is called.")
    ] = "CPU-core",
    pool: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --measure: measure the links of this pool too.")
    ] = None,
    routes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The routes.json of a running emulator of that pool.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="With --measure: time the parts of this model too, in fp32."),
    ] = None,
    micro_batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Samples of a micro-batch of that model.")
    ] = 1,
    sequence: Annotated[
        int, typer.Option(metavar="TOKENS", min=1, help="Length of a sample of that model.")
    ] = 128,
    copies: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Measure so many cores at once, each with a copy, as a run uses them."
        ),
    ] = 1,
    base: CalibrationOption = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the calibration.")] = "measured",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write it; printed without it."),
    ] = None,
) -> None:
    """Fit parameters of the time model, with their uncertainty, and write a calibration file.

    The file names what it was fitted on; its predictions are never compared with that.
    """
    if measure == (runs is not None):
        raise InputError("give a table of runs, or --measure", hint="one of the two")
    start = read_calibration(base)
    if runs is not None:
        keys = [key.strip() for key in fit.split(",") if key.strip()]
        read = load_runs(runs)
        _require_known(keys, read)
        made = fit_calibration(start, keys, observations(read), name=name, source=read.source)
    else:
        links = None if pool is None else (load_pool(pool), _routes(routes))
        made = _measured(chip, name, start, copies, Parts(model, micro_batch, sequence) if model else None)
        if links is not None:
            made = _with_links(made, *links, model, micro_batch * sequence)
    if output:
        save_calibration(made, output)
    shell.answer(made, lambda: _shown(made, output))


def _routes(file: Path | None) -> Routes | None:
    if file is None:
        return None
    try:
        read: Routes = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(
            f"{file} holds no routes: {error}", hint="name the routes.json of the emulator"
        ) from error
    return read


def _require_known(keys: list[str], runs: RunTable) -> None:
    """Raise `InputError` for a parameter, or for a chip or link, of which the runs say nothing."""
    if not keys:
        raise InputError("no parameter to fit", hint="name some with --fit, of " + ", ".join(PARAMETERS))
    pools = [load_pool(run.pool) for run in runs.runs]
    chips = [pool.chip(group).name for pool in pools for one in pool.clusters for group in one.node_groups]
    places = dict.fromkeys([*chips, *(f"{one.source}>{one.target}" for pool in pools for one in pool.links)])
    for key in keys:
        scope, slash, name = key.rpartition("/")
        if name not in PARAMETERS:
            raise InputError(f"unknown parameter '{key}'", hint="known are " + ", ".join(PARAMETERS))
        if slash and scope.partition(":")[0] not in places:
            raise InputError(f"'{key}': no run has '{scope}'", hint="the runs have " + ", ".join(places))


def _with_links(
    made: Calibration, pool: Pool, routes: Routes | None, model: Path | None, tokens: int
) -> Calibration:
    """Return `made` with the links of `pool`; with routes to links at work, single messages too."""
    shares = measure_links(pool, routes)
    messages = {}
    if routes is not None:
        size = {} if model is None else {"num_bytes": 4 * tokens * load_model(model).hidden_size}
        messages = measure_messages(pool, routes, **size)
    return with_links(
        made,
        {f"{a}>{b}": found for (a, b), found in shares.items()},
        {f"{a}>{b}": found for (a, b), found in messages.items()},
    )


def _measured(chip: str, name: str, start: Calibration, copies: int, parts: Parts | None) -> Calibration:
    """Return `start` with the parameters of a chip as worker processes measure them here, all at once."""
    known = catalogue()
    if chip not in known:
        raise InputError(f"unknown chip '{chip}'", hint="known are " + ", ".join(known))
    found = _measurements(copies, parts.options() if parts else ())
    made = calibrate_chip(known[chip], found[0], name=name)
    made = made.model_copy(update={"parameters": {**start.parameters, **made.parameters}})
    if parts is None:
        return made
    shapes = [one.shape for one in found if one.shape is not None]
    profile = profile_model(load_model(parts.model))
    return with_shapes(made, known[chip], profile, found[0].precision, shapes)


def _measurements(copies: int, options: Sequence[str]) -> list[Measurement]:
    """Run the micro-benchmarks `copies` times at once; several have a core each."""
    command = [sys.executable, "-m", "isthmus.train.measure.measure_chip", *options]
    pinned = [["--core", str(core)] if copies > 1 else [] for core in range(copies)]
    processes = [
        subprocess.Popen([*command, *own], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for own in pinned
    ]
    printed = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, printed, strict=True):
        if process.returncode:
            last = (errors.strip().splitlines() or ["it said nothing"])[-1]
            raise UnavailableError(f"the micro-benchmarks failed: {last}", hint="install isthmus[train]")
    return [Measurement.model_validate_json(out) for out, _ in printed]


def _shown(made: Calibration, output: Path | None) -> RenderableType:
    rows = [
        (key, f"{one.value:.4g}", f"± {one.relative:.0%}", PARAMETERS[key.rpartition("/")[2]].text)
        for key, one in made.parameters.items()
    ]
    where = f"written to {output}" if output else "not written: name a file with --output"
    fitted = (
        f"{made.name}: fitted on {len(made.fitted_on)} runs, which it leaves {made.residual:.1%} off; {where}"
    )
    return Group(
        table("", ("parameter", "value", "uncertainty", "meaning"), rows, "value"), Text(""), Text(fitted)
    )
