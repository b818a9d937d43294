"""Commands that run as long-lived processes: serve, agent, links, switch. Optional dependencies load lazily."""

from __future__ import annotations

import importlib
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args

import typer

from isthmus.cli.command import CaOption, ServerOption, TokenFileOption, command
from isthmus.cli.environment.bounded_log import BoundedLog
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.environment.json_log import JsonLineFormatter
from isthmus.client.client_settings import DEFAULT_PORT, read_token, resolve_settings
from isthmus.client.server_address import require_secure_server
from isthmus.control.algorithms.compaction_policy import CompactionPolicy
from isthmus.control.algorithms.global_order import Objective
from isthmus.control.queries.quotas import Quotas
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.core.errors import AuthError, FileError, InputError, NotFoundError
from isthmus.core.files.user_files import (
    errors_placed,
    load_model_file,
    load_oidc,
    load_policy,
    load_pool,
    load_site,
    place_error,
)
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.loopback import is_loopback
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.pool import Cluster, Pool, UnknownNameError
from isthmus.core.process.confined_start import forbid_inspection
from isthmus.core.process.stop_signals import handled_stop_signals
from isthmus.core.text.plain_line_formatter import PlainLineFormatter

commands = typer.Typer()
PANEL = "Processes"

PoolOption = Annotated[Path, typer.Option("--pool", metavar="POOL.yaml", help="The pool: see `isthmus schema pool`.")]
OptionalPoolOption = Annotated[
    Path | None,
    typer.Option("--pool", metavar="POOL.yaml", help="The operator's pool file: links, owners, chips."),
]
StateOption = Annotated[Path, typer.Option("--state", metavar="DIR", help="State folder, kept across restarts.")]
HostOption = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Listen address; addresses other than loopback need TLS.")
]
CertificateOption = Annotated[Path | None, typer.Option(metavar="FILE", help="The server's certificate, PEM.")]
DatabaseOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the address of a PostgreSQL shared by several servers."),
]
LogJsonOption = Annotated[
    bool, typer.Option("--log-json", help="Log one JSON object per line, with job and part as fields.")
]
ObjectiveOption = Annotated[
    Objective, typer.Option(metavar="|".join(get_args(Objective)), help="Objective of the queue order.")
]
PatienceOption = Annotated[
    float,
    typer.Option("--patience", metavar="SECONDS", min=0, help="Waiting time after which chips are reserved for a job."),
]
RunLeaseOption = Annotated[
    float,
    typer.Option(
        "--run-lease", metavar="SECONDS", min=30,
        help="Workers of a site end themselves after this long without contact; then their job goes on elsewhere.",
    ),
]  # fmt: skip
QUOTAS = Quotas()
"""The default limits of a server."""
HighPriorityOption = Annotated[
    list[str] | None,
    typer.Option("--high-priority-user", metavar="NAME", help="User who may submit jobs of priority high; repeatable."),
]
ShareOption = Annotated[
    list[str] | None,
    typer.Option(metavar="USER=WEIGHT", help="Share of a user among those of a priority; 1 by default; repeatable."),
]
KeyOption = Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key, PEM.")]


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus serve --state /var/lib/isthmus --pool pool.yaml",
        "isthmus serve --state st --pool pool.yaml --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem",
        "isthmus serve --state st --pool pool.yaml --host 0.0.0.0 --self-signed",
        "isthmus serve --state st --pool pool.yaml --objective throughput",
        "isthmus serve --state st --pool pool.yaml --high-priority-user ann --max-jobs-per-user 200",
        "isthmus serve --state st --pool pool.yaml --fair-share 168 --share ann=2",
        "isthmus serve --state st --pool pool.yaml --self-signed --oidc oidc.yaml",
        "isthmus serve --state st --pool pool.yaml --keep-log-days 90 --archive-log /backup/events",
        "isthmus serve --state replica-2 --pool pool.yaml --database db.address --port 8471",
    ],
)
def serve(
    env: CliEnvironment,
    state: StateOption,
    pool: OptionalPoolOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Listen port; 0 picks a free one.")
    ] = DEFAULT_PORT,
    database: DatabaseOption = None,
    tls_cert: CertificateOption = None,
    tls_key: KeyOption = None,
    self_signed: Annotated[
        bool, typer.Option("--self-signed", help="Create a CA and a certificate in the state folder.")
    ] = False,
    objective: ObjectiveOption = "arrival",
    patience_s: PatienceOption = 3600.0,
    run_lease_s: RunLeaseOption = 900.0,
    half_life_h: Annotated[
        float,
        typer.Option(
            "--fair-share",
            metavar="HOURS",
            min=0,
            help="Half-life of the chip-hours by which users of a priority are ordered; 0 orders by arrival.",
        ),
    ] = 24.0,
    share: ShareOption = None,
    max_jobs_per_user: Annotated[
        int, typer.Option(metavar="N", min=1, help="Jobs of one user that have not ended.")
    ] = QUOTAS.live_jobs_per_user,
    max_output_mib: Annotated[
        int, typer.Option(metavar="N", min=1, help="Metrics and logs of one job that are kept.")
    ] = QUOTAS.output_bytes_per_job // 2**20,
    max_stored_mib: Annotated[
        int, typer.Option(metavar="N", min=1, help="Jobs of one user with their models, ended ones included.")
    ] = QUOTAS.stored_bytes_per_user // 2**20,
    max_job_kib: Annotated[
        int, typer.Option(metavar="KIB", min=1, help="Largest job with its model's config, in KiB.")
    ] = QUOTAS.job_bytes // 1024,
    max_clusters_per_owner: Annotated[
        int, typer.Option(metavar="N", min=1, help="Clusters of one owner beside those of the pool file.")
    ] = QUOTAS.clusters_per_owner,
    max_versions_per_user: Annotated[
        int, typer.Option(metavar="N", min=1, help="Versions of one user in the catalogue of models and data.")
    ] = QUOTAS.versions_per_user,
    high_priority_user: HighPriorityOption = None,
    search_cpu_s: Annotated[
        float, typer.Option("--search-cpu", metavar="SECONDS", min=1, help="CPU time of one search for plans.")
    ] = 20.0,
    keep_log_days: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="Age up to which events stay in the log.")
    ] = 30.0,
    keep_log_mib: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Size from which the log is compacted earlier.")
    ] = 512,
    archive_log: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for a copy of the events that leave the log.")
    ] = None,
    archive_mib: Annotated[
        int | None, typer.Option(metavar="MIB", min=1, help="Size from which that folder loses its oldest files.")
    ] = None,
    switch_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Secret that the pool's switches share; keys of jobs follow from it. Mode 0600."
        ),
    ] = None,
    notify: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings of webhooks and e-mail: `notify.yaml`.")
    ] = None,
    oidc: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Provider by which persons sign in to the console (OpenID Connect)."),
    ] = None,
    log_json: LogJsonOption = False,
) -> None:
    """Run the control plane, to which agents and users connect.

    Ctrl-C stops it; running jobs continue and a restarted server resumes them. Several servers may share one
    database: one leads, all serve requests, and another takes over within seconds if the leader dies.
    """
    server = import_extra("isthmus.control.server.run_server", "server")
    if database is not None:
        import_extra("isthmus.control.store.postgres_store", "postgres")
    configure_logging(env, as_json=log_json)
    settings = import_extra("isthmus.control.service.notify.notify_settings", "server")
    config = server.ServerConfig(
        notify=settings.NotifySettings() if notify is None else settings.load_notify_settings(notify),
        state=state, host=host, port=port, pool=load_pool(pool) if pool else None,
        database=database, tls_cert=tls_cert, tls_key=tls_key, self_signed=self_signed,
        rules=CoordinatorConfig(
            objective=objective, patience_s=patience_s, run_lease_s=run_lease_s,
            half_life_s=half_life_h * 3600.0, share_weights=_parse_weights(share or ()),
        ),
        quotas=Quotas(
            live_jobs_per_user=max_jobs_per_user, job_bytes=max_job_kib * 1024,
            output_bytes_per_job=max_output_mib * 2**20, stored_bytes_per_user=max_stored_mib * 2**20,
            clusters_per_owner=max_clusters_per_owner, versions_per_user=max_versions_per_user,
            high_priority_users=frozenset(high_priority_user or ()),
        ),
        search_cpu_s=search_cpu_s,
        compaction=CompactionPolicy(keep_s=keep_log_days * 86400.0, keep_bytes=keep_log_mib << 20),
        archive=archive_log, archive_bytes=None if archive_mib is None else archive_mib << 20,
        switch_key=switch_key_file, oidc=load_oidc(oidc) if oidc else None,
    )  # fmt: skip

    def announce(listening: Any) -> None:
        found: dict[str, Any] = {"server": listening.url, "other_urls": list(listening.other_urls)}
        if listening.admin_token:
            found["admin_token"] = str(listening.admin_token.resolve())
        if listening.certificate:
            found["certificate"] = str((listening.certificate.trust or listening.certificate.cert).resolve())
            found["fingerprint"] = listening.certificate.fingerprint
            found["own_ca"] = listening.certificate.trust is not None
        env.answer(found, lambda: _usage_text(found))

    server.run_server(config, announce)


def _parse_weights(given: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return the weights of `USER=WEIGHT`; raise `InputError` for one that is no positive number."""
    found: dict[str, float] = {}
    for text in given:
        user, _, weight = text.partition("=")
        try:
            found[user] = float(weight)
        except ValueError:
            found[user] = math.nan
        if not user or not 0 < found[user] < math.inf:
            raise InputError(f"--share {text}: it is no USER=WEIGHT with a positive weight", hint="--share ann=2")
    return tuple(sorted(found.items()))


def _usage_text(found: dict[str, Any]) -> str:
    lines = [f"server listening at {found['server']}"]
    lines += [f"also at {', '.join(found['other_urls'])}"] if found["other_urls"] else []
    if "admin_token" not in found:
        return "\n".join([*lines, "another server on the same database has created the admin token"])
    lines += ["to use it as admin:"]
    token = shlex.quote(found["admin_token"])
    lines += [f"  export ISTHMUS_SERVER={found['server']} ISTHMUS_TOKEN_FILE={token}"]
    if found.get("own_ca"):
        lines += [f"  export ISTHMUS_CA={shlex.quote(found['certificate'])}"]
    lines += ["  isthmus token create --user NAME", "  isthmus pool"]
    return "\n".join([*lines, *_certificate_text(found)])


def _certificate_text(found: dict[str, Any]) -> list[str]:
    """Return what other machines need to trust the server's certificate."""
    if "certificate" not in found:
        return []
    if not found["own_ca"]:
        text = "machines that do not trust the CA of the certificate yet need its file: --ca or ISTHMUS_CA"
        return [f"certificate {found['certificate']}, SHA-256 {found['fingerprint']}", text]
    return [
        f"other machines need a copy of {found['certificate']}: --ca or ISTHMUS_CA; compare its SHA-256",
        f"  {found['fingerprint']}",
    ]


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


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus links pool.yaml --state links",
        "isthmus links pool.yaml --state links --runs-first --seed 7",
        "isthmus links pool.yaml --state links --promises booked.json",
    ],
)
def links(
    env: CliEnvironment,
    pool: Annotated[Path, typer.Argument(metavar="POOL.yaml", help="The pool with the links to emulate.")],
    state: Annotated[Path, typer.Option("--state", metavar="DIR", help="Folder for routes.json and other output.")],
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of jitter and loss.")] = 0,
    runs_first: Annotated[
        bool, typer.Option("--runs-first", help="Prioritise runs over traffic through others.json.")
    ] = False,
    promises: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Bookings whose rates to enforce, as `isthmus wan admit --json` prints."),
    ] = None,
    at: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time of the bookings, on their clock.")] = 0.0,
) -> None:
    """Emulate the pool's wide-area links on this machine, without root.

    Each direction has its own bandwidth, delay, jitter and loss, shared by all its traffic: runs connect
    through the addresses in routes.json, other traffic through those in others.json. --runs-first gives
    other traffic only the bandwidth that runs leave, as on a link with guaranteed bandwidth. With --promises, the
    connections that a booking's `flows` match have its rate, neither more nor less, and all others share the rest.
    """
    from isthmus.wan import Admission, run_links

    configure_logging(env)
    booked = load_model_file(promises, Admission) if promises else None
    bookings = booked.all_booked if booked else ()
    run_links(load_pool(pool), state, seed, runs_first=runs_first, bookings=bookings, at_s=at)


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus switch",
        "isthmus switch --port 8475 --slots 4096 --json",
        "isthmus switch --host 10.0.0.9 --port 8475 --pool-key-file switch.secret",
    ],
)
def switch(
    env: CliEnvironment,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Listen address; addresses other than loopback need a key file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="UDP port; 0 picks a free one.")] = 0,
    slots: Annotated[int, typer.Option(metavar="N", min=1, max=2**20, help="Slots, shared by all jobs.")] = 1024,
    slot_integers: Annotated[
        int, typer.Option(metavar="N", min=1, help="32-bit integers of a slot, and of a packet; at most 340.")
    ] = 256,
    job_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keys of the jobs: JOB HEXADECIMAL-KEY a line; readable by its owner only."),
    ] = None,
    pool_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Secret of the server's --switch-key-file: accepts all jobs of the pool. Mode 0600."
        ),
    ] = None,
    lease_s: Annotated[
        float,
        typer.Option("--lease", metavar="SECONDS", min=1, help="Slots are freed when a job has sent nothing for this."),
    ] = 120.0,
) -> None:
    """Run a switch that sums gradients of jobs: the software form of in-network aggregation (strategy passing).

    It prints its address, and its counters when Ctrl-C ends it. Workers that cannot reach it sum without it. Without
    a key file it accepts every job of this machine; a key of a job is a secret that its workers share.
    """
    from isthmus.core.messages.switch_keys import read_switch_secret
    from isthmus.switch import (  # numpy loads slowly
        MAX_INTEGERS,
        DerivedJobKeys,
        SlotPool,
        read_job_keys,
        serve_switch,
    )
    from isthmus.wan import UdpSocket

    if slot_integers > MAX_INTEGERS:
        raise InputError(f"a packet has no room for {slot_integers} integers", hint=f"at most {MAX_INTEGERS}")
    if not is_loopback(host) and job_key_file is None and pool_key_file is None:
        raise InputError(
            f"a switch at {host} needs the keys of its jobs",
            hint="--pool-key-file FILE with the secret of `isthmus serve --switch-key-file`, or --job-key-file FILE "
            "with a line JOB KEY for each; create a secret or a key: openssl rand -hex 32",
        )
    keys: Mapping[int, bytes] | None = None if job_key_file is None else read_job_keys(job_key_file)
    if pool_key_file is not None:
        keys = DerivedJobKeys(read_switch_secret(pool_key_file), keys or {})
    pool = SlotPool(
        slots, slot_integers, keys=keys, lease_s=lease_s,
        incarnation=int.from_bytes(os.urandom(4)), secret=os.urandom(32),
    )  # fmt: skip
    with closing(UdpSocket(host, port)) as udp:
        address = f"{udp.address[0]}:{udp.address[1]}"
        found = {"address": address, "slots": slots, "slot_integers": slot_integers, "jobs": len(keys or ())}
        env.answer(found, lambda: f"switch listening at {address} (UDP): {slots} slots of {slot_integers} integers")
        stopped: list[int] = []
        with handled_stop_signals(lambda number, _: stopped.append(number)):
            serve_switch(pool, udp, time.monotonic, lambda: bool(stopped))
    counters = pool.statistics()
    env.answer(counters, lambda: "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in counters.items()))


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


def import_extra(module: str, extra: str) -> ModuleType:
    """Import `module`; if a third-party package is missing, raise `InputError` with the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "isthmus":
            raise
        raise InputError(
            f"this command needs the package '{error.name}', which is not installed",
            hint=f"pip install 'isthmus[{extra}]'",
        ) from error


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


def select_cluster(pool: Pool, name: str | None) -> Cluster:
    """Return the cluster `name` of a pool, or its only one."""
    known = [cluster.name for cluster in pool.clusters]
    if name is None and len(known) > 1:
        raise InputError("the pool has several clusters", hint="choose one: --cluster " + "|".join(known))
    if name is not None and name not in known:
        raise NotFoundError(f"the pool has no cluster '{name}'", hint="available: " + ", ".join(known))
    return pool.cluster(name or known[0])


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


def read_site(file: Path | None, cluster: Cluster) -> SiteFile:
    """Return the site file for `cluster`; raise `FileError` if it refers to unknown names."""
    if file is None:
        return SiteFile()
    site = load_site(file)
    try:
        site.check_cluster(cluster)
    except UnknownNameError as error:
        hint = suggest_name(error.value, error.known)
        raise place_error(file, ("node_groups", error.value), str(error), hint) from error
    return site


def configure_logging(env: CliEnvironment, *, as_json: bool = False) -> None:
    """Send the process's log to standard error."""
    stream = env.stderr if env.stderr is not sys.stderr else None
    handler = logging.StreamHandler(stream)
    handler.addFilter(BoundedLog())
    handler.setFormatter(JsonLineFormatter() if as_json else PlainLineFormatter())
    logging.getLogger("httpx").setLevel(logging.WARNING)  # INFO logs one line per request
    logging.basicConfig(level=logging.INFO, handlers=[handler])
