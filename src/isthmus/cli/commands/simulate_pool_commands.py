"""`isthmus simulate-pool`: simulate a job trace in a pool and with each owner alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer
from rich.console import Group, RenderableType

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.environment.interrupt import interruptible
from isthmus.cli.terminal.tables import table
from isthmus.control.algorithms.global_order import Objective
from isthmus.control.simulation.compare_scenarios import ScenarioComparison, compare_scenarios
from isthmus.control.simulation.pool_outcome import PoolOutcome
from isthmus.control.simulation.pool_simulation import Scenario
from isthmus.control.simulation.traces.generate_trace import generate_trace
from isthmus.control.simulation.traces.job_trace import Trace, read_trace
from isthmus.control.simulation.traces.trace_pools import CHIPS_PER_NODE, make_trace_pool
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_policy, load_pool
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.units import format_seconds

commands = typer.Typer()
PANEL = "Know before you run"
PROGRESS_INTERVAL_S = 1.0
DAY_S = 86_400.0
_Choice = TypeVar("_Choice")


@command(
    commands,
    panel=PANEL,
    name="simulate-pool",
    examples=[
        "isthmus simulate-pool --jobs 500 --owners 3",
        "isthmus simulate-pool --scenario pool --objective arrival --objective utilisation",
        "sacct -a -X -P -o JobID,Account,Submit,Elapsed,NNodes,ReqTRES,QOS > jobs.txt",
        "isthmus simulate-pool jobs.txt --pool pool.yaml --node-mtbf-days 200",
        "isthmus simulate-pool jobs.txt --pool pool.yaml --policy policy.yaml",
        "isthmus simulate-pool jobs.txt --limit 2000 --scenario home --json | jq .pool.p95_s",
    ],
)
def simulate_pool(
    env: CliEnvironment,
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="[TRACE]", help="Jobs from `sacct -P` or an Alibaba CSV (default: generated)."),
    ] = None,
    pool: Annotated[Path | None, typer.Option(metavar="FILE", help="The pool (default: sized for the load).")] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The policy of every owner (default: no limits, no moves).")
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="alone: each owner's own queue; home: own queue first, then the pool's; "
            "pool: one queue for all. Repeatable; default: all three.",
        ),
    ] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Objective of the pool's queue order: arrival, utilisation, throughput or deadline. "
            "Repeatable, for comparison.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Jobs to generate.")] = 1000,
    owners: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Owners of a generated trace or pool.")] = 3,
    load: Annotated[float, typer.Option(metavar="X", min=0.01, help="Offered load as a fraction of capacity.")] = 0.8,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Use only the first N jobs of the trace.")
    ] = None,
    node_mtbf_days: Annotated[
        float | None, typer.Option(metavar="D", min=0.1, help="Mean time between failures of a node.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(metavar="D", min=0.01, help="Stop each run after D simulated days.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed.")] = 0,
) -> None:
    """Simulate a job trace in a pool with the server's own coordinator on a virtual clock.

    Reports waiting time per owner, utilisation, preemptions and moves, for the pool and for each owner alone.
    Ctrl-C prints the results so far.
    """
    given = _read_trace(trace, limit) if trace else _generate_trace(owners, jobs, load, seed)
    comparison = ScenarioComparison(
        trace=given,
        pool=load_pool(pool) if pool else make_trace_pool(given, load, owners),
        scenarios=_select_named("scenario", get_args(Scenario), scenario) or get_args(Scenario),
        objectives=_select_named("objective", get_args(Objective), objective) or ("arrival",),
        node_mtbf_s=node_mtbf_days * DAY_S if node_mtbf_days else None,
        seed=seed,
        policy=load_policy(policy) if policy else OwnerPolicy(),
        until_s=days * DAY_S if days else None,
    )
    for reason, count in given.skipped.items():
        env.print_note(f"{count} rows skipped: {reason}")
    found = []
    with interruptible() as interrupted:
        for outcome in compare_scenarios(comparison, _SimulationProgress(env, len(given.jobs), interrupted)):
            found.append(outcome)
            if env.as_json:
                env.print_json(outcome.as_dict())
    if not env.as_json:
        env.print(_render_outcomes(found))


class _SimulationProgress:
    """Callback of a simulation: reports progress once a second and stops it after Ctrl-C."""

    def __init__(self, env: CliEnvironment, jobs: int, interrupted: list[int]) -> None:
        self._env, self._jobs, self._interrupted = env, jobs, interrupted
        self._due_s = time.monotonic() + PROGRESS_INTERVAL_S

    def __call__(self, scenario: Scenario, now_s: float, done: int) -> bool:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + PROGRESS_INTERVAL_S
            self._env.print_note(f"{scenario}: day {now_s / DAY_S:.1f}, {done} of {self._jobs} jobs done")
        return not self._interrupted


def _read_trace(path: Path, limit: int | None) -> Trace:
    trace = read_trace(path, limit)
    if not trace.jobs:
        raise InputError(f"{path} has no job that requested chips and ran", hint="choose another trace")
    return trace


def _generate_trace(owners: int, jobs: int, load: float, seed: int) -> Trace:
    """Return a generated trace with owners of different sizes."""
    chips = {f"owner-{number + 1}": CHIPS_PER_NODE * 8 * (number % 3 + 1) for number in range(owners)}
    return generate_trace(chips, seed=seed, num_jobs=jobs, load=load, chips_per_worker=CHIPS_PER_NODE)


def _select_named(what: str, known: tuple[_Choice, ...], names: list[str] | None) -> tuple[_Choice, ...]:
    """Return the entries of `known` listed in `names`; raise `InputError` for an unknown name."""
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise InputError(f"unknown {what} '{unknown[0]}'", hint=f"known: {', '.join(map(str, known))}")
    return tuple(one for one in known if one in (names or ()))


def _scenario_name(one: PoolOutcome) -> str:
    return f"{one.scenario}, {one.objective}" if one.objective else one.scenario


def _render_outcomes(outcomes: list[PoolOutcome]) -> RenderableType:
    runs = [
        (
            _scenario_name(one) + ("" if one.whole else " (interrupted)"),
            f"{one.pool.done}/{one.pool.num_jobs}",
            format_seconds(one.pool.mean_s),
            format_seconds(one.pool.p95_s),
            f"{100 * one.utilisation:.1f}%",
            str(one.preemptions),
            str(one.moves),
            str(one.failures),
            f"{one.ended_s / DAY_S:.1f}",
            f"{one.events_per_cpu_s:.0f}" if one.scenario != "alone" else "",
        )
        for one in outcomes
    ]
    columns = (
        "done",
        "mean wait",
        "p95 wait",
        "utilisation",
        "preempted",
        "moved",
        "node failures",
        "days",
        "events/CPU s",
    )
    totals = table("Totals", ("scenario", *columns), runs, right="|".join(columns))
    heads = ("owner", "jobs", *(f"{_scenario_name(one)}: mean, p95" for one in outcomes))
    rows = []
    for owner in sorted({waits.owner for one in outcomes for waits in one.owners}):
        theirs = [next(waits for waits in one.owners if waits.owner == owner) for one in outcomes]
        cells = [
            f"{format_seconds(waits.mean_s)}, {format_seconds(waits.p95_s)}" if waits.started else "never"
            for waits in theirs
        ]
        rows.append((owner, str(theirs[0].num_jobs), *cells))
    return Group(totals, "", table("Waits by owner", heads, rows, right="|".join(heads[1:])))
