"""`render_package`: the reference of a Python package as Markdown, made from the source of its public names."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
MAX_LINE = 100
"""Longest signature on one line, in characters."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def render_package(package: str) -> str:
    """Return the page of `package`, such as `isthmus.plan`: every name of its `__all__` with its documentation.

    A name has its signature, its docstring, and for a class its fields, properties and public methods. Raises
    `ValueError` for a public name without a documented definition.
    """
    tree = _parse(SOURCE / Path(*package.split(".")) / "__init__.py")
    modules = {
        alias.asname or alias.name: str(node.module)
        for node in ast.walk(tree)  # a lazy package imports its names for type checkers only
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    parts = [
        f"# Python: `{package}`",
        str(ast.get_docstring(tree)),
        f"Import these names from `{package}`. Times are in seconds and sizes in bytes unless a name says otherwise.",
    ]
    for name in _public_names(tree):
        parts += _render_name(name, modules[name])
    return "\n\n".join(parts) + "\n"


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _code(node: ast.AST) -> str:
    """Return the source of `node`, with double quotes."""
    text = ast.unparse(node)
    return text if '"' in text else text.replace("'", '"')


def _public_names(tree: ast.Module) -> Sequence[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and _code(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError("the package has no __all__")


def _render_name(name: str, module: str) -> Iterator[str]:
    file = SOURCE / Path(*module.split(".")).with_suffix(".py")
    body = _parse(file).body
    yield f"## {name}"
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield f"Class, `{file.relative_to(ROOT)}`."
            yield from _render_class(node, file.read_text(encoding="utf-8").splitlines())
            return
        if isinstance(node, _Function) and node.name == name:
            yield f"Function, `{file.relative_to(ROOT)}`."
            yield f"```python\n{_signature(node)}\n```"
            yield _documentation(node)
            return
        if _assigns(node, name):
            yield f"Constant, `{file.relative_to(ROOT)}`."
            yield f"```python\n{_constant(node)}\n```"
            yield _text_after(following)
            return
    raise ValueError(f"{module} does not define {name}")


def _assigns(node: ast.stmt, name: str) -> bool:
    """Return whether `node` is `name = ...` or `name: Type = ...`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(_code(one) == name for one in targets)


def _constant(node: ast.stmt) -> str:
    """Return the assignment, or only name and type where the typed value is longer than a line."""
    if isinstance(node, ast.AnnAssign) and len(_code(node)) > MAX_LINE:
        return f"{_code(node.target)}: {_code(node.annotation)}"
    return _code(node)


def _render_class(node: ast.ClassDef, lines: Sequence[str]) -> Iterator[str]:
    yield _documentation(node)
    fields = [_item(_field(one), meaning) for one, meaning in _fields(node, lines)]
    functions = [one for one in node.body if isinstance(one, _Function) and not one.name.startswith("_")]
    properties = [_item(_property(one), _documentation(one)) for one in functions if _is_property(one)]
    methods = [_item(_signature(one, bound=True), _documentation(one)) for one in functions if not _is_property(one)]
    for title, items in (("Fields", fields), ("Properties", properties), ("Methods", methods)):
        if items:
            yield f"{title}:"
            yield "\n".join(items)


def _fields(node: ast.ClassDef, lines: Sequence[str]) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Yield the public fields, each with the comment above it or the text after it ("" without either)."""
    for one, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and not _code(one.target).startswith("_"):
            yield one, _text_after(following) or _comment_above(lines, one.lineno)


def _field(node: ast.AnnAssign) -> str:
    stated = f"{_code(node.target)}: {_code(node.annotation)}"
    if node.value is None:
        return stated
    default = _code(node.value)
    if isinstance(node.value, ast.Call) and _code(node.value.func) in ("field", "Field"):
        factories = [key.value for key in node.value.keywords if key.arg == "default_factory"]
        values = [key.value for key in node.value.keywords if key.arg == "default"]
        values = [f"{_code(one)}()" for one in factories] or [_code(one) for one in [*values, *node.value.args]]
        return f"{stated} = {values[0]}" if values else stated
    return f"{stated} = {default}"


def _text_after(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def _comment_above(lines: Sequence[str], line_number: int) -> str:
    """Return the comment directly above line `line_number`, counted from 1."""
    found: list[str] = []
    for line in reversed(lines[: line_number - 1]):
        if not line.strip().startswith("# "):
            break
        found.insert(0, line.strip().removeprefix("# "))
    return " ".join(found)


def _is_property(node: _Function) -> bool:
    return any(_code(one) in ("property", "cached_property") for one in node.decorator_list)


def _property(node: _Function) -> str:
    return f"{node.name}: {_code(node.returns)}" if node.returns else node.name


def _signature(node: _Function, *, bound: bool = False) -> str:
    """Return `name(parameters) -> result`; a method (`bound`) omits its first parameter."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    shown = [_parameter(one, default) for one, default in zip(positional, defaults, strict=True)]
    shown = shown[1:] if bound and not any(_code(one) == "staticmethod" for one in node.decorator_list) else shown
    if arguments.vararg:
        shown.append(f"*{_parameter(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [_parameter(one, value) for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        shown.append(f"**{_parameter(arguments.kwarg, None)}")
    result = f" -> {_code(node.returns)}" if node.returns else ""
    line = f"{node.name}({', '.join(shown)}){result}"
    if bound or len(line) <= MAX_LINE:
        return line
    return "\n".join([f"{node.name}(", *(f"    {one}," for one in shown), f"){result}"])


def _parameter(node: ast.arg, default: ast.expr | None) -> str:
    stated = f"{node.arg}: {_code(node.annotation)}" if node.annotation else node.arg
    if default is None:
        return stated
    return f"{stated}{' = ' if node.annotation else '='}{_code(default)}"


def _documentation(node: ast.ClassDef | _Function) -> str:
    text = ast.get_docstring(node)
    if not text:
        raise ValueError(f"{node.name} has no docstring")
    return text


def _item(code: str, meaning: str) -> str:
    """Return a list item; further paragraphs of `meaning` are indented below it."""
    first, *rest = meaning.split("\n\n") if meaning else [""]
    head = f"- `{code}`" + (f": {' '.join(first.split())}" if first else "")
    return "\n\n".join([head, *(f"    {' '.join(one.split())}" for one in rest)])
