"""`isthmus site invite`, `join`, `invitations` and `accept` on the application in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.agent.service.agent_key import KEY_FILE_NAME
from tests.control.joining import sync
from tests.control.serving import cluster
from tests.control.test_leave_api import Shell
from tests.control.test_server_api import Server

pytestmark = pytest.mark.integration

HERE = cluster("qingyang", owner="owner-east", chips=4)
POOL = """
version: 1
clusters:
- name: qingyang
  owner: owner-east
  node_groups: [{name: h20, chip: H20, nodes: 1, chips_per_node: 4, virtual: {}}]
"""


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    (tmp_path / "pool.yaml").write_text(POOL)
    return tmp_path


def join(server: Server, desk: Path, code: str, *more: str) -> tuple[int, str]:
    return Shell(server, "").run(
        "site", "join", code, "--state", str(desk / "agent"), "--pool", str(desk / "pool.yaml"), *more
    )


def test_a_site_joins_by_two_commands_and_its_key_reports(server: Server, desk: Path) -> None:
    """Steps: the operator prints a code; the owner types it, in small letters; the printed command is complete."""
    status, code = Shell(server, "root").run("site", "invite", "owner-east", "--cluster", "qingyang")
    assert (status, len(code.strip().replace("-", "")), code.count("-")) == (0, 26, 5)
    status, text = join(server, desk, code.strip().lower())
    assert status == 0, text
    assert "has joined the pool, on probation; start its agent:" in text
    assert f"--state {desk / 'agent'}" in text
    key = json.loads((desk / "agent" / KEY_FILE_NAME).read_text())["key"]
    assert key not in text
    assert sync(server, key, HERE).status_code == 200
    again, _ = join(server, desk, code)
    assert again == 0, "the answer may have been lost"
    _, listed = Shell(server, "root").run("site", "invitations")
    assert "used by qingyang" in listed
    assert code.strip() not in listed
    _, shown = Shell(server, "root").run("site", "list")
    assert "probation" in shown
    status, text = Shell(server, "root").run("site", "accept", "qingyang")
    assert (status, text) == (0, "qingyang takes any job\n")
    _, shown = Shell(server, "root").run("site", "show", "qingyang")
    assert "new parts  taken" in shown


def test_a_site_that_fails_a_check_does_not_join(server: Server, desk: Path) -> None:
    """The findings are printed, nothing is sent, and no key is drawn; the code can still be used."""
    (desk / "site.yaml").write_text(
        "kind: slurm\nnode_groups: {h20: {partition: x}}\noptions: {config: /nowhere/slurm.conf, timeout_s: 0.5}\n"
    )
    _, code = Shell(server, "root").run("site", "invite", "owner-east")
    status, text = join(server, desk, code, "--site", str(desk / "site.yaml"))
    assert (status, "wrong" in text) == (2, True)
    assert not (desk / "agent").exists()
    assert server.shell.pool().clusters == ()
    assert join(server, desk, code)[0] == 0


@pytest.mark.parametrize("code", ["", "ABC", "A" * 27, "!" * 26, "\u0130" * 26])
def test_what_is_no_code_is_not_sent(server: Server, desk: Path, code: str) -> None:
    """A cut or mistyped code costs no failed login."""
    status, text = join(server, desk, code)
    assert (status, "this is no code" in text) == (2, True)
    assert not (desk / "agent").exists()


def test_a_code_of_another_owner_is_explained(server: Server, desk: Path) -> None:
    """The message of the server says what to do next."""
    _, code = Shell(server, "root").run("site", "invite", "owner-west")
    status, text = join(server, desk, code)
    assert status != 0
    assert "the invitation is for a cluster of owner 'owner-west'" in text


def test_an_invitation_to_what_is_no_name_is_named(server: Server) -> None:
    """Before anything is asked of the server."""
    status, text = Shell(server, "root").run("site", "invite", "no name")
    assert (status, "'no name' is not a valid name" in text) == (2, True)
