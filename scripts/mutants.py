"""`python -m scripts.mutants`: change one expression of the pure core at a time, and count what the tests notice.

Each package of `[tool.mutants]` in `pyproject.toml` names its source files and the tests that state its rules.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import os
import random
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from scripts.mutant_list import Mutant
    from scripts.mutant_runs import Status

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
Z_95 = 1.959964
"""The normal quantile of a two-sided 95 % interval."""

DESELECTED = "not slow and not root and not gpu and not on_the_clock"


@dataclass(frozen=True, kw_only=True)
class MutatedPackage:
    """Source files, as glob patterns below `root`, and the tests that state their rules."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    root: Path

    def mutants(self, patterns: Sequence[str]) -> list[Mutant]:
        """Return the mutants whose name matches one of `patterns`, in the order of their files."""
        from scripts.mutant_list import list_mutants, module_name  # loads libcst and mutmut, 0.8 s

        source_root = self.root / "src"
        paths = sorted({path for source in self.sources for path in self.root.glob(source)})
        named = [path for path in paths if any(may_match(module_name(path, source_root), p) for p in patterns)]
        mutants = [mutant for path in named for mutant in list_mutants(path, source_root)]
        return [mutant for mutant in mutants if any(fnmatch.fnmatchcase(mutant.name, p) for p in patterns)]


def packages(root: Path = ROOT) -> list[MutatedPackage]:
    """Return the packages of `[tool.mutants]` in `pyproject.toml` of the folder `root`."""
    table = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mutants"]
    return [
        MutatedPackage(name=name, sources=tuple(entry["sources"]), tests=tuple(entry["tests"]), root=root)
        for name, entry in table.items()
    ]


def may_match(module: str, pattern: str) -> bool:
    """Tell whether the name of a mutant of `module` can match `pattern`, without making the mutants."""
    literal, start = re.split(r"[*?[]", pattern, maxsplit=1)[0], f"{module}."
    return literal.startswith(start) or start.startswith(literal)


def draw(mutants: Sequence[T], sample: int | None, seed: int) -> list[T]:
    """Return `sample` of `mutants` drawn without replacement, all where there are no more or none is asked for."""
    if sample is None or sample >= len(mutants):
        return list(mutants)
    return random.Random(seed).sample(list(mutants), sample)  # noqa: S311 - no secret


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of which `hits` of `trials` were seen (Wilson 1927)."""
    if not trials:
        return 0.0, 1.0
    share, weight = hits / trials, Z_95**2 / trials
    middle = (share + weight / 2) / (1 + weight)
    half = sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


def run_mutants(package: MutatedPackage, mutants: Sequence[Mutant], children: int) -> dict[str, Status]:
    """Return the status of each of `mutants` by name; survivors are printed as they are found."""
    from scripts.mutant_runs import MutantRuns

    statuses: dict[str, Status] = {}

    def report(mutant: Mutant, status: Status) -> None:
        statuses[mutant.name] = status
        if status not in ("killed", "timeout"):
            print(f"{status}: {mutant.name}\n{mutant.difference}\n", flush=True)

    os.environ.setdefault("TEST_PROFILE", "thorough")  # `tests/conftest.py`: a property test tries 100 examples
    plugin = MutantRuns(mutants, package.root / "src", children, report)
    arguments = ["-q", "-s", "-p", "no:cacheprovider", f"--rootdir={package.root}", "-m", DESELECTED]
    code = pytest.main([*arguments, *(str(package.root / test) for test in package.tests)], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"{package.name}: pytest ended with {code}; its tests must pass without a mutant")
    return statuses


def row(package: str, num_mutants: int, statuses: dict[str, Status]) -> str:
    """Return a row of the table: counts by status, the share killed and its interval."""
    counts = Counter(statuses.values())
    killed, tried = counts["killed"] + counts["timeout"], len(statuses) - counts["not run"]
    low, high = wilson_interval(killed, tried)
    figures = [counts[status] for status in ("killed", "timeout", "survived", "no test", "not run")]
    share = f"{killed / tried:.1%}" if tried else ""
    interval = f"{low:.1%} to {high:.1%}" if tried < num_mutants else "all tried"
    return f"| {package} | {num_mutants:,} | {' | '.join(map(str, figures))} | {share} | {interval} |"


HEADER = """\
| package | mutants | killed | timeout | survived | no test | not run | share killed | 95 % interval |
|---|---|---|---|---|---|---|---|---|"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Test the mutants that the command line names, and print one row per package."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m scripts.mutants")
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="NAME", help="such as 'isthmus.site.*'")
    parser.add_argument("--sample", type=int, help="test that many mutants of each package, drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--children", type=int, default=1, help="processes at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of pyproject.toml, src and tests")
    options = parser.parse_args(arguments)
    rows = []
    for package in packages(options.root.resolve()):
        mutants = package.mutants(options.patterns)
        drawn = draw(mutants, options.sample, options.seed)
        if drawn:
            with multiprocessing.get_context("fork").Pool(1) as process:  # as each package imports modules of its own
                statuses = process.apply(run_mutants, (package, drawn, options.children))
            rows.append(row(package.name, len(mutants), statuses))
    if not rows:
        raise SystemExit(f"no mutant is named {' or '.join(options.patterns)}; names look like isthmus.site.*")
    print(HEADER, *rows, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
