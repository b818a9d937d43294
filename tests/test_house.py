"""The figures of `scripts/house.py` hold, and each counts what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.house import (
    LIMITS,
    Figure,
    Module,
    deepest_chain,
    floats_by_unit,
    folder_of,
    functions_on_the_clock,
    import_graph,
    imports_past_the_face,
    largest_folder,
    measure,
    monkeypatch_uses,
    package_of,
    private_names,
    shared_file_names,
    shared_public_names,
    tensor_functions,
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    """All figures of this checkout."""
    return {figure.key: figure for figure in measure()}


@pytest.mark.parametrize("key", LIMITS)
def test_a_figure_is_within_its_limit(figures: dict[str, Figure], key: str) -> None:
    """`python -m scripts.house --places` lists what a figure counts. A limit is only ever tightened."""
    figure = figures[key]
    assert figure.holds, f"{figure.name}: {figure.value} is beyond {figure.limit.today}:\n" + "\n".join(figure.places)


def module(path: str, text: str = "") -> Module:
    """Return the module at `path` of a source tree, with the source `text`."""
    words = Path(path).with_suffix("").parts
    name = ".".join(words[:-1] if words[-1] == "__init__" else words)
    return Module(Path(path), name, ast.parse(text))


def test_imports_are_followed_to_the_module_that_they_name() -> None:
    """Lazy imports count, imports for type checking do not; a name of a module is no module."""
    one = module(
        "isthmus/a/one.py",
        "from isthmus.a import two\nfrom isthmus.a.three import name\nif TYPE_CHECKING:\n    import isthmus.a.four\n"
        "def f():\n    import isthmus.b.five\n",
    )
    rest = [module(f"isthmus/{name}.py") for name in ("a/two", "a/three", "a/four", "b/five")]
    assert import_graph([one, *rest])["isthmus.a.one"] == {"isthmus.a.two", "isthmus.a.three", "isthmus.b.five"}


def test_a_chain_stays_in_its_package_or_folder() -> None:
    """Modules are counted; a chain ends where it leaves the package or the folder, and at a public face."""
    modules = [
        module("isthmus/a/one.py", "import isthmus.a.in_a.two"),
        module("isthmus/a/in_a/two.py", "import isthmus.a.in_a.three"),
        module("isthmus/a/in_a/three.py", "import isthmus.b.four\nimport isthmus.a.in_a"),
        module("isthmus/a/in_a/__init__.py", "import isthmus.b.four"),
        module("isthmus/b/four.py"),
    ]
    names = ["isthmus.a.one", "isthmus.a.in_a.two", "isthmus.a.in_a.three"]
    assert deepest_chain(modules, within=package_of) == names
    assert deepest_chain(modules, within=folder_of) == names[1:]


def test_names_and_files_of_two_packages_are_found() -> None:
    """Private names, methods and `main` may be alike, and so may names of one package."""
    modules = [
        module("isthmus/a/__init__.py"),
        module("isthmus/a/same.py", "def f(): ...\ndef _g(): ...\ndef main(): ...\nclass A:\n    def h(): ..."),
        module("isthmus/a/other.py", "def k(): ..."),
        module("isthmus/b/__init__.py"),
        module("isthmus/b/same.py", "async def f(): ...\ndef _g(): ...\ndef main(): ...\nclass B:\n    def h(): ..."),
        module("isthmus/a/in_a/other.py", "def k(): ..."),
    ]
    assert shared_public_names(modules) == ["f: a, b"]
    assert shared_file_names(modules) == ["same: a, b"]
    assert largest_folder(modules) == (2, "isthmus/a")


def test_an_import_past_a_face_is_one_of_an_inner_module_of_another_package() -> None:
    """A package without `__all__` has no face, its own modules know its inside, and a listed name is of the face."""
    modules = [
        module("isthmus/a/__init__.py", "__all__ = ['same']"),
        module("isthmus/a/inner.py", "import isthmus.a.other"),
        module("isthmus/a/other.py"),
        module("isthmus/a/same.py", "def same(): ..."),
        module("isthmus/b/__init__.py"),
        module("isthmus/b/one.py", "import isthmus.a\nfrom isthmus.a.inner import x"),
        module("isthmus/b/three.py", "from isthmus.a import other, same\nimport isthmus.a.same"),
        module("isthmus/c/two.py", "import isthmus.b.one"),
    ]
    assert imports_past_the_face(modules) == [
        "isthmus.b.one imports isthmus.a.inner",
        "isthmus.b.three imports isthmus.a.other",
        "isthmus.b.three imports isthmus.a.same",
    ]


@pytest.mark.parametrize(
    "name", ["delay_s", "num_bytes", "_rate_bytes_per_s", "idle_share", "num_calls", "loss", "theta", "bytes_per_s"]
)
def test_a_float_with_a_unit_is_accepted(name: str) -> None:
    """The last word is a unit, `per` follows one, `num` begins the name, or the field knows the whole name."""
    assert floats_by_unit([module("isthmus/a/x.py", f"def f({name}: float): ...")]) == (1, [])


@pytest.mark.parametrize("annotation", ["float", "float | None", "PositiveFloat", "Annotated[float, Field(gt=0)]"])
def test_a_float_without_a_unit_is_found(annotation: str) -> None:
    """Fields of a class and parameters count; other types do not."""
    text = f"class A:\n    delay: {annotation}\n    of: int\ndef f(*, budget: {annotation}, n: str): ..."
    found = floats_by_unit([module("isthmus/a/x.py", text)])
    assert found == (2, ["isthmus/a/x.py:2 delay", "isthmus/a/x.py:4 budget"])


def test_a_tensor_needs_a_shape() -> None:
    """Public functions and methods that take or return tensors; the shape may be any."""
    text = '''
def good(x: torch.Tensor):
    """Return the rows [n, H] of `x`."""
def also(x: list[Tensor]):
    """Copy `x`, of any shape."""
def bad() -> Tensor:
    """Return the loss."""
def _private(x: Tensor): ...
class A:
    def worse(self, x: Tensor): ...
'''
    found = tensor_functions([module("isthmus/a/x.py", text)])
    assert found == (4, ["isthmus/a/x.py:6 bad", "isthmus/a/x.py:10 A.worse"])


def test_what_tests_should_not_do_is_found() -> None:
    """Reading a clock, patching, and the private names of other modules; `os._exit` has no public twin."""
    text = """
from isthmus.a import _secret
import time
def test_one(monkeypatch):
    monkeypatch.setattr(a, "b", 1)
    time.monotonic()
@pytest.mark.on_the_clock
def test_two(peer):
    peer._queue.clear()
    os._exit(0)
def test_three(time):
    time.sleep(0)
class Fake:
    def own(self, other):
        return self._mine + other._mine
"""
    modules = [module("tests/x.py", text)]
    assert functions_on_the_clock(modules) == ["tests/x.py:4 test_one", "tests/x.py:8 test_two"]
    assert monkeypatch_uses(modules) == ["tests/x.py:5 setattr"]
    assert private_names(modules) == ["tests/x.py:2 _secret", "tests/x.py:9 _queue"]
