"""Commands on a server's store: check, backup, compact, restore. They need the server's state folder, not its port."""

from __future__ import annotations

from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import DatabaseOption, import_extra
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.control.algorithms.compaction_policy import CompactionPolicy
from isthmus.core.errors import ConflictError, InputError
from isthmus.core.text.printable import printable

commands = typer.Typer()
server_commands = typer.Typer(
    help="Verify, back up, restore and compact a server's store, on its machine.", no_args_is_help=False
)
commands.add_typer(server_commands, name="server", rich_help_panel="Processes")

StateFolderOption = Annotated[Path, typer.Option("--state", metavar="DIR", help="State folder of the server.")]


@command(
    server_commands,
    panel="Processes",
    examples=[
        "isthmus server check --state /var/lib/isthmus",
        "isthmus server check --state replica-2 --database db.address",
        "isthmus server check --state st --json | jq .problems",
    ],
)
def check(env: CliEnvironment, state: StateFolderOption, database: DatabaseOption = None) -> None:
    """Verify the event log: numbers without a gap, the hash of every event, and the last acknowledged one.

    Reads only, also while servers run. Ends with status 6 if there is a problem.
    """
    backup_file = import_extra("isthmus.control.server.backup_file", "server")
    report = backup_file.check_store_of(_config(state, database))
    env.answer(
        report.as_dict(), lambda: "\n".join([_summary(report), *(f"  {printable(one)}" for one in report.problems)])
    )
    if report.problems:
        raise ConflictError(
            f"the event log of {report.name} has a problem: {report.problems[0]}",
            hint="keep the state folder, and restore the newest backup: docs/guide/backup.md",
        )


@command(
    server_commands,
    panel="Processes",
    examples=[
        "isthmus server backup /backup/isthmus-monday.db --state /var/lib/isthmus",
        "isthmus server backup monday.db --state replica-2 --database db.address --json",
    ],
)
def backup(
    env: CliEnvironment,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The backup; it must not exist yet.")],
    state: StateFolderOption,
    database: DatabaseOption = None,
) -> None:
    """Copy the store to one file and verify the copy, also while servers run.

    The file has the events, metrics, logs and the hashes of tokens, from SQLite and PostgreSQL alike. Its owner alone
    may read it. The state folder's TLS files, `admin.token` and `pool.yaml` are not part of it.
    """
    backup_file = import_extra("isthmus.control.server.backup_file", "server")
    report = backup_file.write_backup(_config(state, database), file)
    env.answer(report.as_dict() | {"file": str(file)}, lambda: f"{file}: {_summary(report)}")


@command(
    server_commands,
    panel="Processes",
    examples=[
        "isthmus server compact --state /var/lib/isthmus",
        "isthmus server compact --state /var/lib/isthmus --keep-days 0 --archive /backup/events",
        "isthmus server compact --state replica-2 --database db.address --json",
    ],
)
def compact(
    env: CliEnvironment,
    state: StateFolderOption,
    database: DatabaseOption = None,
    keep_days: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="Events of the last days stay in the log.")
    ] = 30.0,
    archive: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for a copy of the events that leave the log.")
    ] = None,
    archive_mib: Annotated[
        int | None, typer.Option(metavar="MIB", min=1, help="Size from which that folder loses its oldest files.")
    ] = None,
) -> None:
    """Replace old events by the state after them. Stop the server of the state folder first.

    A running server does the same by itself (`isthmus serve --keep-log-days`). Jobs, their history and the audit log
    stay as they are: only the events that the state was made of leave. Other servers on the database may run.
    """
    compaction = import_extra("isthmus.control.server.compact_log", "server")
    policy = CompactionPolicy(keep_s=keep_days * 86400.0)
    config = replace_fields(
        _config(state, database),
        compaction=policy,
        archive=archive,
        archive_bytes=None if archive_mib is None else archive_mib << 20,
    )
    report = compaction.compact_log(config, env.now(), lambda step, count: env.print_note(f"{step} {count:,} events"))
    env.answer(report.as_dict(), lambda: _compaction_summary(report))


@command(
    server_commands,
    panel="Processes",
    examples=[
        "isthmus server restore /backup/monday.db --state /var/lib/isthmus-new",
        "isthmus server restore /backup/monday.db --state /var/lib/isthmus --replace --gone hangzhou",
        "isthmus server restore monday.db --state replica-2 --database empty-db.address --json",
        "isthmus server restore --as-is --state replica-2 --database db.address",
    ],
)
def restore(
    env: CliEnvironment,
    state: StateFolderOption,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A file of `isthmus server backup`.")] = None,
    database: DatabaseOption = None,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Accept the log that the database has now, restored by its own means.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the SQLite database of the folder; the old one is kept beside.")
    ] = False,
    gone: Annotated[
        list[str] | None, typer.Option(metavar="SITE", help="A site that will not report again; repeat it for several.")
    ] = None,
) -> None:
    """Go back to a backup. Stop all servers of the store first.

    What came after the backup is lost to the server, but not to the sites: jobs of the backup start only after every
    site has reported, attempts begun later go on, and `isthmus pool` lists what the log does not have.
    """
    if as_is == (file is not None) or (as_is and replace):
        raise InputError("give either the FILE of a backup or --as-is", hint="--replace needs a FILE")
    store = import_extra("isthmus.control.server.restore_store", "server")
    config, sites = _config(state, database), gone or []
    if file is None:
        report = store.accept_log(config, env.now(), sites)
    else:
        report = store.restore_backup(config, file, env.now(), sites, replaces=replace)
    env.answer(
        report.as_dict() | {"state": str(state)},
        lambda: f"{_summary(report)}\nstart the server, then see `isthmus pool`: sites report what runs there",
    )


def _config(state: Path, database: Path | None) -> Any:
    if database is not None:
        import_extra("isthmus.control.store.postgres_store", "postgres")
    return import_extra("isthmus.control.server.server_config", "server").ServerConfig(state=state, database=database)


def _compaction_summary(report: Any) -> str:
    """Return what a compaction did in a sentence or two."""
    if not report.base:
        return f"no event is older than the log keeps: {report.num_kept:,} events stay"
    text = f"a base replaces the events up to {report.base:,}: {report.num_dropped:,} dropped, {report.num_kept:,} kept"
    if report.before_bytes is not None and report.after_bytes is not None:
        text += f"; the database has {report.after_bytes / 2**20:.1f} MiB, before {report.before_bytes / 2**20:.1f}"
    return text if report.archive is None else f"{text}\nthe events are in {report.archive}"


def _summary(report: Any) -> str:
    if report.store is None:
        return f"{report.name}: a store of an earlier version"
    sound = "all in order" if not report.problems else f"in order up to event {report.end.number}"
    base = f" behind a base in place of {report.base:,}" if report.base else ""
    events = f"{report.num_events:,} events{base}"
    return f"store {report.store}: {events}, {sound}; last hash {report.end.digest.hex()[:16]}"
