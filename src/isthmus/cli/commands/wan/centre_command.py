"""The command `wan centre`: the decision centre of a network, with a port."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.commands.process_commands import configure_logging
from isthmus.cli.commands.wan.wan_options import address_option
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.files.user_files import load_model_file
from isthmus.wan import AdmissionFile, CentreConfig, LoggedCentre, read_centre_token, run_centre

EXAMPLES = [
    "isthmus wan centre network.yaml --state centre",
    (
        "isthmus wan centre network.yaml --state centre --listen 10.0.0.9:7600 --token-file centre.token "
        "--tls-cert cert.pem --tls-key key.pem"
    ),
]


def serve_centre(
    env: CliEnvironment,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The network: `topology`, as for `isthmus wan admit`.")],
    state: Annotated[Path, typer.Option("--state", metavar="DIR", help="Folder of the log, kept across restarts.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where agents ask it; port 0: any.")
    ] = "127.0.0.1:7600",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Secret of its clients; mode 0600. Required beyond loopback.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")] = None,
) -> None:
    """Serve the decision centre of a network, which agents ask for paths before their parts start.

    An agent with `--centre` holds a path for each link that a part is promised bandwidth on, before it reports the part
    as prepared; it confirms the path when the job starts and gives it back at its end. So a job whose plan does not fit
    the network waits instead of sharing what another one was promised. Each event is on disk before its answer is
    sent: a centre that is restarted, or killed, has promised what it had promised.
    """
    configure_logging(env)
    config = CentreConfig(
        listen=address_option(listen, any_port=True),
        token=read_centre_token(token_file) if token_file is not None else "",
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    centre = LoggedCentre(load_model_file(file, AdmissionFile).topology, state)

    def on_start(address: str) -> None:
        found = {"address": address, "paths": centre.num_paths}
        env.answer(found, lambda: f"decision centre at {address}: {centre.num_paths} paths from its log")

    run_centre(config, centre, on_start)
