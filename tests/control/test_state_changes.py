"""Rules of `isthmus.control`: one package changes the pool state, the others read it.

The import contracts say who may import what; these rules read the code for who changes what.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "isthmus"
STATE = SOURCE / "control" / "state"
READERS = ("queries", "placement", "preflight", "algorithms")
CACHES = frozenset({"cached_order", "fits_inventory_version"})
"""Fields that keep an answer until what it follows from changes: no event and no view depends on them."""
OWN_RECORDS = {"dry_run.py: assign_plan"}
"""The dry run gives a plan to a record that it made itself and that the state does not have."""
CHANGING_METHODS = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault"}
    | {"update"}
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _root(node: ast.expr) -> str:
    """Return the variable that `a.b[c].d` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _targets(function: ast.AST) -> Iterator[ast.expr]:
    """What a function assigns, deletes or calls a changing method of: attributes and items of something."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.Delete):
            yield from (target for target in node.targets if isinstance(target, ast.Attribute | ast.Subscript))
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            if isinstance(node.target, ast.Attribute | ast.Subscript):
                yield node.target
        elif isinstance(node, ast.Call):
            match node.func:
                case ast.Attribute(value=ast.Attribute() | ast.Subscript() as changed, attr=method):
                    if method in CHANGING_METHODS:
                        yield changed


def _functions(tree: ast.Module) -> list[Function]:
    return [node for node in tree.body if isinstance(node, Function)]


def _changes_a_parameter(function: Function) -> bool:
    return any(_changed(function))


def _changed(function: Function) -> Iterator[ast.expr]:
    """What a function changes of its parameters, caches apart; items of a parameter itself are a sum it is to fill."""
    names = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    for target in _targets(function):
        fields = {node.attr for node in ast.walk(target) if isinstance(node, ast.Attribute)}
        if _root(target) in names and fields and not fields & CACHES:
            yield target


def _state_changers() -> dict[str, set[str]]:
    """Return the functions of `control.state` that change an argument, alone or by others of their module."""
    found = {}
    for path in STATE.glob("*.py"):
        functions = {function.name: function for function in _functions(ast.parse(path.read_text()))}
        changing = {name for name, function in functions.items() if _changes_a_parameter(function)}
        while more := {
            name
            for name, function in functions.items()
            if name not in changing
            and any(isinstance(node, ast.Name) and node.id in changing for node in ast.walk(function))
        }:
            changing |= more
        found[path.stem] = changing
    return found


def test_functions_that_change_the_state_are_called_by_the_coordinator_alone() -> None:
    """Of `control.state`: allocation, indexes and records. A snapshot rebuilds a state of its own, and no more."""
    changers = _state_changers()
    assert {"allocate", "free_part", "update_held"} <= changers["allocations"]
    assert "index_job" in changers["update_indexes"]
    used = []
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(STATE) or path.is_relative_to(SOURCE / "control" / "coordinator"):
            continue
        imported = set()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("isthmus.control.state"):
                module = node.module.rpartition(".")[2]
                names = {alias.name for alias in node.names}
                used += [f"{path.name}: {name}" for name in names & changers.get(module, set())]
                imported |= names & set(changers)
        used += [
            f"{path.name}: {node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in imported
            and node.attr in changers[node.value.id]
        ]
    assert set(used) == OWN_RECORDS


def test_readers_assign_nothing_of_what_they_are_given() -> None:
    """Queries, placement, preflight and algorithms: an argument's attributes and items stay as they are."""
    found = [
        f"{path.name}:{target.lineno} {function.name}: {ast.unparse(target)}"
        for reader in READERS
        for path in (SOURCE / "control" / reader).rglob("*.py")
        for function in _functions(ast.parse(path.read_text()))
        for target in _changed(function)
    ]
    assert found == []
