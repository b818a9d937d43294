"""The examples of the simulator's documents give what the documents say."""

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["attention-blocks", "sequence-groups", "synchronisation"])
def test_algorithm_pages_execute(page):
    """Every example on an algorithm's page prints what is printed there."""
    result = doctest.testfile(str(DOCS / "algorithms" / f"{page}.md"), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_design_note_executes():
    """The note's example runs, and its figures are right to the printed digit."""
    text = (DOCS / "design" / "simulator.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1).rstrip()
    *lines, last = code.splitlines()
    found = {}
    exec("\n".join(lines), found)
    answer = re.search(r"# ([\d.]+); blocking 1F1B: ([\d.]+)", last)
    expression = last.split("#")[0].strip()
    assert f"{eval(expression, found):.3f}" == answer.group(1)
    assert found["warm_up"] == (4, 3, 1, 0)
    found["replica"] = found["Replica"](stages=found["stages"], schedule=blocking())
    assert f"{eval(expression, found):.3f}" == answer.group(2)


def blocking():
    from isthmus.schedule import make_schedule

    return make_schedule("1f1b", 4, 32)
