"""`isthmus doctor`: what it finds, what it says to do next, and its exit status."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest

from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.setup.doctor_checks import SLURM_COMMANDS, TORCH_PROBE, Machine, installed_checks
from isthmus.cli.setup.doctor_command import run_doctor
from tests.cli.fake_server import TOKEN, URL, FakeServer, run

REQUIREMENTS = (
    "httpx>=0.27",
    'prometheus-client>=0.20 ; extra == "server"',
    "psycopg[binary]>=3.2; extra == 'postgres'",
    'psutil>=5.9; extra == "agent"',
    'torch>=2.6; extra == "train"',
)
PROBE = {"version": "2.6", "devices": ["H20", "H20", "910B"], "backends": ["gloo", "nccl"]}
COMPLETE = Machine(
    which=lambda name: f"/usr/bin/{name}",
    has_module=lambda _: True,
    requirements=lambda: REQUIREMENTS,
    run_python=lambda program: (0, json.dumps(PROBE)) if program == TORCH_PROBE else (1, ""),
    free_bytes=lambda _: 2**33,
    landlock_abi=lambda: 7,
    uid=lambda: 1000,
)


def examine(machine: Machine, server: FakeServer | None = None, **variables: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the checks by name."""
    shell = CliEnvironment(
        variables={"XDG_CONFIG_HOME": "/nonexistent"} | variables,
        stdout=io.StringIO(),
        transport=(server or FakeServer(outages=10**6)).transport(),
        sleep=lambda _: None,
        as_json=True,
    )
    status = run_doctor(shell, machine, server=None, token_file=None, ca=None)
    found = json.loads(shell.stdout.getvalue())  # type: ignore[attr-defined]
    assert found["ok"] == (status == 0)
    return status, {check["name"]: check for check in found["checks"]}


def test_a_complete_machine_with_a_server_has_no_problem() -> None:
    """Devices are counted by kind, the server's version, TLS and the token's view of the pool are told."""
    status, checks = examine(COMPLETE, FakeServer(), ISTHMUS_SERVER=URL, ISTHMUS_TOKEN=TOKEN)
    assert status == 0
    assert {check["status"] for check in checks.values()} == {"ok"}
    assert checks["torch"]["detail"] == "2.6, devices: 2 x H20, 1 x 910B, torch.distributed: gloo, nccl"
    assert "9.9" in checks["server"]["detail"]
    assert checks["tls"]["detail"] == "none needed on loopback"
    assert "3 clusters visible, 2 connected, 3 chips free" in checks["token"]["detail"]


@pytest.mark.parametrize(
    ("abi", "uid", "status", "words"),
    [
        (7, 1000, "ok", "to no new privileges and, by Landlock 7, to storage roots"),
        (7, 0, "ok", "to accounts of their users (run_as), to no new privileges"),
        (0, 1000, "missing", "no Landlock in this kernel"),
    ],
)
def test_it_says_what_an_agent_can_hold_its_workers_to(abi: int, uid: int, status: str, words: str) -> None:
    """A kernel without Landlock is no problem: roots are then checked when a worker starts."""
    machine = replace(COMPLETE, landlock_abi=lambda: abi, uid=lambda: uid)
    code, checks = examine(machine, FakeServer(), ISTHMUS_SERVER=URL, ISTHMUS_TOKEN=TOKEN)
    assert (code, checks["isolation"]["status"]) == (0, status)
    assert words in checks["isolation"]["detail"]
    assert ("run_as" in checks["isolation"]["next"]) == (uid == 0)


def test_missing_parts_are_named_with_what_installs_them_and_are_no_problem() -> None:
    """Without extras, torch, Slurm and a server that was never configured: status 0, and each says what to do."""
    bare = replace(COMPLETE, which=lambda _: None, has_module=lambda _: False)
    status, checks = examine(bare)
    assert status == 0
    assert checks["extra server"]["detail"] == "without prometheus-client"
    assert checks["extra postgres"]["next"].endswith("pip install 'isthmus[postgres]'")
    for name in ("extra agent", "extra train", "torch", "slurm", "server"):
        assert checks[name]["status"] == "missing"
        assert checks[name]["next"]
    assert "token" not in checks


def test_some_slurm_commands_are_not_slurm() -> None:
    """The absent ones are named."""
    part = replace(COMPLETE, which=lambda name: None if name == SLURM_COMMANDS[0] else "/bin/x")
    assert examine(part)[1]["slurm"]["detail"] == "without sbatch"


@pytest.mark.parametrize(
    ("output", "status"),
    [("ImportError: libcudart.so.12", 1), ("", 0), ("[1]", 0), ('{"version": 3}', 0), ("[" * 60_000, 0),
     ('{"version": "2", "devices": [{}], "backends": []}', 0), ("x" * 10**6, 0)],
)  # fmt: skip
def test_a_torch_that_does_not_load_is_a_problem(output: str, status: int) -> None:
    """Whatever its process prints is read as data, within bounds, and shown in one short line."""
    code, checks = examine(replace(COMPLETE, run_python=lambda _: (status, output)))
    assert (code, checks["torch"]["status"]) == (1, "problem")
    assert len(checks["torch"]["detail"]) < 300


def test_torch_without_gloo_and_a_small_shared_memory_are_problems() -> None:
    """Both stop a run later; both say what to do now."""
    probe = json.dumps(PROBE | {"backends": ["nccl"]})
    _, checks = examine(replace(COMPLETE, run_python=lambda _: (0, probe), free_bytes=lambda _: 2**20))
    assert [checks[name]["status"] for name in ("torch", "shared memory")] == ["problem", "problem"]
    absent = examine(replace(COMPLETE, free_bytes=lambda _: None))[1]
    assert absent["shared memory"]["status"] == "missing"


@pytest.mark.parametrize(
    ("server", "variables", "name", "words"),
    [
        (FakeServer(outages=10**6), {"ISTHMUS_SERVER": URL}, "server", "no server at"),
        (FakeServer(protocol=5), {"ISTHMUS_SERVER": URL}, "server", "protocol 5"),
        (FakeServer(), {"ISTHMUS_SERVER": URL}, "token", "none is given"),
        (FakeServer(), {"ISTHMUS_SERVER": URL, "ISTHMUS_TOKEN": "wrong"}, "token", "no valid token"),
        (FakeServer(), {"ISTHMUS_SERVER": "nonsense"}, "settings", "not a server address"),
        (FakeServer(), {"ISTHMUS_SERVER": "http://pool.example", "ISTHMUS_TOKEN": "t"}, "settings", "unencrypted"),
        (FakeServer(), {"ISTHMUS_TOKEN_FILE": "/nonexistent/token"}, "settings", "cannot be read"),
        (FakeServer(), {"ISTHMUS_SERVER": "https://pool.example", "ISTHMUS_CA": "/nonexistent"}, "settings", "cannot"),
    ],
)
def test_a_server_that_cannot_be_used_is_a_problem_with_a_next_step(
    server: FakeServer, variables: dict[str, str], name: str, words: str
) -> None:
    """Address, version, certificate, token: the first that fails is named, and the status is 1."""
    status, checks = examine(COMPLETE, server, **variables)
    assert (status, checks[name]["status"]) == (1, "problem")
    assert words in checks[name]["detail"]


def test_a_verified_certificate_is_told() -> None:
    """With https the check names what verified it."""
    checks = examine(COMPLETE, FakeServer(), ISTHMUS_SERVER="https://pool.example", ISTHMUS_TOKEN=TOKEN)[1]
    assert checks["tls"]["detail"] == "certificate verified with the CAs of this system"


def test_every_package_of_an_extra_is_found_by_the_name_of_its_module() -> None:
    """On the machine of the tests, where all extras are installed, none counts as missing."""
    checks = {check.name: check for check in installed_checks(replace(Machine(), run_python=COMPLETE.run_python))}
    extras = {name: check.detail for name, check in checks.items() if name.startswith("extra")}
    assert len(extras) == 4
    assert not [detail for name, detail in extras.items() if detail.startswith("without") and name != "extra postgres"]


@pytest.mark.slow
def test_the_command_prints_a_table_for_people() -> None:
    """The real machine, with the real torch in a process of its own."""
    done = run(FakeServer(), "doctor", environ={"COLUMNS": "80"})
    assert done.status == 0, done.out
    assert "devices:" in done.out.replace("\n", " ")
    assert "no problem found" in done.out
