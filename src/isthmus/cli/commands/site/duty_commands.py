"""Commands on whether a site takes new parts, and on its end: site cordon, uncordon, drain, leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import import_extra
from isthmus.cli.commands.site.site_commands import PANEL, SiteArgument, find_site, site_commands
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.environment.interrupt import interruptible
from isthmus.cli.environment.parse_since import parse_age_s
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import AuthError, InputError, NotFoundError, UnavailableError
from isthmus.core.views.site_views import Belonging, DrainRequest, LeaveRequest, LeaveView

commands = typer.Typer()
"""None of the top level: the commands of this module join the group `site`."""

POLL_S = 1.0
"""Interval between two looks at a site that is drained or leaves."""

AGENT_END_LOOKS = 15
"""Looks at the state folder of an agent that has left the pool, until its process has ended."""

LimitOption = Annotated[
    str,
    typer.Option(
        "--deadline", metavar="AGE", help="How long jobs have to save a checkpoint, at most 7d; then they are stopped."
    ),
]


KeyOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="At the site: act with the agent's key in this state folder."),
]


@command(site_commands, panel=PANEL, examples=["isthmus site cordon qingyang"])
def cordon(env: CliEnvironment, client: ApiClient, name: SiteArgument, state: KeyOption = None) -> None:
    """Close a site to new parts (admin, or the site's owner); what runs there goes on."""
    _use_key(client, state)
    after = client.cordon_site(name, cordoned=True)
    env.answer(after, lambda: f"{name} takes no new parts; isthmus site uncordon {name} opens it again")


@command(site_commands, panel=PANEL, examples=["isthmus site uncordon qingyang"])
def uncordon(env: CliEnvironment, client: ApiClient, name: SiteArgument, state: KeyOption = None) -> None:
    """Open a cordoned or drained site again (admin, or the site's owner; a cordon of an admin: an admin)."""
    _use_key(client, state)
    after = client.cordon_site(name, cordoned=False)
    env.answer(after, lambda: f"{name} takes new parts")


@command(
    site_commands,
    panel=PANEL,
    examples=["isthmus site drain qingyang", "isthmus site drain qingyang --deadline 10m --json"],
)
def drain(
    env: CliEnvironment,
    client: ApiClient,
    name: SiteArgument,
    deadline: LimitOption = "30m",
    state: KeyOption = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the site is empty.")] = True,
) -> None:
    """Close a site to new parts; its jobs save a checkpoint and go on elsewhere, or wait (admin, or its owner).

    Ctrl-C ends the waiting alone: the server goes on, and the same command waits again. uncordon ends a drain.
    """
    request = _drain_request(deadline)
    _use_key(client, state)
    found = client.drain_site(name, request)

    def look() -> tuple[str, ...]:
        nonlocal found
        found = find_site(client, name)
        return found.duty.jobs

    is_empty = _wait_until_empty(env, name, found.duty.jobs, look) if wait else not found.duty.jobs
    left = ", ".join(found.duty.jobs)
    env.answer(found, lambda: f"{name} is drained" if is_empty else f"{name} is being drained; parts of: {left}")


@command(
    site_commands,
    panel=PANEL,
    examples=[
        "isthmus site leave qingyang --state /var/lib/isthmus-agent",
        "isthmus site leave qingyang --deadline 10m --json",
    ],
)
def leave(
    env: CliEnvironment,
    client: ApiClient,
    name: SiteArgument,
    deadline: LimitOption = "30m",
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="At the site: the agent's state folder, whose key is used and which is removed.",
        ),
    ] = None,
    discard: Annotated[
        bool, typer.Option("--discard-checkpoints", help="Leave also with the only checkpoints of jobs.")
    ] = False,
) -> None:
    """Take a site out of the pool: drain it, end its agent, remove what it has (admin, or the site's owner).

    Refused if the site has storage of its own and the only checkpoints of a job that has not ended. Ctrl-C ends the
    waiting alone: the server goes on, and the same command continues. --json prints what was removed and what is left,
    such as the histories of jobs.
    """
    request = LeaveRequest(limit_s=_drain_request(deadline).limit_s, discards_checkpoints=discard)
    seen, has_key = dict[Belonging, None](), _use_key(client, state)
    view = LeaveView(site=name, gone=False)

    def look() -> tuple[str, ...]:
        nonlocal view
        try:
            view = client.leave_pool(name, request)
        except NotFoundError:
            view = view.model_copy(update={"gone": True, "jobs": ()})
        except AuthError:
            if not (has_key and seen):
                raise
            view = view.model_copy(update={"gone": True, "jobs": ()})  # the key has ended with the site
        seen.update(dict.fromkeys(view.removed))
        return view.jobs if view.gone or view.jobs else ("its agent",)

    is_gone = _wait_until_empty(env, name, look(), look)
    if not is_gone:
        text = f"{name} is leaving; still there: {', '.join(view.jobs) or 'its agent'}"
        raise UnavailableError(text, hint="the server goes on with it; run the same command again to wait for its end")
    removed, left = [*seen], [*view.left]
    if state is not None:
        files = _remove_files(env, state)
        removed += [Belonging(kind="file", name=one) for one in files.removed]
        left += [Belonging(kind="file", name=one) for one in files.left]
    outcome = {"removed": removed, "left": left}

    def show() -> str:
        gone_before = f"the pool has no site {name}: it has left already, or its name is another one"
        lines = [f"{name} has left the pool" if seen else gone_before]
        lines += [f"removed  {one.kind} {one.name}" for one in removed]
        return "\n".join([*lines, *(f"left     {one.kind} {one.name}" for one in left)])

    env.answer(outcome, show)


def _remove_files(env: CliEnvironment, state: Path) -> Any:
    """Remove the files of an agent, which has said that it ends and may need a moment."""
    agents = import_extra("isthmus.agent", "agent")
    for _ in range(AGENT_END_LOOKS):
        try:
            return agents.remove_state_folder(state)
        except UnavailableError:
            env.sleep(POLL_S)
    return agents.remove_state_folder(state)


def _use_key(client: ApiClient, state: Path | None) -> bool:
    """Send the key of the agent of a state folder from now on; return whether the folder has one."""
    key = import_extra("isthmus.agent", "agent").read_key(state) if state is not None else None
    if key is not None:
        client.use_token(key)
    return key is not None


def _drain_request(deadline: str) -> DrainRequest:
    try:
        return DrainRequest(limit_s=parse_age_s(deadline))
    except ValidationError as error:
        raise InputError(f"--deadline {deadline[:80]}: more than 0 s and at most 7 days") from error


def _wait_until_empty(
    env: CliEnvironment, name: str, jobs: tuple[str, ...], look: Callable[[], tuple[str, ...]]
) -> bool:
    """Look until nothing is left, telling each change; return False after Ctrl-C."""
    told: tuple[str, ...] = ()
    with interruptible() as interrupted:
        while jobs:
            if interrupted:
                return False
            if jobs != told and not env.as_json:
                env.print_note(f"{name}: waits for {', '.join(jobs)}")
            told = jobs
            env.sleep(POLL_S)
            jobs = look()
    return True
