"""Rules of the documentation: what is generated is current, what is named exists, examples run."""

import ast
import doctest
import re
from pathlib import Path

import pytest

import isthmus.plan
import isthmus.sim
from scripts.docs import pages
from scripts.python_api import render_package

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("src", "tests", "docs", "benchmarks", "scripts")
NO_MODULES = {
    "agent.json", "agent.key", "data.format", "isthmus.adapters", "isthmus.core.stacks", "plan.stages", "render.json",
    "site.yaml",
}  # fmt: skip
"""Files, fields, a folder of data and an entry point whose names look like modules."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_generated_pages_are_current(page):
    """`make docs` was run after the code changed."""
    assert page.read_text(encoding="utf-8") == pages()[page](), "run `make docs`"


@pytest.mark.parametrize("package", [isthmus.plan, isthmus.sim], ids=lambda package: package.__name__)
def test_the_python_reference_has_every_public_name(package):
    """One section per name of `__all__`, in its order; a class lists its public fields and methods."""
    text = render_package(package.__name__)
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == package.__all__
    for name in package.__all__:
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        members = vars(getattr(package, name)) if isinstance(getattr(package, name), type) else {}
        documented = [one for one in members if not one.startswith("_") and one != "model_config"]
        assert not [one for one in documented if f"`{one}" not in section]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_a_page_names_exists(page):
    """Paths of the repository in backticks or links lead somewhere, and so do modules to be run."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)(?:::?\w+)?`", text)
    named += [f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m ((?:benchmarks|scripts)\.\w+)", text)]
    linked = re.findall(r"\]\(((?!https?:|#)[^)#]+)", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [name for name in linked if not (page.parent / name).resolve().exists()]
    assert not missing


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "design").glob("*.md")), ids=lambda page: page.name)
def test_every_file_a_design_note_lists_exists(page):
    """Design notes name files of the package they are about by the end of their path: `allocations.py`."""
    files = {file for folder in FOLDERS for file in map(str, (ROOT / folder).rglob("*.py"))}
    named = re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


def _stale_names(source: str, modules: dict[str, str], files: set[str]) -> list[str]:
    """What docstrings of `source` name and nothing has: `wan.dial`, `isthmus.wan.dial`, `wan.dial.name`, `dial.py`.

    `modules` has the source of each module by its name below `isthmus`.
    """
    stale = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            for full in re.findall(r"`(?:python -m )?((?:isthmus\.)?[a-z_]+(?:\.[a-z_]+)+)[^`]*`", text):
                name = full.removeprefix("isthmus.")
                owner, _, member = name.rpartition(".")
                is_module = name.partition(".")[0] in modules or full != name
                known = name in modules or re.search(rf"\b{member}\b", modules.get(owner, "")) or full in NO_MODULES
                stale += [full] * (is_module and not known)
            named = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
            stale += [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)]
    return stale


def test_every_module_that_a_docstring_names_exists():
    """Modules by their path from the package on, members of theirs, and files by the end of their path."""
    sources = {str(path.relative_to(ROOT / "src")): path.read_text() for path in (ROOT / "src").rglob("*.py")}
    modules = {
        path.removeprefix("isthmus/").removesuffix(".py").removesuffix("/__init__").replace("/", "."): text
        for path, text in sources.items()
    }
    files = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    stale = {path: found for path, text in sources.items() if (found := _stale_names(text, modules, files))}
    assert not stale
    wrong = ["wan.nowhere", "isthmus.nowhere", "wan.dial.nowhere", "nowhere.py"]
    assert _stale_names(f'"""{" ".join(f"`{name}`" for name in wrong)}"""', modules, files) == wrong


def test_every_design_note_and_guide_is_in_the_table_of_contents():
    """Of the site, and of the README."""
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    site, readme = (ROOT / "mkdocs.yml").read_text(), (ROOT / "README.md").read_text()
    assert not [page for page in pages if str(page) not in site or f"docs/{page}" not in readme]


TRAFFIC = re.compile(r"^\*\*Task [45]\.\*\* .*?(?=^\*\*Task 6)", re.MULTILINE | re.DOTALL)
"""Tasks of the scenario that load its emulated links: half a minute of CPU, and judged by the clock."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_run(page, whole):
    """What a page shows after `>>>` is what Python prints; of the scenario without `--whole` all but its traffic."""
    text = page.read_text(encoding="utf-8")
    shown = text if whole else TRAFFIC.sub("", text)
    assert (shown == text) == (whole or page.name != "scenario.md")
    examples = doctest.DocTestParser().get_doctest(shown, {"__name__": "__main__"}, page.name, str(page), 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples)
    assert result.failed == 0
