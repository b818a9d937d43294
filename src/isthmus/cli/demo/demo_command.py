"""`isthmus demo`: train a model across three emulated clusters and measure the cost of the WAN links."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.follow_commands import job_snapshots, watch_job
from isthmus.cli.demo.demo_folder import as_seen_outside, demo_folder, stock_sites
from isthmus.cli.demo.demo_pool import DemoPool, run_module
from isthmus.cli.demo.efficiency import MeasuredSteps, efficiency_text, measure_steps, overran
from isthmus.cli.demo.wan_result import wan_record, wan_text
from isthmus.cli.demo.wide_area import DIRECT_FILE, WanMode, WideArea, wide_area
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.environment.interrupt import terminable
from isthmus.cli.job_report.write_report import write_report
from isthmus.cli.job_statistics import JobStatistics
from isthmus.cli.terminal.tables import plans_table, pool_table
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import IsthmusError
from isthmus.core.files.user_files import load_job, load_pool
from isthmus.core.job import Job
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.model import Model, load_model
from isthmus.core.plan import Plan
from isthmus.core.views.api_views import HistoryEvent, JobView, Submission

commands = typer.Typer()
PLANNING_LIMIT_S = 300.0
"""Longest wait for the planner."""

WAN_STEPS = 40
"""Steps with `--wan` unless stated: the comparison run takes as many."""

BASELINE_STEPS = 24
"""Steps of the comparison run without wide-area links."""


@dataclass(frozen=True)
class FinishedJob:
    """A finished job with all its metrics."""

    view: JobView
    stats: JobStatistics
    history: tuple[HistoryEvent, ...] = ()

    @property
    def steps(self) -> MeasuredSteps:
        """The steps that count."""
        return measure_steps(self.stats)


@command(
    commands,
    panel="Start here",
    examples=[
        "isthmus demo",
        "isthmus demo --state /tmp/demo --json",
        "isthmus demo --steps 40",
        "isthmus demo --wan gateway",
        "isthmus demo --wan proxy --steps 20 --json",
    ],
)
def demo(
    env: CliEnvironment,
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="Folder for the demo's files; emptied first.")
    ] = Path(".isthmus/demo"),
    steps: Annotated[int | None, typer.Option(metavar="N", min=10, help="Training steps (default: the job's).")] = None,
    wan: Annotated[
        WanMode | None,
        typer.Option(
            metavar="proxy|gateway",
            help="Cross lossy links through proxies, or through RoCE gateways (root), as pool.yaml states them.",
        ),
    ] = None,
) -> None:
    """Train a small model across three emulated clusters of three owners with a storage each; show the result.

    With --wan the links lose packets, and the sites reach each other through their proxies or RoCE gateways only, which
    the agents start by `pool.yaml` alone. As root each site is a network namespace. The same job is then trained
    without them: every loss has the same bits.
    """
    with terminable(), demo_folder(state) as folder:
        if wan is None:
            _run(env, folder, steps)
        else:
            with wide_area(folder, load_pool(folder / "pool.yaml"), wan) as area:
                _run(env, folder, steps or WAN_STEPS, area)


def _run(env: CliEnvironment, folder: Path, steps: int | None, area: WideArea | None = None) -> None:
    pool = load_pool(folder / "pool.yaml")
    job = load_job(folder / "job.yaml")
    if steps is not None:
        every = min(steps, job.training.evaluate_every)
        training = job.training.model_copy(update={"steps": steps, "evaluate_every": every})
        job = job.model_copy(update={"training": training})
    storage, model = folder / "sites", load_model(job.model)
    job = stock_sites(storage, job, pool)
    say = _heading_printer(env)
    # Step 1: start the pool and train across it.
    say("Starting three clusters of three owners and the wide-area links between them.")
    if area is not None and area.note:
        env.print_note(area.note)
    with DemoPool(folder, pool, storage, area.sites if area is not None else None) as processes:
        if not env.as_json:
            env.print(pool_table(processes.client.pool()))
        view, plan = _submit(env, processes.client, job, model)
        trained = _train(env, processes, view, plan)
        # Step 2: run the same plan without wide-area links.
        say("Running the same plan without wide-area links, for comparison.")
        crossed = _wait_crossed(env, area) if area is not None else []
        baseline = _run_baseline(env, processes, job, plan, model, whole=area is not None)
        pool_view = processes.client.pool()
    # Step 3: check the trained model and write the report.
    say("Checking that the checkpoint loads in transformers with the same loss.")
    job = as_seen_outside(job, storage / plan.stage_of(0).cluster)  # the result is at the site of the first stage
    check = _check_result(folder, job, trained.stats)
    report = folder / "report.html"
    extra = {
        "step with wide-area links": f"{trained.steps.step_s:.3f} s",
        "step without them": f"{baseline.steps.step_s:.3f} s",
        "efficiency": efficiency_text(trained.steps, baseline.steps),
        "loss in transformers": f"{check['loss']:.4f} (differs by {check['difference']:.1e})",
    }
    write_report(trained.view, trained.stats.metrics, pool_view, report, history=trained.history, extra=extra)
    result = _result_record(job, plan, trained, baseline) | {
        "checkpoint_loss_difference": check["difference"],
        "report": str(report),
    }
    if area is not None:
        result |= wan_record(area, crossed, trained.stats.series("loss"), baseline.stats.series("loss"))
    env.answer(result, lambda: _summary(result) + (wan_text(result) if area is not None else ""))


def _wait_crossed(env: CliEnvironment, area: WideArea) -> list[dict[str, object]]:
    """Return what has crossed once proxies and gateways have written it."""
    env.sleep(1.5)
    return area.crossed()


def training_s(stats: JobStatistics) -> float:
    """Return the total seconds of all training steps."""
    return sum(seconds for _, seconds in stats.series("step_s"))


def _heading_printer(env: CliEnvironment):  # type: ignore[no-untyped-def]
    """Return a function that prints a heading: on standard output, or on standard error with `--json`."""
    return env.print_note if env.as_json else lambda text: env.print(f"\n{text}")


def _submit(env: CliEnvironment, client: ApiClient, job: Job, model: Model) -> tuple[JobView, Plan]:
    """Submit the job, wait for its candidate plans, show them, and return the fastest."""
    view = _wait_planned(env, client, client.submit(Submission(job=job, model=model)))
    plans = client.plans(view.id)
    if not plans.plans:
        reasons = "; ".join(f"{'+'.join(one.clusters)}: {one.reason}" for one in plans.refused)
        raise IsthmusError(f"no plan found: {reasons}")
    if not env.as_json:
        env.print("\nNo single cluster has enough memory for the job. Candidate plans, predicted fastest first:")
        env.print(plans_table(plans))
    return view, plans.plans[0]


def _wait_planned(env: CliEnvironment, client: ApiClient, view: JobView) -> JobView:
    """Return the job once it is planned; raise `IsthmusError` after `PLANNING_LIMIT_S`."""
    deadline_s = env.now() + PLANNING_LIMIT_S
    while view.state == "planning":
        if env.now() > deadline_s:
            raise IsthmusError(
                f"job {view.id} is not planned after {PLANNING_LIMIT_S:g} s", hint="see the log of the server"
            )
        env.sleep(0.1)
        view = client.job(view.id)
    return view


def _train(env: CliEnvironment, site: DemoPool, view: JobView, plan: Plan) -> FinishedJob:
    _heading_printer(env)(f"Training with {plan.id} on {' - '.join(plan.clusters)}.")
    site.client.choose(view.id, plan.id)
    watch_job(env, site.client, view.id)
    return _wait_finished(env, site.client, view.id)


def _run_baseline(
    env: CliEnvironment, site: DemoPool, job: Job, plan: Plan, model: Model, *, whole: bool
) -> FinishedJob:
    """Run the plan without wide-area links; with `whole` for all steps, whose losses can then be compared."""
    if whole:
        site.restart_agents(site.folder / DIRECT_FILE)
    else:
        site.use_wide_area_links(False)
    steps = job.training.steps if whole else BASELINE_STEPS
    training = job.training.model_copy(update={"steps": steps, "evaluate_every": 0})
    short = job.model_copy(
        update={
            "name": "demo-without-wan",
            "training": training,
            "checkpoints": job.checkpoints.model_copy(update={"folder": "/baseline/checkpoints", "every_steps": 0}),
            "output": "/baseline/result",
        }
    )
    submitted = site.client.submit(Submission(job=short, model=model))
    view = _wait_planned(env, site.client, submitted)
    site.client.choose(view.id, plan.id)
    return _wait_finished(env, site.client, view.id)


def _wait_finished(env: CliEnvironment, client: ApiClient, job: str) -> FinishedJob:
    for snapshot in job_snapshots(env, client, job, 0.2):
        last = snapshot
    if last.view.state != "succeeded":
        raise IsthmusError(f"the demo's job {job} {last.view.state}: {last.view.reason}")
    return FinishedJob(last.view, last.stats, last.history)


def _check_result(folder: Path, job: Job, stats: JobStatistics) -> dict[str, float]:
    """Load the result in transformers in a separate process; compare its loss with the runtime's."""
    write_atomically(folder / "job.json", job.model_dump_json())
    printed = run_module(["isthmus.train.process.verify", str(folder / "job.json")], folder / "logs" / "verify.log")
    loss = float(json.loads(printed)["loss"])
    trained = stats.latest("validation_loss")
    if trained is None:
        raise IsthmusError("the run reported no validation loss to compare with")
    return {"loss": loss, "difference": abs(loss - trained)}


def _result_record(job: Job, plan: Plan, trained: FinishedJob, near: FinishedJob) -> dict[str, object]:
    """Return the demo's result, as printed with `--json`."""
    losses, linked, alone = trained.stats.series("loss"), trained.steps, near.steps
    return {
        "clusters": list(plan.clusters),
        "schedule": plan.schedule,
        "steps": job.training.steps,
        "loss_first": losses[0][1],
        "loss_last": losses[-1][1],
        "training_s": training_s(trained.stats),
        "iteration_s": linked.step_s,
        "predicted_iteration_s": plan.predicted.iteration_s if plan.predicted else None,
        "efficiency": alone.step_s / linked.step_s,
        "efficiency_text": efficiency_text(linked, alone),
        "machine_overran": overran(linked, alone),
        "overrun_s": linked.overrun_s,
        "checkpoint": job.output,
    }


def _summary(result: dict[str, object]) -> str:
    return (
        f"\nLoss {result['loss_first']:.2f} -> {result['loss_last']:.2f} nats per byte "
        f"in {result['steps']} steps, {result['training_s']:.0f} s.\n"
        f"Efficiency {result['efficiency_text']} "
        f"(schedule {result['schedule']}; virtual chips: computation is padded to their time).\n"
        f"Checkpoint {result['checkpoint']}: loads in transformers, its loss differs by "
        f"{result['checkpoint_loss_difference']:.1e}.\n"
        f"Report {result['report']}"
    )
