"""`isthmus switch`: a switch that sums gradients of jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import (
    PANEL,
)
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.errors import InputError
from isthmus.core.loopback import is_loopback
from isthmus.core.process.stop_signals import handled_stop_signals

commands = typer.Typer()


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
