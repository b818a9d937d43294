"""`python -m scripts.house`: print the figures that keep the code base in order; a test pins each limit."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "isthmus"
PARAMETER_KINDS = ("posonlyargs", "args", "kwonlyargs")

UNITS = frozenset({
    "s", "ms", "us", "seconds", "days", "bits", "bytes", "gbps", "flop", "flops", "j", "w", "tokens", "parameters",
    "share", "ratio", "fraction", "factor", "efficiency", "probability", "utilisation", "scale", "weight", "loss",
    "norm", "std", "imbalance", "error", "cost", "epsilon",
})  # fmt: skip
"""Last words of a float's name that state its unit: units and counted things in line 1; then numbers without a
dimension, and `cost` in the pool's currency. `..._per_...` and `num_...` state one too."""

DIMENSIONLESS = frozenset(
    {
        "beta_fast",
        "beta_slow",
        "clip_dual",
        "kl",
        "learning_rate",
        "min_learning_rate",
        "mscale",
        "mscale_all_dim",
        "penalty",
        "reward",
        "sigma",
        "temperature",
        "theta",
        "weight_decay",
    }
)
"""Whole names of floats without a dimension: the field knows them by these names, without a suffix."""

FLOAT = re.compile(r"(Annotated\[)?(\b\w+\.)?(float|PositiveFloat|NonNegativeFloat)\b(,.*\])?( \| None)?", re.DOTALL)
"""An annotation of one number. Of `Fraction` and `LossRate` the type states the unit."""

SHAPE = re.compile(
    r"`?\[[^\[\]]*\]`?|\bshapes?\b|\bscalars?\b|\bflat\b|\b[0-9]-d\b|\bone[- ](element|dimensional)\b", re.IGNORECASE
)
"""What a docstring says of a tensor's shape: `[out, in]`, "of any shape", "flat", "scalar"."""

CLOCKS = frozenset({"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"})

PUBLIC_UNDERSCORES = frozenset({"_exit", "_replace", "_asdict", "_fields"})
"""Names of the standard library that are public in spite of their underscore."""

ENTRY_POINTS = frozenset({"main"})
"""Public functions that several packages may define: what `python -m` and the console script call."""


@dataclass(frozen=True)
class Module:
    """A Python file with its dotted name and its syntax tree."""

    path: Path
    name: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """Return the top-level package, empty for a module outside all of them."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or (len(parts) == 2 and self.path.name == "__init__.py") else ""

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return all functions and methods, nested ones as well."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@dataclass(frozen=True)
class Limit:
    """The bound that `tests/test_house.py` checks, and the one to reach; a bound never gets looser."""

    today: float
    aim: float
    at_least: bool = False


LIMITS: Mapping[str, Limit] = {
    "folder": Limit(16, 16),
    "folder_chain": Limit(9, 9),
    "package_chain": Limit(20, 9),
    "names": Limit(0, 0),
    "files": Limit(0, 0),
    "past": Limit(0, 0),
    "units": Limit(95.0, 95.0, at_least=True),
    "shapes": Limit(95.0, 95.0, at_least=True),
    "clocks": Limit(5, 5),
    "patches": Limit(20, 20),
    "private": Limit(9, 9),
    "lines": Limit(175_000, 49_563),
}
"""Bound of each figure of `measure`."""


@dataclass(frozen=True)
class Figure:
    """A figure, its limit in `LIMITS`, and the places that it counts."""

    key: str
    name: str
    value: float
    places: tuple[str, ...]

    @property
    def limit(self) -> Limit:
        """Return the figure's limit."""
        return LIMITS[self.key]

    @property
    def holds(self) -> bool:
        """Return whether the value is within today's limit."""
        limit = self.limit
        return self.value >= limit.today if limit.at_least else self.value <= limit.today


def read_modules(folder: Path, root: str) -> list[Module]:
    """Return every Python file under `folder`, which is the package `root`."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        words = [root, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        found.append(Module(path.relative_to(ROOT), name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def largest_folder(modules: Iterable[Module]) -> tuple[int, str]:
    """Return the most modules of one folder, `__init__` not counted, and the folder."""
    folders: dict[Path, int] = defaultdict(int)
    for module in modules:
        folders[module.path.parent] += module.path.name != "__init__.py"
    most = max(folders, key=lambda folder: folders[folder])
    return folders[most], str(most)


def runtime_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield all imports, lazy ones as well, except those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        else:
            yield from runtime_imports(node)


def import_graph(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Return the modules that each module imports; `from a.b import c` is `a.b.c` where that is a module."""
    modules = list(modules)
    names = {module.name for module in modules}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for module in modules:
        for node in runtime_imports(module.tree):
            if isinstance(node, ast.Import):
                candidates = [[one.name] for one in node.names]
            else:
                candidates = [[f"{node.module}.{one.name}", node.module or ""] for one in node.names]
            for options in candidates:
                graph[module.name].update([name for name in options if name in names][:1])
    return graph


def package_of(module: Module) -> str:
    """Return the top-level package of `module`."""
    return module.package


def folder_of(module: Module) -> str:
    """Return the folder of `module`, empty for the folder of all packages."""
    return str(module.path.parent) if module.package else ""


def deepest_chain(modules: Iterable[Module], within: Callable[[Module], str]) -> list[str]:
    """Return the longest chain of modules that import each other, all with the same (not empty) `within`.

    A package's `__init__`, which only names its public face, is no link of a chain. Raises `RecursionError`
    for a cycle.
    """
    modules = list(modules)
    home = {module.name: within(module) for module in modules if module.path.name != "__init__.py"}
    graph = import_graph(modules)
    chains: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in chains:
            below = [chain(one) for one in sorted(graph[name]) if home.get(one) == home[name]]
            chains[name] = [name, *max(below, key=len, default=[])]
        return chains[name]

    return max((chain(name) for name, place in home.items() if place), key=len)


def shared_public_names(modules: Iterable[Module]) -> list[str]:
    """Return each public class or function name that two top-level packages define, with the packages."""
    homes: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and node.name not in ENTRY_POINTS:
                homes[node.name].add(module.package)
    return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(homes.items()) if len(found) > 1]


def shared_file_names(modules: Iterable[Module]) -> list[str]:
    """Return each file base name that two top-level packages use, with the packages."""
    homes: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        if module.package and not module.path.name.startswith("__"):
            homes[module.path.stem].add(module.package)
    return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(homes.items()) if len(found) > 1]


def imports_past_the_face(modules: Iterable[Module]) -> list[str]:
    """Return the imports of another package's inner module where its `__init__` has a public face (`__all__`).

    `from package import name` is an import of the face where `__all__` lists `name`, also if a module has that name.
    """
    modules = list(modules)
    faces = {module.name: face for module in modules if module.name.count(".") == 1 for face in _face(module)}
    found = set()
    for module in modules:
        for node in runtime_imports(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module in faces:
                targets = [f"{node.module}.{one.name}" for one in node.names if one.name not in faces[node.module]]
            elif isinstance(node, ast.ImportFrom):
                targets = [node.module or ""]
            else:
                targets = [one.name for one in node.names]
            for target in targets:
                package = ".".join(target.split(".")[:2])
                if package in faces and target != package and package != ".".join(module.name.split(".")[:2]):
                    found.add(f"{module.name} imports {target}")
    return sorted(found)


def _face(module: Module) -> Iterator[frozenset[str]]:
    """Yield the names of `__all__` of a package's `__init__`, if it has one."""
    for node in module.tree.body:
        if (
            module.path.name == "__init__.py"
            and isinstance(node, ast.Assign)
            and "__all__" in ast.unparse(node.targets)
        ):
            yield frozenset(ast.literal_eval(node.value))


def _annotated(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.ClassDef):
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                yield one.target.id, one.annotation
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for kind in PARAMETER_KINDS:
            for argument in getattr(node.args, kind):
                if argument.annotation is not None:
                    yield argument.arg, argument.annotation


def states_a_unit(name: str) -> bool:
    """Return whether the name of a float ends with a unit or is a known dimensionless name."""
    words = name.strip("_").split("_")
    return words[-1] in UNITS or "per" in words[1:] or words[0] == "num" or name in DIMENSIONLESS


def floats_by_unit(modules: Iterable[Module]) -> tuple[int, list[str]]:
    """Return the number of float fields and parameters, and those whose name states no unit."""
    total, without = 0, []
    for module in modules:
        for node in ast.walk(module.tree):
            for name, annotation in _annotated(node):
                if FLOAT.fullmatch(ast.unparse(annotation)):
                    total += 1
                    if not states_a_unit(name):
                        without.append(f"{module.path}:{annotation.lineno} {name}")
    return total, without


def tensor_functions(modules: Iterable[Module]) -> tuple[int, list[str]]:
    """Return the number of public functions and methods with tensors, and those whose docstring has no shape."""
    total, without = 0, []
    for module in modules:
        for owner, function in _public_functions(module.tree):
            signature = [annotation for _, annotation in _annotated(function)]
            signature += [function.returns] if function.returns else []
            if not any(re.search(r"\bTensors?\b", ast.unparse(one)) for one in signature):
                continue
            total += 1
            if not SHAPE.search(ast.get_docstring(function) or ""):
                without.append(f"{module.path}:{function.lineno} {owner}{function.name}")
    return total, without


def _public_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield "", node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for one in node.body:
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.name.startswith("_"):
                    yield f"{node.name}.", one


def functions_on_the_clock(modules: Iterable[Module]) -> list[str]:
    """Return the test functions that read a clock of the machine or carry the marker `on_the_clock`."""
    return [
        f"{module.path}:{function.lineno} {function.name}"
        for module in modules
        for function in module.functions
        if function.name.startswith("test_")
        and (
            any(map(_reads_clock, ast.walk(function)))
            or any("on_the_clock" in ast.unparse(one) for one in function.decorator_list)
        )
    ]


def _reads_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in CLOCKS:
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "time"


def monkeypatch_uses(modules: Iterable[Module]) -> list[str]:
    """Return where tests call a method of pytest's `monkeypatch`."""
    return [
        f"{module.path}:{node.lineno} {node.attr}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "monkeypatch"
    ]


def private_names(modules: Iterable[Module]) -> list[str]:
    """Return where tests use a private name (`_x`) of another module; own attributes are no such use."""
    found = []
    for module in modules:
        own = {node.attr for node in ast.walk(module.tree) if _is_private(node) and _owner(node) in ("self", "cls")}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                found += [f"{module.path}:{node.lineno} {one.name}" for one in node.names if one.name.startswith("_")]
            elif (
                _is_private(node) and _owner(node) not in ("self", "cls") and node.attr not in own | PUBLIC_UNDERSCORES
            ):
                found.append(f"{module.path}:{node.lineno} {node.attr}")
    return found


def _is_private(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")


def _owner(node: ast.AST) -> str:
    value = node.value if isinstance(node, ast.Attribute) else None
    return value.id if isinstance(value, ast.Name) else ""


def num_lines(modules: Iterable[Module]) -> int:
    """Return the number of lines of all modules."""
    return sum(len((ROOT / module.path).read_text(encoding="utf-8").splitlines()) for module in modules)


def measure(root: Path = ROOT) -> list[Figure]:
    """Return all figures of the checkout at `root`."""
    source, tests = read_modules(root / "src" / PACKAGE, PACKAGE), read_modules(root / "tests", "tests")
    folder_size, folder = largest_folder(source)
    inner, outer = deepest_chain(source, within=folder_of), deepest_chain(source, within=package_of)
    names, files, past = shared_public_names(source), shared_file_names(source), imports_past_the_face(source)
    num_floats, unitless = floats_by_unit(source)
    num_tensor, shapeless = tensor_functions(source)
    clocks, patches, private = functions_on_the_clock(tests), monkeypatch_uses(tests), private_names(tests)

    def share(total: int, bad: list[str]) -> float:
        return round(100 * (1 - len(bad) / total), 1)

    return [
        Figure("folder", "modules in the largest folder", folder_size, (folder,)),
        Figure("folder_chain", "deepest chain of imports inside a folder", len(inner), tuple(inner)),
        Figure("package_chain", "deepest chain of imports inside a package", len(outer), tuple(outer)),
        Figure("names", "public names defined in two packages", len(names), tuple(names)),
        Figure("files", "file names used in two packages", len(files), tuple(files)),
        Figure("past", "imports past a package's public face", len(past), tuple(past)),
        Figure("units", "% of floats with a unit in the name", share(num_floats, unitless), tuple(unitless)),
        Figure("shapes", "% of tensor functions with a shape", share(num_tensor, shapeless), tuple(shapeless)),
        Figure("clocks", "tests that read the clock", len(clocks), tuple(clocks)),
        Figure("patches", "uses of monkeypatch in tests", len(patches), tuple(patches)),
        Figure("private", "uses of private names in tests", len(private), tuple(private)),
        Figure("lines", "lines of src", num_lines(source), ()),
    ]


def main() -> int:
    """Print each figure with its bounds, and with `--places` what it counts; return 1 if one is out of bounds."""
    figures = measure()
    print(f"{'figure':<44}{'value':>8}{'limit':>10}{'to reach':>10}")
    for figure in figures:
        sign = "≥" if figure.limit.at_least else "≤"
        print(f"{figure.name:<44}{figure.value:>8g}{sign:>4}{figure.limit.today:>6g}{figure.limit.aim:>10g}")
        if "--places" in sys.argv or not figure.holds:
            print("".join(f"    {place}\n" for place in figure.places), end="")
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
