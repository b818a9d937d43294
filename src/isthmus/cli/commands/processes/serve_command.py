"""`isthmus serve`: the pool's server."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import (
    PANEL,
    DatabaseOption,
    LogJsonOption,
    StateOption,
    configure_logging,
    import_extra,
)
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.client_settings import DEFAULT_PORT
from isthmus.control.algorithms.compaction_policy import CompactionPolicy
from isthmus.control.algorithms.global_order import Objective
from isthmus.control.queries.quotas import Quotas
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import (
    load_oidc,
    load_pool,
)

commands = typer.Typer()
OptionalPoolOption = Annotated[
    Path | None,
    typer.Option("--pool", metavar="POOL.yaml", help="The operator's pool file: links, owners, chips."),
]
HostOption = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Listen address; addresses other than loopback need TLS.")
]
CertificateOption = Annotated[Path | None, typer.Option(metavar="FILE", help="The server's certificate, PEM.")]
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
