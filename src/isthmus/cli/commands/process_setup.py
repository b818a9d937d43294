"""What commands that run as processes have in common: options, logging, and packages that load lazily."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from isthmus.cli.environment.bounded_log import BoundedLog
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.environment.json_log import JsonLineFormatter
from isthmus.core.errors import InputError, NotFoundError
from isthmus.core.files.user_files import (
    load_site,
    place_error,
)
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.pool import Cluster, Pool, UnknownNameError
from isthmus.core.text.plain_line_formatter import PlainLineFormatter

PANEL = "Processes"

PoolOption = Annotated[Path, typer.Option("--pool", metavar="POOL.yaml", help="The pool: see `isthmus schema pool`.")]
StateOption = Annotated[Path, typer.Option("--state", metavar="DIR", help="State folder, kept across restarts.")]
DatabaseOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the address of a PostgreSQL shared by several servers."),
]
LogJsonOption = Annotated[
    bool, typer.Option("--log-json", help="Log one JSON object per line, with job and part as fields.")
]


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


def select_cluster(pool: Pool, name: str | None) -> Cluster:
    """Return the cluster `name` of a pool, or its only one."""
    known = [cluster.name for cluster in pool.clusters]
    if name is None and len(known) > 1:
        raise InputError("the pool has several clusters", hint="choose one: --cluster " + "|".join(known))
    if name is not None and name not in known:
        raise NotFoundError(f"the pool has no cluster '{name}'", hint="available: " + ", ".join(known))
    return pool.cluster(name or known[0])


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
