"""What `--help` must show for every command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.app.cli_reference import all_commands

COMMANDS = dict(all_commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_does_and_shows_how(name: str) -> None:
    """A sentence first, and examples that are calls of this very command (or come before a pipe to it)."""
    command: Any = COMMANDS[name]
    assert command.help.split("\n\n")[0].endswith(".")
    examples = [line for line in command.epilog.splitlines()[1:] if name in line]
    assert examples


@pytest.mark.parametrize("name", COMMANDS)
def test_what_takes_a_value_says_which(name: str) -> None:
    """`--pool FILE`, not `--pool <path>`; and every option is explained in a sentence."""
    for parameter in COMMANDS[name].params:
        if not getattr(parameter, "is_flag", False):
            assert parameter.metavar, parameter.opts
        assert parameter.help.endswith("."), parameter.opts


@pytest.mark.slow
def test_the_shell_completes_commands() -> None:
    """What docs/guide/training.md says of completion: bash asks the command itself, which answers with its commands."""
    typed = {"_ISTHMUS_COMPLETE": "complete_bash", "COMP_WORDS": "isthmus sub", "COMP_CWORD": "1"}
    done = subprocess.run(
        [Path(sys.executable).with_name("isthmus")], env=os.environ | typed, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["submit"]
