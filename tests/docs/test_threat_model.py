"""Rules of the threat model: each row names tests, each exists, and `pytest -m attack` runs it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "threat-model.md"
MARKER = "pytest.mark.attack"


def rows() -> list[str]:
    """Return the rows of the tables of boundaries."""
    text = PAGE.read_text(encoding="utf-8").partition("## Boundaries")[2]
    heads = ("| attack |", "|---")
    return [line for line in text.splitlines() if line.startswith("|") and not line.startswith(heads)]


def named_tests() -> dict[str, set[str]]:
    """Return the tests that rows name, by file."""
    found: dict[str, set[str]] = {}
    for file, name in re.findall(r"`([\w/]+\.py)::([\w:]+)`", "\n".join(rows())):
        found.setdefault(file if "/" in file else f"tests/attack/{file}", set()).add(name)
    return found


def attacks_in(tree: ast.Module) -> set[str]:
    """Return the tests of a module that carry the marker: of their own, of their class, or of the whole file."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    whole = any(ast.unparse(node.targets[0]) == "pytestmark" and MARKER in ast.unparse(node.value) for node in assigned)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bodies = [("", tree.body, whole), *((f"{one.name}::", one.body, whole or _marked(one)) for one in classes)]
    return {
        prefix + node.name
        for prefix, body, marked in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and (marked or _marked(node))
    }


def _marked(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(MARKER in ast.unparse(one) for one in node.decorator_list)


def test_each_row_names_a_test() -> None:
    """A protection without an attack on it is a claim."""
    assert rows()
    assert [row for row in rows() if "::" not in row] == []


@pytest.mark.parametrize("file", sorted(named_tests()))
def test_named_tests_exist_and_are_attacks(file: str) -> None:
    """Each is found in its file, with the marker."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert named_tests()[file] - attacks_in(tree) == set()
