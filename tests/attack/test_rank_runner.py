"""What a worker writes beside itself makes its runner, which has the agent's account, run nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.core.process import rank_runner
from isthmus.core.process.rank_runner import AFTER_FILE

pytestmark = [pytest.mark.attack, pytest.mark.slow]


def run(folder: Path, script: str) -> int:
    """Run a program as a step of a scheduler does; return the status that its runner records."""
    hold = folder.parent / "hold"
    hold.mkdir()
    (hold / "lease").write_text("1 600\n")
    command = (sys.executable, "-I", "-S", rank_runner.__file__, str(folder), str(hold), "", "start")
    subprocess.run([*command, "sh", "-c", script, "worker", str(folder)], check=False, timeout=60)
    return int((folder / "exit").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "rank"
    made.mkdir()
    return made


def after(folder: Path) -> str:
    """Return an `after.json` whose command leaves a mark."""
    return json.dumps(["touch", str(folder / "ran")])


def test_a_command_that_the_agent_left_runs_after_the_program(folder: Path) -> None:
    """Once every process of it has ended, and before the status is there."""
    (folder / AFTER_FILE).write_text(after(folder))
    assert run(folder, 'test ! -e "$1/ran" && exit 3') == 3
    assert (folder / "ran").exists()


def test_a_command_that_the_program_leaves_does_not_run(folder: Path) -> None:
    """The file is read before the program begins."""
    assert run(folder, f"echo '{after(folder)}' > \"$1/{AFTER_FILE}\"; exit 4") == 4
    assert (folder / AFTER_FILE).exists()
    assert not (folder / "ran").exists()
