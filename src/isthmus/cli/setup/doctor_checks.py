"""Checks of `isthmus doctor`: what is installed on this machine, and whether the server can be used from it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isthmus import __version__
from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import ClientSettings, read_context, resolve_settings
from isthmus.client.server_address import parse_server_url
from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.core.loopback import is_loopback
from isthmus.core.process.confined_start import MIN_LANDLOCK_ABI, landlock_abi

EXTRAS = {
    "server": "run `isthmus serve`",
    "postgres": "share one PostgreSQL between servers",
    "agent": "run `isthmus agent`",
    "train": "run workers here",
}
"""Extras of the package, with what each enables."""
SLURM_COMMANDS = ("sbatch", "squeue", "scancel", "sinfo")
PROBE_TIMEOUT_S = 120.0
MAX_PROBE_CHARS = 64 * 1024
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is the memory that is meant
MIN_SHARED_MEMORY_BYTES = 256 * 2**20

TORCH_PROBE = """
import json, torch, torch.distributed as dist
found = {"version": torch.__version__, "devices": [], "backends": []}
if torch.cuda.is_available():
    found["devices"] += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
try:
    import torch_npu
    found["devices"] += [torch.npu.get_device_name(i) for i in range(torch.npu.device_count())]
except Exception:
    pass
if dist.is_available():
    names = ("gloo", "nccl", "mpi")
    found["backends"] = [name for name in names if getattr(dist, f"is_{name}_available")()]
print(json.dumps(found))
"""
"""Runs in a process of its own: the command line never imports torch."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding: `ok`; `missing`: optional, and `next` says how to add it; `problem`: to be solved."""

    name: str
    status: Literal["ok", "missing", "problem"]
    detail: str
    next: str = ""


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _declared_requirements() -> list[str]:
    try:
        return importlib.metadata.requires("isthmus") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _run_python(program: str) -> tuple[int, str]:
    try:
        done = subprocess.run(  # noqa: S603 - this Python with a program that is written here
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the checks ask this machine; replaced in tests."""

    which: Callable[[str], str | None] = shutil.which
    has_module: Callable[[str], bool] = _has_module
    # The requirements that the installed package declares, empty if it is not installed.
    requirements: Callable[[], Sequence[str]] = _declared_requirements
    # Runs a Python program and returns (exit status, output).
    run_python: Callable[[str], tuple[int, str]] = _run_python
    free_bytes: Callable[[Path], int | None] = _free_bytes
    landlock_abi: Callable[[], int] = landlock_abi
    uid: Callable[[], int] = os.geteuid


def installed_checks(machine: Machine) -> Iterator[Check]:
    """Yield the checks of Python, the package's extras, torch and its devices, Slurm and shared memory."""
    yield Check(name="python", status="ok", detail=f"{platform.python_version()}, {sys.executable}")
    requirements = machine.requirements()
    if requirements:
        yield Check(name="isthmus", status="ok", detail=__version__)
        for extra, purpose in EXTRAS.items():
            yield _extra_check(machine, extra, purpose, requirements)
    else:
        install = (
            "pip install 'isthmus[server,agent,train]', or from a checkout: pip install -e '.[server,agent,train]'"
        )
        yield Check(name="isthmus", status="problem", detail=f"{__version__}, not installed as a package", next=install)
    yield _torch_check(machine)
    yield _slurm_check(machine)
    yield _shared_memory_check(machine)
    yield _isolation_check(machine)


def _extra_check(machine: Machine, extra: str, purpose: str, requirements: Sequence[str]) -> Check:
    marked = (line for line in requirements if re.search(rf"extra == ['\"]{extra}['\"]", line))
    names = [re.split(r"[\s\[<>=!~;(]", line, maxsplit=1)[0] for line in marked]
    absent = [name for name in names if not machine.has_module(name.replace("-", "_"))]
    if absent:
        install = f"to {purpose}: pip install 'isthmus[{extra}]'"
        return Check(name=f"extra {extra}", status="missing", detail=f"without {', '.join(absent)}", next=install)
    return Check(name=f"extra {extra}", status="ok", detail=f"can {purpose}")


def _torch_check(machine: Machine) -> Check:
    if not machine.has_module("torch"):
        install = "install the torch build of your chips, then pip install 'isthmus[train]'"
        return Check(name="torch", status="missing", detail="not installed", next=install)
    status, output = machine.run_python(TORCH_PROBE)
    found = _parse_probe(output) if status == 0 else None
    if found is None:
        last = (output.strip().splitlines() or ["no output"])[-1][:200]
        return Check(
            name="torch", status="problem", detail=f"does not load: {last}", next="reinstall torch for this machine"
        )
    devices, backends = found["devices"], ", ".join(found["backends"]) or "none"
    counted = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    detail = f"{found['version']}, devices: {counted or 'CPU only'}, torch.distributed: {backends}"
    if "gloo" not in found["backends"]:
        return Check(name="torch", status="problem", detail=detail, next="install a torch build with gloo")
    return Check(name="torch", status="ok", detail=detail)


def _parse_probe(output: str) -> dict[str, Any] | None:
    """Return what `TORCH_PROBE` has printed last, None for anything else."""
    try:
        found = json.loads(output[-MAX_PROBE_CHARS:].strip().splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("version"), str):
        return None
    lists = (found.get("devices"), found.get("backends"))
    return found if all(isinstance(one, list) and all(isinstance(x, str) for x in one) for one in lists) else None


def _slurm_check(machine: Machine) -> Check:
    absent = [name for name in SLURM_COMMANDS if machine.which(name) is None]
    if not absent:
        return Check(name="slurm", status="ok", detail=", ".join(SLURM_COMMANDS))
    detail = "no commands of Slurm" if len(absent) == len(SLURM_COMMANDS) else f"without {', '.join(absent)}"
    return Check(name="slurm", status="missing", detail=detail, next="the agent uses its built-in local scheduler here")


def _shared_memory_check(machine: Machine) -> Check:
    free = machine.free_bytes(SHARED_MEMORY)
    if free is None:
        detail, following = f"no {SHARED_MEMORY}", "checkpoints in memory use the temporary folder; transport: thread"
        return Check(name="shared memory", status="missing", detail=detail, next=following)
    detail = f"{free / 2**30:.1f} GiB free in {SHARED_MEMORY}"
    if free < MIN_SHARED_MEMORY_BYTES:
        following = "enlarge it: checkpoints in memory and `transport: process` use it"
        return Check(name="shared memory", status="problem", detail=detail, next=following)
    return Check(name="shared memory", status="ok", detail=detail)


def _isolation_check(machine: Machine) -> Check:
    """What an agent that this account starts here can hold its workers to."""
    abi, uid = machine.landlock_abi(), machine.uid()
    accounts = "to accounts of their users (run_as), " if uid == 0 else ""
    if abi < MIN_LANDLOCK_ABI:
        detail = f"an agent can hold workers {accounts}to no new privileges; no Landlock in this kernel"
        following = "storage roots are checked at the start of a worker only; Linux 5.19 or later enforces them"
        return Check(name="isolation", status="missing", detail=detail, next=following)
    detail = f"an agent can hold workers {accounts}to no new privileges and, by Landlock {abi}, to storage roots"
    following = "an agent run as root needs workers.run_as in its policy, else workers are root" if uid == 0 else ""
    return Check(name="isolation", status="ok", detail=detail, next=following)


def server_checks(
    environ: Mapping[str, str],
    connect: Callable[[ClientSettings], ApiClient],
    *,
    server: str | None,
    token_file: Path | None,
    ca: Path | None,
) -> Iterator[Check]:
    """Yield the checks of settings, server, TLS and token; each needs the ones before it."""
    try:
        settings = resolve_settings(environ, server=server, token_file=token_file, ca=ca)
        chosen = bool(server or environ.get("ISTHMUS_SERVER") or read_context(environ).get("server"))
        client = connect(settings)
    except IsthmusError as error:
        yield Check(name="settings", status="problem", detail=error.message, next=error.hint or "")
        return
    with client:
        try:
            health = client.health()
        except IsthmusError as error:
            absent = isinstance(error, UnavailableError) and not chosen
            status: Literal["missing", "problem"] = "missing" if absent else "problem"
            yield Check(name="server", status=status, detail=error.message, next=error.hint or "")
            return
        yield Check(name="server", status="ok", detail=f"{settings.server}, version {health.version}")
        yield _tls_check(settings)
        yield _token_check(client, settings)


def _tls_check(settings: ClientSettings) -> Check:
    url = parse_server_url(settings.server)
    if url.scheme == "https":
        detail = f"certificate verified with {settings.ca or 'the CAs of this system'}"
        return Check(name="tls", status="ok", detail=detail)
    if is_loopback(url.host):
        return Check(name="tls", status="ok", detail="none needed on loopback")
    following = "serve with --tls-cert and --tls-key, or --self-signed"
    return Check(name="tls", status="problem", detail="none: a token would be sent in clear", next=following)


def _token_check(client: ApiClient, settings: ClientSettings) -> Check:
    if settings.token is None:
        ask = "ask the pool's operator for a token; give it with --token-file or ISTHMUS_TOKEN_FILE"
        return Check(name="token", status="problem", detail="none is given", next=ask)
    try:
        pool = client.pool()
    except IsthmusError as error:
        return Check(name="token", status="problem", detail=error.message, next=error.hint or "")
    connected = sum(one.connected for one in pool.clusters)
    free = sum(sum(one.free_chips.values()) for one in pool.clusters)
    detail = f"accepted; {len(pool.clusters)} clusters visible, {connected} connected, {free} chips free"
    if not connected:
        return Check(
            name="token", status="ok", detail=detail, next="start an agent at each site: `isthmus agent --help`"
        )
    return Check(name="token", status="ok", detail=detail)
