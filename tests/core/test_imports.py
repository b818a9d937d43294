"""What the import contracts of pyproject.toml cannot say."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SOURCE = Path(__file__).parents[2] / "src"


def modules() -> dict[str, Path]:
    """Return every file of the package by its module's name."""
    parts = {file: file.relative_to(SOURCE).with_suffix("").parts for file in SOURCE.rglob("*.py")}
    return {".".join(names).removesuffix(".__init__"): file for file, names in parts.items()}


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            inner = (f"{node.module}.{name.name}" for name in node.names)
            yield from (name if name in known else node.module for name in inner)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)


def test_no_file_imports_in_a_circle() -> None:
    """Neither late imports nor those for types alone are left out."""
    known = modules()
    graph = {name: set(imported(file, known)) - {name} for name, file in known.items()}
    graphlib.TopologicalSorter(graph).prepare()
