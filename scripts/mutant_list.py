"""The mutants of a source file: functions with one expression changed, under mutmut's names."""

from __future__ import annotations
import __future__

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

import libcst as cst
from mutmut.mutation.file_mutation import Mutation, create_mutations, deep_replace, group_by_top_level_node
from mutmut.mutation.trampoline_templates import mangle_function_name
from mutmut.utils.format_utils import get_mutant_name

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A function or method with one expression changed."""

    name: str  # as mutmut names it, such as `isthmus.site.evictions.x_evict__mutmut_3`
    path: Path
    class_name: str | None
    function: cst.FunctionDef
    mutation: Mutation

    @property
    def function_name(self) -> str:
        """Return the name of the function or method."""
        return self.function.name.value

    @property
    def qualified_name(self) -> str:
        """Return the name of the function inside its module."""
        return f"{self.class_name}.{self.function_name}" if self.class_name else self.function_name

    @property
    def difference(self) -> str:
        """Return the lines that the mutant removes and adds."""
        changes = difflib.unified_diff(_lines(_parse(self.function)), _lines(self._changed()), n=0, lineterm="")
        return "\n".join(line for line in changes if not line.startswith(("---", "+++", "@@")))

    def apply(self, module: ModuleType) -> None:
        """Replace the code of the function in `module`, for all who hold the function.

        Raises ValueError where the changed function closes over other variables than the original.
        """
        holder = vars(module)[self.class_name] if self.class_name else module
        target = _function(vars(holder)[self.function_name])
        changed = self._define(module)
        target.__code__ = changed.__code__
        target.__defaults__, target.__kwdefaults__ = changed.__defaults__, changed.__kwdefaults__

    def _changed(self) -> Function:
        return _parse(deep_replace(self.function, self.mutation.original_node, self.mutation.mutated_node))

    def _define(self, module: ModuleType) -> FunctionType:
        node = self._changed()
        node.decorator_list = []
        body: ast.stmt = node
        if self.class_name:  # in a class of the same name, for private names and `super()`
            body = ast.ClassDef(name=self.class_name, bases=[], keywords=[], body=[node], decorator_list=[])
        tree = ast.fix_missing_locations(ast.Module(body=[body], type_ignores=[]))
        flags = __future__.annotations.compiler_flag
        names: dict[str, object] = {}
        exec(compile(tree, str(self.path), "exec", flags=flags, dont_inherit=True), vars(module), names)  # noqa: S102
        holder = vars(names[self.class_name]) if self.class_name else names
        return _function(holder[self.function_name])


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of the module `path` below the folder `root`."""
    return ".".join(path.relative_to(root).with_suffix("").parts)


def list_mutants(path: Path, root: Path) -> list[Mutant]:
    """Return the mutants of the file `path` below the folder `root`, in mutmut's order and under its names."""
    module, mutations, *_ = create_mutations(str(path), path.read_text())
    by_function = group_by_top_level_node(mutations)
    mutants = []
    for class_name, function in _functions(module.body, None):
        mangled_name = mangle_function_name(name=function.name.value, class_name=class_name)
        for number, mutation in enumerate(by_function.get(function, ()), start=1):
            name = get_mutant_name(path.relative_to(root), f"{mangled_name}__mutmut_{number}")
            mutants.append(Mutant(name=name, path=path, class_name=class_name, function=function, mutation=mutation))
    return mutants


def _functions(body: Sequence[cst.CSTNode], class_name: str | None) -> Iterator[tuple[str | None, cst.FunctionDef]]:
    for node in body:
        if isinstance(node, cst.FunctionDef):
            yield class_name, node
        elif isinstance(node, cst.ClassDef) and class_name is None:
            yield from _functions(node.body.body, node.name.value)


def _parse(node: cst.CSTNode) -> Function:
    (parsed,) = ast.parse(cst.Module(body=[cst.ensure_type(node, cst.FunctionDef)]).code).body
    if not isinstance(parsed, Function):
        raise TypeError(f"{ast.unparse(parsed)} is no function")
    return parsed


def _function(held: object) -> FunctionType:
    function = held.__func__ if isinstance(held, staticmethod | classmethod) else held
    if not isinstance(function, FunctionType):
        raise TypeError(f"{held!r} is no function: a decorator that mutmut mutates and this script does not know")
    return function


def _lines(function: Function) -> list[str]:
    body = ast.unparse(ast.Module(body=function.body, type_ignores=[]))
    return [ast.unparse(function.args), *body.splitlines()]
