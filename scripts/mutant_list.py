"""The mutants of a source file: functions with one expression changed, under mutmut's names."""

from __future__ import annotations
import __future__

import ast
import difflib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, ModuleType

from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name, orig_function_and_class_names_from_key


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A function or method with one expression changed."""

    name: str  # as mutmut names it, such as `isthmus.site.evictions.x_evict__mutmut_3`
    path: Path
    class_name: str | None
    function_name: str
    original: ast.FunctionDef | ast.AsyncFunctionDef
    changed: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def qualified_name(self) -> str:
        """Return the name of the function inside its module."""
        return f"{self.class_name}.{self.function_name}" if self.class_name else self.function_name

    @property
    def difference(self) -> str:
        """Return the lines that the mutant removes and adds."""
        changes = difflib.unified_diff(_lines(self.original), _lines(self.changed), n=0, lineterm="")
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

    def _define(self, module: ModuleType) -> FunctionType:
        node = type(self.changed)(**{**vars(self.changed), "name": self.function_name, "decorator_list": []})
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
    """Return the mutants of the file `path` below `src` of the folder `root`, in mutmut's order."""
    code, mangled_names = _mutate(path, root / "mutants")
    functions = dict(_functions(ast.parse(code).body))
    mutants = []
    for mangled_name in mangled_names:
        name = get_mutant_name(path.relative_to(root / "src"), mangled_name)
        function_name, class_name = orig_function_and_class_names_from_key(name)
        original = functions[mangled_name.partition("__mutmut_")[0] + "__mutmut_orig"]
        changed = functions[mangled_name]
        mutants.append(
            Mutant(
                name=name,
                path=path,
                class_name=class_name,
                function_name=function_name,
                original=original,
                changed=changed,
            )
        )
    return mutants


def _mutate(path: Path, cache_folder: Path) -> tuple[str, list[str]]:
    """Return the source with all mutants and their names; mutmut needs seconds for a file, hence the cache."""
    text = path.read_text()
    cached = cache_folder / f"{hashlib.sha256((version('mutmut') + text).encode()).hexdigest()}.json"
    if not cached.exists():
        mutated = mutate_file_contents(str(path), text)
        cache_folder.mkdir(exist_ok=True)
        cached.write_text(json.dumps([mutated.code, list(mutated.mutant_names)]))
    code, names = json.loads(cached.read_text())
    return code, names


def _functions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body)


def _function(held: object) -> FunctionType:
    function = held.__func__ if isinstance(held, staticmethod | classmethod) else held
    if not isinstance(function, FunctionType):
        raise TypeError(f"{held!r} is no function: a decorator that mutmut mutates and this script does not know")
    return function


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    body = ast.unparse(ast.Module(body=function.body, type_ignores=[]))
    return [ast.unparse(function.args), *body.splitlines()]
