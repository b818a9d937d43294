"""The command line prints through `CliEnvironment` only, logs through one formatter, and pages escape in one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.integration

SOURCE = Path(__file__).parent.parent / "src" / "isthmus"

SEAM = frozenset({"cli/environment/cli_environment.py", "cli/environment/safe_console.py"})
"""The modules of the command line that write to the terminal; they show hidden characters and interpret no markup."""

ALLOWED = {
    "cli/app/root_command.py echo": "the version, and the help of this program",
    "cli/app/entry.py flush": "the end of a command writes no text",
}

LOGGING = frozenset(
    {
        "cli/commands/process_setup.py",
        "cli/environment/json_log.py",
        "core/text/plain_line_formatter.py",
        "wan/crossing/run_crossing_part.py",
    }
)
"""The formatters of logs, and the entries of processes, which choose one."""

WRITERS = frozenset({"print", "echo", "secho", "write", "writelines", "input", "Console", "from_markup", "from_ansi"})
STREAMS = frozenset({"stdout", "stderr", "sys", "typer", "click", "rich", "Text", "builtins"})


def calls(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name of each called function and the name before its dot, "" without one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, ""
            elif isinstance(node.func, ast.Attribute):
                owner = node.func.value
                name = (
                    owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
                )
                yield node.func.attr, name


def direct_prints(tree: ast.AST) -> set[str]:
    """Return the calls that write to a terminal past the seam."""
    found = set()
    for name, owner in calls(tree):
        if name in ("print", "input", "Console") and owner in ("", "builtins", "rich"):
            found.add(name)
        if name in WRITERS and owner in STREAMS:
            found.add(name)
    return found


def modules(folder: str = "") -> list[Path]:
    """Return every module below a folder of the source."""
    return sorted((SOURCE / folder).rglob("*.py"))


class Printing(NamedTuple):
    """What one module does of what these rules are about: the tree of each is made once for all of them."""

    prints: set[str]
    called: set[str]
    imported: set[str | None]


@cache
def printing_of(file: Path) -> Printing:
    """Return what a module prints, calls and imports."""
    tree = ast.parse(file.read_text())
    imported = {
        *(one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)),
        *(name.name for one in ast.walk(tree) if isinstance(one, ast.Import) for name in one.names),
    }
    return Printing(direct_prints(tree), {name for name, _ in calls(tree)}, imported)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("print(x)", {"print"}),
        ("typer.echo(x)", {"echo"}),
        ("env.stdout.write(x)", {"write"}),
        ("sys.stderr.write(x)", {"write"}),
        ("Console().rule(x)", {"Console"}),
        ("Text.from_markup(x)", {"from_markup"}),
        ("env.print(x)", set()),
        ("file.write(x)", set()),
    ],
)
def test_a_call_past_the_seam_is_found(text: str, found: set[str]) -> None:
    """The test below can fail."""
    assert direct_prints(ast.parse(text)) == found


def test_the_command_line_prints_through_its_environment() -> None:
    """`env.print`, `print_note`, `print_json`, `write_text`, `read_answer` or its console: they show what is hidden."""
    for file in modules("cli"):
        place = file.relative_to(SOURCE).as_posix()
        if place in SEAM:
            continue
        past = {name for name in printing_of(file).prints if f"{place} {name}" not in ALLOWED}
        assert not past, f"{place} calls {', '.join(sorted(past))}: print through CliEnvironment"


def test_packages_below_the_command_line_print_nothing() -> None:
    """But for workers, whose output is their log, and helpers that answer with JSON on their standard output."""
    own_process = (
        *(
            "train/",
            "rl/audit/",
            "rl/process/",
            "rl/rollout/",
            "data/chat_renderer.py",
            "wan/",
            "comm/process/",
            "control/service/planner_process.py",
        ),
        *("core/process/confined_start.py", "core/process/node_container.py", "agent/courier/run_part.py"),
    )
    for file in modules():
        place = file.relative_to(SOURCE).as_posix()
        if not place.startswith(("cli/", *own_process)):
            assert not printing_of(file).prints, place


def test_logs_have_one_place_that_formats_them() -> None:
    """A second handler or formatter would write words from others raw."""
    for file in modules():
        place = file.relative_to(SOURCE).as_posix()
        made = printing_of(file).called & {"StreamHandler", "FileHandler", "basicConfig", "Formatter", "dictConfig"}
        assert not made or place in LOGGING, (place, made)


def test_pages_escape_with_one_function() -> None:
    """`page_text` of `core/text/html_page.py`: it escapes markup and shows hidden characters."""
    for file in modules():
        place = file.relative_to(SOURCE).as_posix()
        assert not printing_of(file).imported & {"html", "xml.sax.saxutils"} or place == "core/text/html_page.py", place
