"""The pages on money for the operator and for owners, typed command by command against a server with two sites."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from tests.cli.test_catalogue_commands import forwarded
from tests.control.conftest import server
from tests.control.serving import EAST, WEST, report
from tests.control.test_server_api import Server
from tests.docs.follow_guide import ROOT, blocks

__all__ = ["server"]

pytestmark = pytest.mark.integration
GUIDES = (("operator", "root"), ("owner", "owner-east"))


def typed(server: Server, caller: str, command: str) -> str:
    """Return what a command prints as a caller; it must succeed."""
    env = CliEnvironment(
        variables={"ISTHMUS_SERVER": "http://127.0.0.1:1", "ISTHMUS_TOKEN": caller, "COLUMNS": "200"},
        stdout=io.StringIO(), stderr=io.StringIO(), transport=forwarded(server), now=lambda: server.now_s,
    )  # fmt: skip
    program, *arguments = shlex.split(command)
    assert program == "isthmus"
    status = main(arguments, env=env)
    text: str = env.stdout.getvalue() + env.stderr.getvalue()  # type: ignore[attr-defined]
    assert status == 0, f"{command}: {text}"
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.mark.parametrize(("page", "caller"), GUIDES, ids=lambda one: one)
def test_each_command_of_a_guide_on_money_prints_what_the_page_shows(
    server: Server, tmp_path: Path, page: str, caller: str
) -> None:
    """Files of the page are written as it names them, in the order of the page."""
    for site in (EAST, WEST):
        server.sync(report(site))
    owned = {"name": "east-lab", "owner": "owner-east", "members": ["ann"]}  # as the page for operators has it
    assert page != "owner" or server.call("POST", "/v1/quotas", {"projects": [owned]}, token="root").status_code == 201
    num_typed = 0
    with contextlib.chdir(tmp_path):
        for block in blocks(ROOT / "docs" / "guide" / f"{page}.md"):
            if block.language == "yaml":
                Path(block.text.partition("\n")[0].removeprefix("# ")).write_text(block.text)
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:] if block.language == "console" else ():
                command, _, expected = part.partition("\n")
                assert typed(server, caller, command) == expected, command
                num_typed += 1
    assert num_typed >= 3
