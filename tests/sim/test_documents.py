"""The examples of the simulator's documents give what the documents say."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["attention-blocks", "sequence-groups", "synchronisation"])
def test_algorithm_pages_execute(page):
    """Every example on an algorithm's page prints what is printed there."""
    result = doctest.testfile(str(DOCS / "algorithms" / f"{page}.md"), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
