"""Rules of the guides for extensions: a reader who does what a guide says, and no more, ends with what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    """Chips, model families, site adapters, schedules and transports."""
    stems = [page.stem for page in GUIDES]
    assert stems == [f"add-a-{seam}" for seam in ("chip", "model-family", "schedule", "site-adapter", "transport")]
