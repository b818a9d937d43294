"""Commands on jobs: submit, jobs, plans, choose, preempt, cancel, delete."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import JobArgument, command
from isthmus.cli.commands.follow_commands import job_snapshots, watch_job
from isthmus.cli.environment.cli_environment import CliEnvironment, to_json_types
from isthmus.cli.environment.parse_since import parse_since_s
from isthmus.client.api_client import ApiClient
from isthmus.client.job_filter import make_job_filter
from isthmus.client.read_job import read_job
from isthmus.client.resolve_job import TERMINAL_STATES, find_job, find_job_id
from isthmus.client.site_checks import CHECKS_WAIT_S, ChecksVerdict, await_checks, require_not_refused
from isthmus.client.submission_folders import check_run_folders, with_resume
from isthmus.core.errors import ConflictError, InputError
from isthmus.core.job import ParallelDegrees
from isthmus.core.model import require_trainable
from isthmus.core.plan import PlanSet
from isthmus.core.runs.job_id import short_job_id
from isthmus.core.text.printable import printable
from isthmus.core.views.api_views import JobFilter, JobView, Submission
from isthmus.core.views.queue_status import DryRun

commands = typer.Typer()
PANEL = "Jobs"
PLANNING_POLL_S = 0.3


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus submit job.yaml",
        "isthmus submit job.yaml --watch   (asks which plan to take)",
        "isthmus submit job.yaml --watch --auto   (takes the plan that is predicted to be fastest)",
        "isthmus submit job.yaml --dry-run   (plans, queue position, expected start)",
        "isthmus submit job.yaml --json | jq -r '.id, .checks.state'",
        "isthmus submit job.yaml --no-wait   (returns at once, before the sites have checked the files)",
        "isthmus submit job.yaml --key nightly-2026-11-20   (a retry returns the same job)",
        "isthmus submit job.yaml --resume nightly-3f9a2c1b   (from that job's newest checkpoint)",
    ],
)
def submit(
    env: CliEnvironment,
    client: ApiClient,
    file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file: see `isthmus schema job`.")],
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    auto: Annotated[
        bool, typer.Option("--auto", help="Take the fastest plan, as with `policy: auto` in the job.")
    ] = False,
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
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return at once, without what the sites find of the job's files.")
    ] = False,
) -> None:
    """Submit a job.

    The job file and the model's config.json are read on this machine; relative paths start at the job file.
    A checkpoint or output folder of another job is refused; `--resume` (or `resume:` in the file) continues
    from its checkpoints, which stay unchanged. Ctrl-C ends --watch, not the job.

    The sites of the job's plan then check its files. The command waits up to 10 s for them (--no-wait: not at all),
    and ends with status 6 if they refuse the job. Where the user chooses the plan, they check the fastest one.

    A job with `policy: manual` starts after a plan is chosen: --watch shows the plans and asks. Without a
    terminal, or with --json, it prints the command that chooses and ends with status 6. --auto needs no choice.
    """
    if dry_run and (watch or key):
        raise InputError("--dry-run excludes --watch and --key", hint="remove them")
    read = read_job(file, client.entries)
    job, model = with_resume(read.job, resume), read.model
    if auto:
        job = job.model_copy(update={"policy": "auto"})
    require_trainable(model)
    job = check_run_folders(client, job, model, key)
    if job.parallel != ParallelDegrees():  # importing the planner takes half a second
        from isthmus.control.placement import check_degrees

        check_degrees(job, model)
    if dry_run:
        found = client.dry_run(Submission(job=job, model=model))
        env.answer(found, lambda: _render_dry_run(found, read.notes, env.now()))
        return
    view = client.submit(Submission(job=job, model=model, key=key or secrets.token_hex(16)))
    if not watch and not no_wait:
        _answer_with_checks(env, client, view, read.notes)
        return
    env.answer(view, lambda: _next_steps(view, read.notes, watching=watch))
    if watch:
        try:
            if job.policy == "manual":
                _choose_plan(env, client, view.id)
            watch_job(env, client, view.id)
        except KeyboardInterrupt:
            env.print_note(f"job {short_job_id(view.id)} continues; `isthmus cancel {short_job_id(view.id)}` stops it")
            raise


def _answer_with_checks(env: CliEnvironment, client: ApiClient, submitted: JobView, notes: Sequence[str]) -> None:
    """Print the job with what its sites find in `CHECKS_WAIT_S`; raise `ConflictError` if they refuse it."""
    if env.stderr.isatty():
        env.print_note(f"waiting up to {CHECKS_WAIT_S:g} s for the checks of the sites (--no-wait: not at all)")
    short = short_job_id(submitted.id)
    try:
        view, found = await_checks(client, submitted, limit_s=CHECKS_WAIT_S, now=env.now, sleep=env.sleep)
    except KeyboardInterrupt:
        env.print_note(f"job {short} continues; `isthmus cancel {short}` stops it")
        raise
    if found.state == "refused" and found.sites and not env.as_json:
        from isthmus.cli.terminal.queue_tables import preflight_table

        env.print(preflight_table(found.sites))
    require_not_refused(view, found)
    shown = to_json_types(view) | {"checks": to_json_types(found)}
    env.answer(shown, lambda: _next_steps(view, [*notes, _checks_line(found)], watching=False))


def _checks_line(found: ChecksVerdict) -> str:
    sites = ", ".join(site.cluster for site in found.sites)
    if found.state == "passed":
        return f"checks: passed at the sites of plan {found.plan} ({sites})"
    if found.state == "not checked":
        return "checks: none, as the agents of its sites execute none"
    return "queued; the sites' checks are not complete yet"


def _choose_plan(env: CliEnvironment, client: ApiClient, job: str) -> None:
    """Wait until job id `job` has plans to choose from, and choose one with the user.

    Returns at once when the job has a plan or has ended. Raises `ConflictError` if no plan is chosen.
    """
    from isthmus.cli.terminal.plan_prompt import ask_for_plan

    view, noted = client.job(job), "planning"
    for snapshot in job_snapshots(env, client, job, PLANNING_POLL_S):
        view = snapshot.view
        if view.plan is not None or view.state in TERMINAL_STATES or _awaits_choice(view):
            break
        if view.state != noted:
            noted = view.state
            env.print_note(f"job {job} is {view.state}: {printable(view.reason)}")
    if not _awaits_choice(view) or view.plans is None:
        return
    chosen = ask_for_plan(env, view.plans) if env.interactive else None
    if chosen is None:
        number, best = len(view.plans.plans), view.plans.plans[0].id
        raise ConflictError(
            f"job {job} waits until you choose one of its {number} plans",
            hint=f"`isthmus choose {job} {best}` takes the fastest, then `isthmus watch {job}` follows it; "
            f"`isthmus plans {job}` lists all; `submit --auto` needs no choice",
        )
    client.choose(job, chosen)


def _awaits_choice(view: JobView) -> bool:
    """Return whether the job continues only after its user has chosen a plan."""
    offered = view.plans is not None and bool(view.plans.plans)
    return view.plan is None and view.state in ("choosing", "waiting") and offered


def _render_dry_run(found: DryRun, notes: Sequence[str], now_s: float) -> object:
    from rich.console import Group
    from rich.text import Text

    from isthmus.cli.terminal.queue_tables import dry_run_page

    return Group(dry_run_page(found, now_s), *map(Text, notes))


def _next_steps(view: JobView, notes: Sequence[str], *, watching: bool) -> str:
    job = short_job_id(view.id)
    lines = [f"job {job} ({view.name}) is {view.state}" + (f": {printable(view.reason)}" if view.reason else "")]
    lines += [f"  {note}" for note in notes]
    if view.job.resume is not None:
        from isthmus.cli.terminal.queue_tables import resume_text

        lines.append(f"  {resume_text(view.job.resume)}")
    if view.job.policy == "manual" and not watching:
        lines.append(f"  isthmus plans {job}           lists candidate plans")
        lines.append(f"  isthmus choose {job} PLAN     starts it with one of them")
    if not watching:
        lines.append(f"  isthmus watch {job}           follows it")
    return "\n".join(lines)


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus jobs",
        "isthmus jobs --state running --state waiting --limit 20",
        "isthmus jobs --since 2d --name nightly",
        "isthmus jobs --json | jq '.[] | {id, state}'",
    ],
)
def jobs(
    env: CliEnvironment,
    client: ApiClient,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="Only jobs in this state; repeat it for several."),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs with this name.")] = None,
    user: Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs of this user (for admins).")] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only jobs whose plan uses a cluster of this owner.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="AGE|DATE", help="Only jobs submitted since: 90s, 30m, 12h, 7d or 2026-11-20 (UTC)."),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="At most this many jobs.")] = None,
) -> None:
    """List your jobs, the latest first; as JSON in the same order."""
    since_s = None if since is None else parse_since_s(since, env.now())
    wanted = make_job_filter(state=state or (), name=name, user=user, owner=owner, since_s=since_s)
    found = client.jobs(wanted, limit=limit)

    def show() -> object:
        from isthmus.cli.terminal.tables import jobs_table

        if not found and wanted != JobFilter():
            return "No job matches; `isthmus jobs` lists all."
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
        shown.append(f"\njob {short_job_id(job.id)} uses plan {job.plan.id}")
    elif job.state in ("choosing", "waiting") and answer.plans:
        shown.append(f"\nisthmus choose {short_job_id(job.id)} {answer.plans[0].id}   starts the first")
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
    short = short_job_id(view.id)
    env.answer(view, lambda: f"job {short} uses plan {plan}: {view.state}\n  isthmus watch {short}")


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
    short = short_job_id(view.id)
    env.answer(view, lambda: f"job {short} is {view.state}: {printable(view.reason)}\n  isthmus watch {short}")


def _render_offer(view: JobView) -> object:
    from rich.console import Group
    from rich.text import Text

    from isthmus.cli.terminal.queue_tables import victims_table

    ask = Text(f"\n  isthmus preempt {short_job_id(view.id)} --yes   preempts them")
    return Group(victims_table("Jobs it could preempt", view.offer), ask)


@command(commands, panel=PANEL, examples=["isthmus cancel my-job"])
def cancel(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="End a job that only sites know, after a restore (admin; whole id).")
    ] = False,
) -> None:
    """Stop a job.

    Every site releases its resources; checkpoints are kept. --unknown is for a server that was restored from a
    backup: `isthmus pool` lists the jobs that run although its log does not have them.
    """
    if unknown:
        pool = client.end_unknown(job)
        env.answer(pool, lambda: f"every site that runs job {job} releases it")
        return
    view = client.cancel(find_job_id(client, job))
    env.answer(view, lambda: f"job {short_job_id(view.id)} is {view.state}")


@command(commands, panel=PANEL, examples=["isthmus delete my-job"])
def delete(env: CliEnvironment, client: ApiClient, job: JobArgument) -> None:
    """Delete an ended job with its metrics and logs.

    Checkpoints and the trained model are kept.
    """
    found = find_job_id(client, job)
    client.delete(found)
    env.answer({"deleted": found}, lambda: f"job {short_job_id(found)} is deleted")
