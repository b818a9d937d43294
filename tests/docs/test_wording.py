"""Rules of wording: the patterns that CONTRIBUTING.md forbids occur nowhere in sources, docs and README."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Wording")[1]
PATTERNS = SECTION.split("```text\n")[1].split("```")[0].splitlines()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_forbidden_pattern_does_not_occur(pattern):
    """`grep -riE` of each pattern prints nothing; files of others, with their licences, have their own words."""
    command = ["grep", "-rniEI", "--exclude-dir=vendor", "--", pattern, "src", "docs", "README.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr


def test_the_list_has_the_words_that_began_it():
    """The first pattern is the one of the issue that asked for plain English."""
    assert PATTERNS[0] == r"\b(nobody|whoever|anew|whom)\b"
    assert all(re.compile(pattern) for pattern in PATTERNS)
