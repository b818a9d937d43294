"""`isthmus agent`: the agent of a site."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.command import CaOption, ServerOption, TokenFileOption, command
from isthmus.cli.commands.process_setup import (
    PANEL,
    LogJsonOption,
    PoolOption,
    StateOption,
    configure_logging,
    import_extra,
    read_site,
    select_cluster,
)
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.client_settings import read_token, resolve_settings
from isthmus.client.server_address import require_secure_server
from isthmus.core.errors import AuthError, FileError, InputError
from isthmus.core.files.user_files import (
    errors_placed,
    load_policy,
    load_pool,
)
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Cluster, UnknownNameError
from isthmus.core.process.confined_start import forbid_inspection

commands = typer.Typer()


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus agent --cluster hangzhou --pool pool.yaml --state agent-state --token-file owner.token",
        "isthmus agent --cluster hangzhou --pool pool.yaml --state st --routes links/routes.json",
        "isthmus agent --pool site.yaml --state st --host 10.0.0.2 --ports 41000-41100",
        "isthmus agent --pool site.yaml --state st --policy policy.yaml",
        "isthmus agent --pool pool.yaml --cluster hangzhou --state /shared/agent --site slurm.yaml",
        "isthmus agent --pool site.yaml --state st --storage /data --sources sources.json",
    ],
)
def agent(
    env: CliEnvironment,
    pool: PoolOption,
    state: StateOption,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="This site's cluster (required if the pool has several)."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address where other sites reach this site's workers (default: this machine's towards the server).",
        ),
    ] = None,
    ports: Annotated[
        str | None,
        typer.Option(metavar="FIRST-LAST", help="TCP ports of the workers, one each (default: any free ones)."),
    ] = None,
    routes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Proxies to other clusters: the routes.json of `isthmus links`."),
    ] = None,
    promises: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write what jobs are promised on links, for `isthmus wan shape`."),
    ] = None,
    centre: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Decision centre of the network, which books paths of prepared parts."),
    ] = None,
    centre_token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Secret of its clients.")] = None,
    centre_ca: Annotated[Path | None, typer.Option(metavar="FILE", help="CA of its certificate.")] = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="POLICY.yaml", help="Limits for pool jobs: see `isthmus schema policy`."),
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(metavar="SITE.yaml", help="The site's scheduler: see `isthmus schema site` (default: processes)."),
    ] = None,
    storage: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The site's own storage folder; jobs' paths are below it."),
    ] = None,
    sources: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Access to other sites' storage: JSON, by cluster."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Copies of the catalogue's models and data (default: in the state folder)."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=1, max=65535, help="Serve the agent's own metrics here (default: nowhere)."),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to serve them; beyond this machine a token is needed.")
    ] = "127.0.0.1",
    metrics_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The token that readers of the metrics must present."),
    ] = None,
    enrol: Annotated[
        bool, typer.Option("--enrol", help="Take the place of the cluster's enrolled agent, whose state is lost.")
    ] = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
    log_json: LogJsonOption = False,
) -> None:
    """Run a site's agent, which starts and monitors the workers.

    The agent makes outbound connections only; other sites connect to its workers. Ctrl-C in a terminal lets running
    parts save a checkpoint, then stops them and the agent; a second Ctrl-C stops at once, as SIGTERM and a Ctrl-C
    without a terminal do: the jobs then go on from their last checkpoints.

    A cluster is bound to the first agent that reports for it, and the agent to its state folder and machine. Another
    one takes its place with --enrol, once nothing that the first one started can run any more (isthmus site show).

    Where links of the pool file state a `crossing`, the agent also starts the site's proxy and gateways, and its
    workers' connections cross those links through them; they then dial by the proxies of --routes, if one is given.

    The agent of a site that has joined by a code (isthmus site join) needs no token: its key is in the state folder.
    """
    agents = import_extra("isthmus.agent", "agent")
    settings = resolve_settings(env.variables, server=server, token_file=token_file, ca=ca)
    has_key = agents.read_key(state) is not None
    token = None if token_file is None and has_key else settings.token
    if token is None and not has_key:
        raise AuthError(
            "the agent needs a key, or a token of its cluster's owner",
            hint="join first: isthmus site join CODE --state DIR; or give --token-file with a token of the owner: "
            "isthmus token create --owner NAME",
        )
    require_secure_server(settings.server)
    whole_pool = load_pool(pool)
    own_cluster = select_cluster(whole_pool, cluster)
    owner_policy, site_file = _read_policy(policy, own_cluster), read_site(site, own_cluster)
    configure_logging(env, as_json=log_json)
    secrets = _hide_secrets(settings.token_file, metrics_token_file)
    metrics_token = read_token(metrics_token_file) if metrics_token_file else None
    metrics = None if metrics_port is None else (metrics_host, metrics_port, metrics_token)
    with errors_placed(site):
        agents.run_agent(
            agents.AgentConfig(
                server=settings.server, token=token, cluster=own_cluster,
                state=state, host=host, ports=_parse_ports(ports), routes=routes,
                promises=promises, ca=settings.ca, policy=owner_policy, metrics=metrics,
                site=site_file, pool=whole_pool, pool_folder=pool.parent,
                centre=_centre_address(centre, centre_token_file, centre_ca),
                storage=storage, sources=sources, cache=cache, enrols=enrol, secrets=secrets,
                interactive=sys.stdin is not None and sys.stdin.isatty(),
            )
        )  # fmt: skip


def _hide_secrets(*token_files: Path | None) -> tuple[Path, ...]:
    """Keep the agent's tokens from its workers; return the files that no worker may read."""
    forbid_inspection()
    os.umask(os.umask(0o077) | 0o027)
    files = tuple(file.expanduser() for file in token_files if file is not None)
    for file in files:
        if file.exists() and file.stat().st_mode & 0o077:
            text = "other accounts may read the token file %s: chmod 600 %s"
            logging.getLogger("isthmus.agent").warning(text, file, file)
    return tuple(file.absolute() for file in files)


def _centre_address(address: str | None, token_file: Path | None, ca: Path | None) -> Any:
    """Return the decision centre of the options, None without one."""
    from isthmus.wan import CentreAddress, parse_address, read_centre_token

    if address is None:
        if token_file is not None or ca is not None:
            raise InputError("a token or CA of a decision centre, and no --centre", hint="--centre HOST:PORT")
        return None
    token = read_centre_token(token_file) if token_file is not None else ""
    return CentreAddress(address=parse_address(address), token=token, ca=ca)


def _parse_ports(text: str | None) -> tuple[int, int] | None:
    """Return the first and last port of `FIRST-LAST`; raise `InputError` for anything else."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()) or len(text) > 11:
        raise InputError(f"--ports {text!r} is not a range of ports", hint="for example --ports 41000-41100")
    if not 1024 <= int(first) <= int(last) <= 65535:
        raise InputError(
            f"--ports {text}: the ports must rise, from 1024 to 65535", hint="for example --ports 41000-41100"
        )
    return int(first), int(last)


def _read_policy(file: Path | None, cluster: Cluster) -> OwnerPolicy:
    """Return the owner's policy for `cluster`; raise `FileError` if it refers to unknown names."""
    if file is None:
        return OwnerPolicy()
    policy = load_policy(file)
    try:
        policy.check_cluster(cluster)
    except UnknownNameError as error:
        known = ", ".join(error.known)
        raise FileError(str(error), file=str(file), value=error.value, hint=f"{cluster.name} has {known}") from error
    return policy
