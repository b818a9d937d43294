"""Rules of docs/glossary.md: each noun once, and the class it names is in the file it links."""

import re
from pathlib import Path

import pytest

PAGE_FILE = Path(__file__).parents[2] / "docs" / "glossary.md"
PAGE = PAGE_FILE.read_text(encoding="utf-8")
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if re.match(r"\| (?!term )\w", line)]
TERMS = [row[0].strip() for row in ROWS]

NOUNS = """
pool, site, cluster, owner, node group, chip, device, plan, part, rank, replica, replica group, stage, micro-batch,
schedule, attempt, incarnation, agent, coordinator, lease, fence, allocation, link, route, victim, order, snapshot,
checkpoint, supervisor, worker, transport, connection, calibration, profile, placement, refusal
"""


def test_each_term_is_defined_once():
    """No term has two rows, and each has a meaning and its name in other systems."""
    assert len(TERMS) == len(set(TERMS))
    assert not [row for row in ROWS if len(row) != 3 or not all(cell.strip() for cell in row)]


@pytest.mark.parametrize("noun", [noun.strip() for noun in NOUNS.replace("\n", " ").split(",")])
def test_the_nouns_of_the_docs_are_defined(noun):
    """What the other pages presuppose has a row."""
    assert noun in TERMS


def test_a_class_is_defined_in_the_file_that_its_link_names():
    """A renamed or moved class fails here."""
    links = re.findall(r"\[`(\w+)`\]\(([^)]+\.py)\)", PAGE)
    assert links
    lost = [
        name
        for name, path in links
        if not re.search(
            rf"^(?:class {name}\b|def {name}\b|{name} = )", (PAGE_FILE.parent / path).read_text(), re.MULTILINE
        )
    ]
    assert not lost
