"""Commands on jobs: submit, jobs, plans, choose, preempt, cancel, delete."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.client.api_client import ApiClient
from isthmus.cli.client.resolve_job import find_job, find_job_id
from isthmus.cli.command import JobArgument, command
from isthmus.cli.commands.follow_commands import watch_job
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.errors import ConflictError, InputError, NotFoundError
from isthmus.core.files.user_files import load_job
from isthmus.core.job import Job, ParallelDegrees, is_folder, with_own_folders
from isthmus.core.messages.api_views import JobView, Submission
from isthmus.core.messages.queue_status import DryRun
from isthmus.core.model import Model, load_model, require_trainable
from isthmus.core.plan import PlanSet
from isthmus.core.runs.check_job import check_job
from isthmus.core.runs.visible_folders import check_visible_folders

commands = typer.Typer()
PANEL = "Jobs"
PLANNING_POLL_S = 0.3


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus submit job.yaml",
        "isthmus submit job.yaml --watch",
        "isthmus submit job.yaml --dry-run   (plans, queue position, expected start)",
        "isthmus submit job.yaml --json | jq -r .id",
        "isthmus submit job.yaml --key nightly-2026-11-20   (a retry returns the same job)",
        "isthmus submit job.yaml --resume nightly-3f9a2c1b   (from that job's newest checkpoint)",
    ],
)
def submit(
    env: CliEnvironment,
    client: ApiClient,
    file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file: see `isthmus schema job`.")],
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Idempotency key: a retry with the same key returns the same job."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show plans, queue position and expected start without submitting."),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="JOB|FOLDER", help="Continue from the newest checkpoint of a job, or of a folder."),
    ] = None,
) -> None:
    """Submit a job.

    The job file and the model's config.json are read on this machine; relative paths start at the job file.
    A checkpoint or output folder of another job is refused; `--resume` (or `resume:` in the file) continues
    from its checkpoints, which stay unchanged. Ctrl-C ends --watch, not the job.
    """
    if dry_run and (watch or key):
        raise InputError("--dry-run excludes --watch and --key", hint="remove them")
    job = load_job(file)
    if resume is not None:
        job = job.model_copy(update={"resume": str(Path(resume).absolute()) if is_folder(resume) else resume})
    model = load_model(job.model)
    require_trainable(model)
    check_job(job, model)
    job = _check_run_folders(client, job, model, key)
    if job.parallel != ParallelDegrees():  # importing the planner takes half a second
        from isthmus.control.placement import check_degrees

        check_degrees(job, model)
    if dry_run:
        found = client.dry_run(Submission(job=job, model=model))
        env.answer(found, lambda: _render_dry_run(found, env.now()))
        return
    view = client.submit(Submission(job=job, model=model, key=key or secrets.token_hex(16)))
    env.answer(view, lambda: _next_steps(view, watching=watch))
    if watch:
        try:
            watch_job(env, client, view.id)
        except KeyboardInterrupt:
            env.print_note(f"job {view.id} continues; `isthmus cancel {view.id}` stops it")
            raise


def _check_run_folders(client: ApiClient, job: Job, model: Model, key: str | None) -> Job:
    """Return the job with the full id of the job to resume; raise `InputError` for a folder of another job.

    With an idempotency key the folder may belong to this job, submitted before.
    """
    if isinstance(job.resume, str) and not is_folder(job.resume):
        job = job.model_copy(update={"resume": find_job_id(client, job.resume)})

    def is_same_job(job_id: str) -> bool:
        if not key:
            return False
        with suppress(NotFoundError):
            known = client.job(job_id).job
            return known == with_own_folders(job, job_id).model_copy(update={"resume": known.resume})
        return False

    return check_visible_folders(job, model, is_same_job)


def _render_dry_run(found: DryRun, now_s: float) -> object:
    from isthmus.cli.terminal.queue_tables import dry_run_page

    return dry_run_page(found, now_s)


def _next_steps(view: JobView, *, watching: bool) -> str:
    lines = [f"job {view.id} ({view.name}) is {view.state}" + (f": {view.reason}" if view.reason else "")]
    if view.job.resume is not None:
        from isthmus.cli.terminal.queue_tables import resume_text

        lines.append(f"  {resume_text(view.job.resume)}")
    if view.job.policy == "manual":
        lines.append(f"  isthmus plans {view.id}           lists candidate plans")
        lines.append(f"  isthmus choose {view.id} PLAN     starts it with one of them")
    if not watching:
        lines.append(f"  isthmus watch {view.id}           follows it")
    return "\n".join(lines)


@command(commands, panel=PANEL, examples=["isthmus jobs", "isthmus jobs --json | jq '.[] | {id, state}'"])
def jobs(env: CliEnvironment, client: ApiClient) -> None:
    """List your jobs, the latest first."""
    found = client.jobs()

    def show() -> object:
        from isthmus.cli.terminal.tables import jobs_table

        return jobs_table(found, env.now())

    env.answer(found, show)


@command(
    commands,
    panel=PANEL,
    examples=["isthmus plans my-job", "isthmus plans 3f --json | jq '.plans[0].stages'"],
)
def plans(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    wait_s: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Maximum wait for the planner.")] = 30.0,
) -> None:
    """List a job's candidate plans with predicted time, traffic and cost.

    Also shows why other combinations were rejected.
    """
    found = find_job(client, job)
    deadline_s = env.now() + wait_s
    while found.state == "planning" and env.now() < deadline_s:
        env.sleep(PLANNING_POLL_S)
        found = client.job(found.id)
    if found.state == "planning":
        raise ConflictError(f"job {found.id} is still being planned", hint="try again later")
    answer = client.plans(found.id)
    env.answer(answer, lambda: _render_plans(found, answer))


def _render_plans(job: JobView, answer: PlanSet) -> object:
    from rich.console import Group

    from isthmus.cli.terminal.tables import plans_table

    shown = [plans_table(answer)]
    if job.plan is not None:
        shown.append(f"\njob {job.id} uses plan {job.plan.id}")
    elif job.state in ("choosing", "waiting") and answer.plans:
        shown.append(f"\nisthmus choose {job.id} {answer.plans[0].id}   starts the first")
    return Group(*shown)


@command(commands, panel=PANEL, examples=["isthmus choose my-job p1", "isthmus choose my-job p1 --json"])
def choose(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan's id, from `isthmus plans JOB`.")],
) -> None:
    """Choose a job's plan and start the job."""
    view = client.choose(find_job_id(client, job), plan)
    env.answer(view, lambda: f"job {view.id} uses plan {plan}: {view.state}\n  isthmus watch {view.id}")


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus preempt my-job",
        "isthmus preempt my-job --yes",
        "isthmus preempt my-job --yes --json",
    ],
)
def preempt(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Preempt them.")] = False,
) -> None:
    """List the jobs that a waiting job could preempt; preempt them with --yes.

    Only jobs of a lower priority at each owner are listed. No job is stopped before all sites are ready and
    the victims' checkpoints are verified. Preempted pool jobs resume later from these checkpoints.
    """
    view = client.job(find_job_id(client, job))
    if not view.offer:
        raise ConflictError(
            f"job {view.id} is {view.state}; no preemption would let it start now",
            hint=f"`isthmus show {view.id}` shows what it waits for",
        )
    if not yes:
        env.answer(view, lambda: _render_offer(view))
        return
    view = client.preempt(view.id, view.offer)
    env.answer(view, lambda: f"job {view.id} is {view.state}: {view.reason}\n  isthmus watch {view.id}")


def _render_offer(view: JobView) -> object:
    from rich.console import Group
    from rich.text import Text

    from isthmus.cli.terminal.queue_tables import victims_table

    ask = Text(f"\n  isthmus preempt {view.id} --yes   preempts them")
    return Group(victims_table("Jobs it could preempt", view.offer), ask)


@command(commands, panel=PANEL, examples=["isthmus cancel my-job"])
def cancel(env: CliEnvironment, client: ApiClient, job: JobArgument) -> None:
    """Stop a job.

    Every site releases its resources; checkpoints are kept.
    """
    view = client.cancel(find_job_id(client, job))
    env.answer(view, lambda: f"job {view.id} is {view.state}")


@command(commands, panel=PANEL, examples=["isthmus delete my-job"])
def delete(env: CliEnvironment, client: ApiClient, job: JobArgument) -> None:
    """Delete an ended job with its metrics and logs.

    Checkpoints and the trained model are kept.
    """
    found = find_job_id(client, job)
    client.delete(found)
    env.answer({"deleted": found}, lambda: f"job {found} is deleted")
