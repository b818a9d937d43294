"""Rules of the way from the README: what readers look for first is at most three clicks away."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _links(page):
    text = page.read_text(encoding="utf-8")
    return {(page.parent / link).resolve() for link in re.findall(r"\]\(((?!https?:|#)[^)#]+)", text)}


@pytest.mark.parametrize(
    "place",
    [
        "src/isthmus/plan/search/finish/score_plan.py",
        "src/isthmus/control/coordinator/advance_job.py",
        "src/isthmus/comm/tcp/peer.py",
    ],
)
@pytest.mark.parametrize("start", ["README.md", "docs/journey.md", "docs/architecture.md"])
def test_the_places_readers_look_for_are_near(start, place):
    """Where plans are scored, the parts of a job start together, and a tensor leaves for another cluster."""
    reached = {ROOT / start}
    for _ in range(3 if start == "README.md" else 2):
        reached |= {link for page in reached if page.suffix == ".md" for link in _links(page)}
    assert ROOT / place in reached


def test_readme_groups_its_links():
    """Use, Understand, Extend, in this order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == ["Use", "Understand", "Extend"]


@pytest.mark.slow
def test_the_site_builds_and_its_links_to_sources_lead_somewhere(tmp_path):
    """`mkdocs build --strict` passes, and the copies that source links point at are in the site."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = tmp_path / "journey" / "index.html"
    links = re.findall(r'href="([^"]*repository/[^"]*)"', page.read_text(encoding="utf-8"))
    assert len(links) > 50
    assert all((page.parent / link).resolve().is_file() for link in links)
