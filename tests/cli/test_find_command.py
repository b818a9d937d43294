"""A command loads its own module; what it is does not depend on how it was loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from isthmus.cli.app.find_command import MODULES, find_app
from isthmus.cli.app.typer_app import app

pytestmark = pytest.mark.integration

NAMES = sorted(name for names in MODULES.values() for name in names)


def tree(command: Any, path: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield a command with its help and options, and those below it."""
    yield path, command.help, [option for parameter in command.params for option in parameter.opts]
    for name, below in getattr(command, "commands", {}).items():
        yield from tree(below, f"{path} {name}")


@pytest.mark.parametrize("name", NAMES)
def test_a_command_is_the_same_alone_and_among_all(name: str) -> None:
    """With its options and the commands of its group; the app has no other than those of its module."""
    alone, among_all = (typer.main.get_group(one).commands for one in (find_app([name, "--help"]), app))
    assert list(tree(alone[name], name)) == list(tree(among_all[name], name))
    assert set(alone) == {one for names in MODULES.values() if name in names for one in names}


@pytest.mark.parametrize("arguments", [(), ("--help",), ("no-such-command",), ("site", "list"), ("plan",)])
def test_any_other_word_finds_all_commands(arguments: tuple[str, ...]) -> None:
    """Help lists all, and an error names what is near to a mistyped one."""
    assert find_app(arguments) is app


def test_the_commands_of_processes_load_neither_planner_nor_simulator() -> None:
    """Each agent, server and link emulation is a process, and they start together."""
    code = (
        "import json, sys; from isthmus.cli.app.find_command import find_app; find_app(['agent']); "
        "print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    loaded = set(json.loads(done.stdout))
    assert "isthmus.cli.commands.processes.agent_command" in loaded
    assert not loaded & {"isthmus.plan", "isthmus.sim", "isthmus.control.coordinator", "isthmus.control.simulation"}
