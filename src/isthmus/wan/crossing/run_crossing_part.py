"""`python -m isthmus.wan.crossing.run_crossing_part SPEC.json STATE`: a proxy or gateway of a site, for its agent.

It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError, IsthmusError
from isthmus.core.text.plain_line_formatter import PlainLineFormatter
from isthmus.wan.crossing.part_spec import MAX_SPEC_BYTES, STARTED_FILE, GatewaySpec, ProxySpec
from isthmus.wan.crossing.route_device import route_device
from isthmus.wan.emulator import write_json_atomically
from isthmus.wan.gateway.run_gateway import run_gateway
from isthmus.wan.proxy.run_proxy import run_proxy

_SPEC: TypeAdapter[ProxySpec | GatewaySpec] = TypeAdapter(
    Annotated[ProxySpec | GatewaySpec, Field(discriminator="kind")]
)
_PR_SET_PDEATHSIG = 1


def run_crossing_part(spec_file: Path, state: Path) -> None:
    """Run the part until SIGTERM or SIGINT; raise `IsthmusError` if it cannot start."""
    spec = read_spec(spec_file)
    started = state / STARTED_FILE

    def on_start(found: dict[str, Any]) -> None:
        if isinstance(spec, GatewaySpec) and spec.device is not None:
            networks = [network for one in spec.sites.values() for network in one.networks]
            route_device(spec.device, networks, spec.device_mtu_bytes)
        write_json_atomically(started, {**found, "pid": os.getpid()})

    try:
        if isinstance(spec, ProxySpec):
            run_proxy(spec.config(), state, on_start)
        else:
            run_gateway(spec.config(), state, on_start)
    finally:
        started.unlink(missing_ok=True)


def read_spec(file: Path) -> ProxySpec | GatewaySpec:
    """Return the specification in `file`; raise `FileError` for anything else."""
    try:
        return _SPEC.validate_json(read_within(file, MAX_SPEC_BYTES))
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", file=str(file)) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise FileError(first["msg"], file=str(file), field=field, hint="the agent writes it at each start") from error


def main() -> int:
    """Run the part that the arguments name; return the exit status."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainLineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    try:
        run_crossing_part(Path(sys.argv[1]), Path(sys.argv[2]))
    except IsthmusError as error:
        sys.stderr.write(json.dumps({"error": error.message, "hint": error.hint}) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
