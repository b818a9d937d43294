"""`python -m scripts.compare_builds OLD_CHECKOUT SUBJECT [OPTION ...]`: a benchmark of two builds, side by side.

It runs `benchmarks.SUBJECT` of this checkout and of another one by turns, each in its own checkout with its own
sources, and prints every figure of both with the ratio of each round's pair. Options beside `--rounds` are the
benchmark's. Both need the same packages: the environment of this command. Ctrl-C ends it with the rounds so far.

  git worktree add ../old e72504a
  python -m scripts.compare_builds ../old wan_pipeline distance --quick
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent.parent
ROUNDS = 5

Figures = dict[str, tuple[float, str]]
"""Value and unit of each row of a run, by what it measures."""

_MEASURED = re.compile(r" ?\([^()]*\)")
"""Words of a row that differ from run to run: the spread that it measured stands in brackets."""


@dataclass(frozen=True)
class Pair:
    """A figure of the old and the new build in every round in which both have it."""

    what: str
    unit: str
    old: tuple[float, ...]
    new: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """New over old, by round; nan where the old figure is 0."""
        return [new / old if old else math.nan for old, new in zip(self.old, self.new, strict=True)]

    def as_line(self) -> str:
        """Return the row of a Markdown table."""
        ratios = self.ratios
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        old, new = statistics.median(self.old), statistics.median(self.new)
        return f"| {self.what} | {old:.4g} | {new:.4g} | {self.unit} | {spread} |"


def parse_rows(text: str) -> Figures:
    """Return the figures of a benchmark's output with `--json`; equal descriptions get a number."""
    found: Figures = {}
    seen: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        what = _MEASURED.sub("", row["what"])
        seen[what] += 1
        found[what if seen[what] == 1 else f"{what} #{seen[what]}"] = float(row["ours"]), str(row["unit"])
    return found


def run_benchmark(checkout: Path, words: Sequence[str]) -> Figures:
    """Run `benchmarks.SUBJECT` of a checkout with its options.

    Raises `SystemExit` if it prints no figures: a missed target alone is no failure here.
    """
    paths = os.pathsep.join([str(checkout / "src"), str(checkout)])
    command = [sys.executable, "-m", f"benchmarks.{words[0]}", "--json", *words[1:]]
    done = subprocess.run(  # noqa: S603 - this Python with modules of the checkouts
        command, cwd=checkout, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    found = parse_rows(done.stdout)
    if not found:
        raise SystemExit(f"{checkout}: benchmarks.{words[0]} printed no figures: {done.stderr.strip()[-600:]}")
    return found


def compare(
    old: Path, new: Path, words: Sequence[str], rounds: int,
    run: Callable[[Path, Sequence[str]], Figures] = run_benchmark,
) -> tuple[list[Pair], list[str]]:  # fmt: skip
    """Run both builds by turns, each first in every other round; return the pairs, and what only one build measures."""
    runs: dict[Path, list[Figures]] = {old: [], new: []}
    for turn in range(rounds):
        try:
            for checkout in (old, new) if turn % 2 == 0 else (new, old):
                runs[checkout].append(run(checkout, words))
        except KeyboardInterrupt:
            if turn == 0:
                raise
            runs = {checkout: found[:turn] for checkout, found in runs.items()}
            break
        print(f"round {turn + 1} of {rounds} done", file=sys.stderr, flush=True)
    names = {name: unit for found in runs[new] for name, (_, unit) in found.items()}
    both = [name for name in names if all(name in found for side in runs.values() for found in side)]
    pairs = [
        Pair(name, names[name], *(tuple(found[name][0] for found in runs[side]) for side in (old, new)))
        for name in both
    ]
    every = {name for side in runs.values() for found in side for name in found}
    return pairs, sorted(every - set(both))


def main(words: Sequence[str] | None = None) -> int:
    """Compare the builds that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_builds", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("old", metavar="OLD_CHECKOUT", type=Path, help="a checkout of the other build")
    parser.add_argument("subject", metavar="SUBJECT", help="a benchmark that both have")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"runs of each build (default: {ROUNDS})")
    asked, options = parser.parse_known_args(words)
    if asked.rounds < 1:
        parser.error(f"--rounds is {asked.rounds}: at least 1")
    old = asked.old.resolve()
    for checkout in (old, HERE):
        if not (checkout / "benchmarks" / f"{asked.subject}.py").is_file():
            parser.error(f"{checkout} has no benchmarks/{asked.subject}.py")
    pairs, unpaired = compare(old, HERE, [asked.subject, *options], asked.rounds)
    print("| what | old | new | unit | new over old: median (spread) |\n|---|---|---|---|---|")
    print("\n".join(pair.as_line() for pair in pairs))
    for what in unpaired:
        print(f"not in every run of both: {what}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
