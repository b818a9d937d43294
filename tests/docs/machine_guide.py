"""Guides whose commands are typed at several machines: `machine$ command`, and what it prints."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from isthmus.wan.netns import effective_capabilities, unavailable_reason
from tests.docs.follow_guide import blocks
from tests.machines import Machine, wait_until

WHY = unavailable_reason(effective_capabilities())
needs_root = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(WHY is not None, reason=f"{WHY}; run: sudo .venv/bin/python -m pytest -m root tests/docs"),
]


def commands(page: Path) -> list[tuple[str, str, str]]:
    """Return machine, command and shown output of every command of a page, in order."""
    found = []
    for block in blocks(page):
        if block.language == "console":
            for part in re.split(r"^(?=\w+\$ )", block.text, flags=re.MULTILINE)[1:]:
                head, _, output = part.partition("\n")
                machine, command = head.split("$ ", 1)
                found.append((machine, command, output))
    return found


def type_in(machine: Machine, command: str, shown: str, log: Path, *, goes_on: bool) -> None:
    """Type a command, one that `goes_on` in the background; compare its output with what the page shows."""
    if not goes_on:
        done = machine.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert _fits(shown, done.stdout), f"{command}\n{done.stdout}"
        return
    process = machine.start(command, log)

    def answered() -> bool:
        assert process.poll() is None, f"{command}\n{log.read_text()}"
        return _fits(shown, log.read_text())

    wait_until(answered, f"{command}\n{shown}", 100)


def _fits(shown: str, got: str) -> bool:
    """Whether output begins with what the page shows; `...` stands for any text."""
    lines = "".join(f"{line.rstrip()}\n" for line in got.splitlines())
    return doctest.OutputChecker().check_output(f"{shown}...\n", f"{lines}\n", doctest.ELLIPSIS)
