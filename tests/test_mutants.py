"""`scripts/mutants.py` finds what no test states: on a small package whose tests miss rules that are known here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutants import ROOT, draw, may_match, packages, wilson_interval

SOURCE = """
class Base:
    def fee(self):
        return 2


class Parcel(Base):
    def fee(self):
        return super().fee() + 1


def price(weight, limit=10):
    return 3 if weight > limit else 1


def count_down(number):
    while number:
        number -= 1
    return "done"


def unknown(text):
    return text + "!"
"""
TESTS = """
import pytest

from shop.price import Parcel, count_down, price


def test_no_stack_is_endless():  # and none takes away what observes the tests after it
    with pytest.raises(RecursionError):
        endless()


def endless():
    endless()


def test_a_parcel_costs_one_more():
    assert Parcel().fee() == 3


def test_what_weighs_more_costs_more():
    assert (price(5), price(20)) == (1, 3)


def test_it_ends():
    assert count_down(3) == "done"
"""
CONFIGURATION = """
[tool.mutants.shop]
sources = ["src/shop/*.py"]
tests = ["tests/test_price.py"]
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with the package `shop`."""
    for name, text in (
        ("src/shop/__init__.py", ""),
        ("src/shop/price.py", SOURCE),
        ("tests/test_price.py", TESTS),
        ("pyproject.toml", CONFIGURATION),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command on the folder `root`."""
    command = [sys.executable, "-m", "scripts.mutants", "--root", str(root), *arguments]
    paths = os.pathsep.join([str(root / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_each_mutant_gets_the_status_that_its_tests_give_it(shop: Path) -> None:
    """Survivors show what no test states: the price at the limit, and what a default value is near it."""
    done = run(shop)
    assert done.returncode == 0, done.stdout + done.stderr
    survivors = {line.split()[-1] for line in done.stdout.splitlines() if line.startswith("survived: ")}
    assert {name.rpartition("__mutmut_")[0] for name in survivors} == {"shop.price.x_price"}
    assert "+return 3 if weight >= limit else 1" in done.stdout
    assert "+weight, limit=11" in done.stdout
    assert "no test: shop.price.x_unknown__mutmut_1\n-return text + '!'\n+return text - '!'" in done.stdout
    *_, table = done.stdout.splitlines()
    cells = [cell.strip() for cell in table.strip("|").split("|")]
    package, mutants, killed, timeouts, survived, untested, not_run, _, interval = cells
    assert (package, survived, timeouts, not_run, interval) == ("shop", "2", "3", "0", "all tried")
    assert int(mutants) == sum(map(int, (killed, timeouts, survived, untested)))


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_are_named(shop: Path) -> None:
    """Else every mutant would count as killed."""
    (shop / "tests/test_price.py").write_text(TESTS + "\n\ndef test_wrong():\n    assert False\n")
    done = run(shop, "shop.price.x_price*")
    assert done.returncode != 0
    assert "these tests fail without a mutant: tests/test_price.py::test_wrong" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_name_that_matches_no_mutant_is_refused(shop: Path) -> None:
    """A typing mistake is not a package without survivors."""
    done = run(shop, "shop.prize.*")
    assert done.returncode != 0
    assert "no mutant is named shop.prize.*" in done.stderr


def test_a_sample_is_drawn_without_replacement_and_the_seed_fixes_it() -> None:
    """Two seeds give two samples, and a sample of more than there is gives all."""
    mutants = list(range(100))
    one, again, other = (draw(mutants, 20, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert len(set(one)) == 20
    assert draw(mutants, 200, 1) == draw(mutants, None, 1) == mutants


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0), (0, 0, 0.0, 1.0)],
)
def test_the_interval_is_that_of_wilson(hits: int, trials: int, low: float, high: float) -> None:
    """81 of 263 is the worked example of Newcombe (1998), and no trial says nothing."""
    assert wilson_interval(hits, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [("*", True), ("isthmus.site.*", True), ("isthmus.site.machine.x_f__mutmut_1", True), ("isthmus.sim*", False)],
)
def test_only_files_with_a_matching_name_are_mutated(pattern: str, matches: bool) -> None:
    """Making the mutants of a file takes seconds."""
    assert may_match("isthmus.site.machine", pattern) is matches


def test_every_package_names_files_and_tests_that_exist() -> None:
    """A file that moved would silently leave the figures."""
    for package in packages():
        for pattern in (*package.sources, *package.tests):
            assert list(ROOT.glob(pattern)), f"{package.name}: {pattern}"
