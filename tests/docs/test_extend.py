"""Rules of the guides for extensions: a reader who does what a guide says, and no more, ends with what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from isthmus.agent.adapters.check_adapter import adapter_rules
from tests.docs.follow_guide import ROOT, copy_repository, follow_guide

GUIDES = sorted((ROOT / "docs" / "extend").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_can_be_followed_to_the_letter(page: Path, tmp_path: Path) -> None:
    """Its files, edits and commands, applied in order to a copy of the repository, all succeed and pass the linter."""
    folder = copy_repository(tmp_path)
    written = [str(file) for file in follow_guide(page, folder)]
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", *dict.fromkeys(written)]
        done = subprocess.run(command if written else ["true"], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


def test_every_seam_has_a_guide() -> None:
    """Chips, model families, site adapters, schedules, strategies, transports and vendors' libraries."""
    stems = [page.stem for page in GUIDES]
    seams = ("chip", "model-family", "schedule", "site-adapter", "strategy", "transport", "vendor")
    assert stems == [f"add-a-{seam}" for seam in seams]


def test_the_page_on_schedulers_counts_the_rules_of_the_kit() -> None:
    """By the part of the contract that each rule is of."""
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    shown = [int(number) for number in re.findall(r"^\| [^|]+ \| (\d+) \|", page, re.MULTILINE)]
    modules = Counter(rule.__module__ for rule in adapter_rules(holds=True, faults=True))
    assert sorted(shown) == sorted(modules.values())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```diff\n--- old.py\n-three = 3\n+three = 4\n```\n", "old.py has 0 times"),
        ("```diff\n--- old.py\n one = 1\n+two = 2\n```\n", "old.py has 2 times"),
        ("```python\n# old.py\n```\n", "creates old.py, which exists"),
        ("```console\n$ echo far; false\n```\n", "far"),
        ("```console\n$ echo far\nnear\n```\n", "expected:\nnear\n"),
    ],
)
def test_a_guide_that_cannot_be_followed_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    """An edit without its place, a new file that exists, a command that fails or prints something else."""
    (tmp_path / "old.py").write_text("one = 1\none = 1\n")
    page = tmp_path / "guide.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=complaint):
        follow_guide(page, tmp_path)


def test_edits_and_new_files_are_what_the_guide_shows(tmp_path: Path) -> None:
    """Hunks apply in order; a new file has the block's text; unmarked blocks change nothing."""
    (tmp_path / "old.py").write_text("one = 1\ntwo = 2\n")
    page = tmp_path / "guide.md"
    page.write_text(
        "```diff\n--- old.py\n-one = 1\n+one = 1.0\n@@\n two = 2\n+three = 3\n```\n\n"
        "A new file `sizes.json` in `models/`:\n\n```json\n{}\n```\n\n```text\nnothing\n```\n\n"
        "```console\n$ cat models/sizes.json old.py\n{}\n...\nthree = 3\n```\n"
    )
    assert follow_guide(page, tmp_path) == [Path("old.py")]
    assert (tmp_path / "old.py").read_text() == "one = 1.0\ntwo = 2\nthree = 3\n"
    assert (tmp_path / "models" / "sizes.json").read_text() == "{}\n"
