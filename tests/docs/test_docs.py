"""Rules of the documentation: what is generated is current, what is named exists, examples run."""

import doctest
import re
from pathlib import Path

import pytest

from scripts.docs import pages

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_generated_pages_are_current(page):
    """`make docs` was run after the code changed."""
    assert page.read_text(encoding="utf-8") == pages()[page], "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_a_page_names_exists(page):
    """Paths of the repository in backticks or links lead somewhere."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|benchmarks|scripts)/[\w./-]+\.\w+)(?:::?\w+)?`", text)
    linked = re.findall(r"\]\(((?!https?:|#)[^)#]+)", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [name for name in linked if not (page.parent / name).resolve().exists()]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_run(page):
    """What a page shows after `>>>` is what Python prints."""
    result = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
