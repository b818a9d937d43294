"""`isthmus demo`: a model trained across three emulated clusters, and what the distance cost."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.client.api_client import Client
from isthmus.cli.command import verb
from isthmus.cli.commands.follow_commands import snapshots, watch_job
from isthmus.cli.demo.demo_folder import demo_folder
from isthmus.cli.demo.demo_pool import DemoPool, run_tool
from isthmus.cli.figures import Figures
from isthmus.cli.job_report.write_report import write_report
from isthmus.cli.shell.shell import Shell
from isthmus.cli.terminal.tables import plans_table, pool_table
from isthmus.core.errors import IsthmusError
from isthmus.core.files.user_files import load_job, load_pool
from isthmus.core.job import Job
from isthmus.core.messages.api_views import JobView, Submission
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.model import load_model
from isthmus.core.plan import Plan

commands = typer.Typer()
BASELINE_STEPS = 24
"""Steps of the run without wide-area links."""
WARM_UP_STEPS = 4
"""Steps at the beginning that are not counted: first allocations, connections."""
CALM = 0.05
"""A step is disturbed where real computing took this share of it longer than the virtual chips would."""
FEWEST_CALM_STEPS = 5
"""With fewer undisturbed steps than this, all are counted."""


@dataclass(frozen=True)
class Outcome:
    """A job that has ended, with all its figures."""

    view: JobView
    figures: Figures

    @property
    def step_s(self) -> float:
        """Median seconds of an undisturbed step (of all steps, where hardly any was undisturbed)."""
        steps = {step: s for step, s in self.figures.series("step_s") if step >= WARM_UP_STEPS}
        overruns = dict(self.figures.series("overrun_s"))
        calm = [s for step, s in steps.items() if overruns.get(step, 0.0) <= CALM * s]
        return statistics.median(calm if len(calm) >= FEWEST_CALM_STEPS else steps.values())


@verb(
    commands,
    panel="Start here",
    examples=["isthmus demo", "isthmus demo --state /tmp/demo --json", "isthmus demo --steps 40"],
)
def demo(
    shell: Shell,
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="Gets the demo's files; emptied first.")
    ] = Path(".isthmus/demo"),
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=10, help="Training steps, instead of the job's.")
    ] = None,
) -> None:
    """Train a small model across three emulated clusters of three owners, and show what it came to."""
    with demo_folder(state) as folder:
        _run(shell, folder, steps)


def _run(shell: Shell, folder: Path, steps: int | None) -> None:
    pool = load_pool(folder / "pool.yaml")
    job = load_job(folder / "job.yaml")
    if steps is not None:
        job = job.model_copy(update={"training": job.training.model_copy(update={"steps": steps})})
    say = _speaker(shell)
    say("Starting three clusters of three owners, and the wide-area links between them.")
    with DemoPool(folder, pool) as site:
        if not shell.as_json:
            shell.print(pool_table(site.client.pool()))
        view, plan = _submit(shell, site.client, job)
        trained = _train(shell, site, view, plan)
        say("The same plan with the wide-area links taken out, for comparison.")
        near = _run_baseline(shell, site, job, plan)
        pool_view = site.client.pool()
    say("Does the checkpoint load in transformers, with the same loss?")
    check = _check_result(folder, job, trained.figures)
    report = folder / "report.html"
    extra = {
        "step with wide-area links": f"{trained.step_s:.3f} s",
        "step without them": f"{near.step_s:.3f} s",
        "efficiency": f"{near.step_s / trained.step_s:.1%} of the same plan without wide-area links",
        "loss in transformers": f"{check['loss']:.4f} (differs by {check['difference']:.1e})",
    }
    write_report(trained.view, trained.figures.metrics, pool_view, report, extra=extra)
    result = _result(job, plan, trained, near) | {
        "checkpoint_loss_difference": check["difference"],
        "report": str(report),
    }
    shell.answer(result, lambda: _summary(result))


def training_s(figures: Figures) -> float:
    """Return the seconds that all training steps took together."""
    return sum(seconds for _, seconds in figures.series("step_s"))


def _speaker(shell: Shell):  # type: ignore[no-untyped-def]
    """Return how the demo speaks: headings on standard output, or on standard error beside JSON."""
    return shell.note if shell.as_json else lambda text: shell.print(f"\n{text}")


def _submit(shell: Shell, client: Client, job: Job) -> tuple[JobView, Plan]:
    """Submit the job, wait for its candidate plans, show them, and return the fastest."""
    view = client.submit(Submission(job=job, model=load_model(job.model)))
    while view.state == "planning":
        shell.sleep(0.1)
        view = client.job(view.id)
    plans = client.plans(view.id)
    if not plans.plans:
        reasons = "; ".join(f"{'+'.join(one.clusters)}: {one.reason}" for one in plans.refused)
        raise IsthmusError(f"no plan: {reasons}")
    if not shell.as_json:
        shell.print("\nNo single cluster can hold the job. Candidate plans, predicted fastest first:")
        shell.print(plans_table(plans))
    return view, plans.plans[0]


def _train(shell: Shell, site: DemoPool, view: JobView, plan: Plan) -> Outcome:
    _speaker(shell)(f"Training with {plan.id} on {' - '.join(plan.clusters)}.")
    site.client.choose(view.id, plan.id)
    watch_job(shell, site.client, view.id)
    return _outcome(shell, site.client, view.id)


def _run_baseline(shell: Shell, site: DemoPool, job: Job, plan: Plan) -> Outcome:
    site.use_wide_area_links(False)
    folder = site.folder / "baseline"
    training = job.training.model_copy(update={"steps": BASELINE_STEPS, "evaluate_every": 0})
    short = job.model_copy(
        update={
            "name": "demo-without-wan",
            "training": training,
            "checkpoints": job.checkpoints.model_copy(
                update={"folder": str(folder / "checkpoints"), "every_steps": 0}
            ),
            "output": str(folder / "result"),
        }
    )
    view = site.client.submit(Submission(job=short, model=load_model(job.model)))
    while view.state == "planning":
        shell.sleep(0.1)
        view = site.client.job(view.id)
    site.client.choose(view.id, plan.id)
    return _outcome(shell, site.client, view.id)


def _outcome(shell: Shell, client: Client, job: str) -> Outcome:
    for look in snapshots(shell, client, job, 0.2):
        last = look
    if last.view.state != "succeeded":
        raise IsthmusError(f"the demo's job {job} {last.view.state}: {last.view.reason}")
    return Outcome(last.view, last.figures)


def _check_result(folder: Path, job: Job, figures: Figures) -> dict[str, float]:
    """Load the result in transformers, in a process of its own, and compare its loss with the runtime's."""
    write_atomically(folder / "job.json", job.model_dump_json())
    printed = run_tool(
        ["isthmus.train.process.verify", str(folder / "job.json")], folder / "logs" / "verify.log"
    )
    loss = float(json.loads(printed)["loss"])
    trained = figures.last("validation_loss")
    if trained is None:
        raise IsthmusError("the run reported no validation loss to compare with")
    return {"loss": loss, "difference": abs(loss - trained)}


def _result(job: Job, plan: Plan, trained: Outcome, near: Outcome) -> dict[str, object]:
    """Return the demo's figures, as its last line of JSON has them."""
    losses = trained.figures.series("loss")
    return {
        "clusters": list(plan.clusters),
        "schedule": plan.schedule,
        "steps": job.training.steps,
        "loss_first": losses[0][1],
        "loss_last": losses[-1][1],
        "training_s": training_s(trained.figures),
        "iteration_s": trained.step_s,
        "predicted_iteration_s": plan.predicted.iteration_s if plan.predicted else None,
        "efficiency": near.step_s / trained.step_s,
        "checkpoint": job.output,
    }


def _summary(result: dict[str, object]) -> str:
    return (
        f"\nLoss {result['loss_first']:.2f} -> {result['loss_last']:.2f} nats per byte "
        f"in {result['steps']} steps, {result['training_s']:.0f} s.\n"
        f"Efficiency {result['efficiency']:.1%} of the same plan without wide-area links "
        f"(schedule {result['schedule']}; chips are virtual: computing is padded to their time).\n"
        f"Checkpoint {result['checkpoint']}: loads in transformers, its loss differs by "
        f"{result['checkpoint_loss_difference']:.1e}.\n"
        f"Report {result['report']}"
    )
