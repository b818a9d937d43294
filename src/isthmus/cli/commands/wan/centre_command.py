"""The commands `wan centre` and `wan domain`: the decision centre of a network, and the controller of a domain."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.commands.process_setup import configure_logging
from isthmus.cli.commands.wan.wan_options import address_option, site_pairs
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.errors import InputError, IsthmusError
from isthmus.core.files.user_files import load_model_file
from isthmus.wan import (
    AdmissionFile,
    CentreAddress,
    CentreConfig,
    LoggedCentre,
    LoggedDomain,
    read_centre_token,
    run_centre,
    run_domain,
)

_log = logging.getLogger(__name__)
EXAMPLES = [
    "isthmus wan centre network.yaml --state centre",
    (
        "isthmus wan centre network.yaml --state centre --listen 10.0.0.9:7600 --token-file centre.token "
        "--tls-cert cert.pem --tls-key key.pem"
    ),
    (
        "isthmus wan centre network.yaml --state centre --domain north=10.0.7.1:7601 "
        "--domain-token north=north.token --domain-ca north=north-ca.pem"
    ),
]
DOMAIN_EXAMPLES = [
    "isthmus wan domain network.yaml north --state north",
    (
        "isthmus wan domain network.yaml north --state north --listen 10.0.7.1:7601 --token-file north.token "
        "--tls-cert cert.pem --tls-key key.pem"
    ),
]

TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Secret of its clients; mode 0600. Required beyond loopback.")
]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate, PEM.")]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")]


def serve_centre(
    env: CliEnvironment,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The network: `topology`, as for `isthmus wan admit`.")],
    state: Annotated[Path, typer.Option("--state", metavar="DIR", help="Folder of the log, kept across restarts.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where agents ask it; port 0: any.")
    ] = "127.0.0.1:7600",
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=HOST:PORT", help="Another operator's controller of a domain: `isthmus wan domain`."),
    ] = None,
    domain_token: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="Secret of that controller's clients; mode 0600.")
    ] = None,
    domain_ca: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="CA of its certificate, PEM. Required beyond loopback."),
    ] = None,
) -> None:
    """Serve the decision centre of a network, which agents ask for paths before their parts start.

    An agent with `--centre` holds a path for each link that a part is promised bandwidth on, before it reports the part
    as prepared; it confirms the path when the job starts and gives it back at its end. So a job whose plan does not fit
    the network waits instead of sharing what another one was promised. Each event is on disk before its answer is
    sent: a centre that is restarted, or killed, has promised what it had promised.

    The controllers of all domains run in this process, but for those of `--domain`, which their operators serve. A
    path is held or booked when all its domains have said so; one that is silent for 20 s, or refuses, ends the attempt,
    and what the others kept for it is released.
    """
    configure_logging(env)
    config = _config(listen, token_file, tls_cert, tls_key)
    domains = _domains(domain or [], domain_token or [], domain_ca or [])
    centre = LoggedCentre(load_model_file(file, AdmissionFile).topology, state, frozenset(domains))

    def on_start(address: str) -> None:
        found = {"address": address, "paths": centre.num_paths}
        env.answer(found, lambda: f"decision centre at {address}: {centre.num_paths} paths from its log")

    run_centre(config, centre, on_start, domains)


def serve_domain(
    env: CliEnvironment,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The network: `topology`, as for `isthmus wan admit`.")],
    name: Annotated[str, typer.Argument(metavar="DOMAIN", help="The domain, whose pipes it keeps.")],
    state: Annotated[Path, typer.Option("--state", metavar="DIR", help="Folder of the log, kept across restarts.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where decision centres order; port 0: any.")
    ] = "127.0.0.1:7601",
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Serve the controller of a domain, for the decision centre of another operator.

    It alone decides what fits on the pipes of its domain, so a wrong or hostile centre over-books nothing. The file
    has to state these pipes; those of other domains are ignored. What a centre prepares ends with its lease, what it
    commits with its time. Each order is on disk before its answer is sent: a restarted controller keeps what it kept.

    Pipes under `down` in the file have failed. It follows the file: the centre moves what is booked on them.
    """
    configure_logging(env)
    config = _config(listen, token_file, tls_cert, tls_key)
    read = load_model_file(file, AdmissionFile)
    domain = LoggedDomain(read.topology, name, state, time.time())
    domain.set_down(read.down)
    read_ns = file.stat().st_mtime_ns

    def follow() -> None:
        nonlocal read_ns
        try:
            changed_ns = file.stat().st_mtime_ns
            if changed_ns != read_ns:
                read_ns = changed_ns
                domain.set_down(load_model_file(file, AdmissionFile).down)
        except (OSError, IsthmusError) as error:
            _log.warning("%s is not followed: %s", file, error)

    def on_start(address: str) -> None:
        found = {"address": address, "domain": name, "bookings": domain.num_bookings}
        env.answer(found, lambda: f"controller of {name} at {address}: {domain.num_bookings} bookings from its log")

    run_domain(config, domain, on_start, follow)


def _config(listen: str, token_file: Path | None, tls_cert: Path | None, tls_key: Path | None) -> CentreConfig:
    token = read_centre_token(token_file) if token_file is not None else ""
    return CentreConfig(listen=address_option(listen, any_port=True), token=token, tls_cert=tls_cert, tls_key=tls_key)


def _domains(addresses: list[str], tokens: list[str], cas: list[str]) -> dict[str, CentreAddress]:
    """Return where the controllers of other operators listen; raise `InputError` for a file of another domain."""
    found = dict(site_pairs("--domain", addresses))
    token_of, ca_of = dict(site_pairs("--domain-token", tokens)), dict(site_pairs("--domain-ca", cas))
    if unknown := (token_of.keys() | ca_of.keys()) - found.keys():
        raise InputError(f"no --domain {min(unknown)}", hint=f"--domain {min(unknown)}=HOST:PORT")
    return {
        name: CentreAddress(
            address=address_option(address),
            token=read_centre_token(Path(token_of[name])) if name in token_of else "",
            ca=Path(ca_of[name]) if name in ca_of else None,
        )
        for name, address in found.items()
    }
